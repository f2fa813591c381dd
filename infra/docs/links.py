"""A hook of MkDocs: pages and pictures outside of infra/docs, and links to them, without a network.

On GitHub the documents are one tree of files. On the website the folder infra/docs is all there is. So this hook adds
the pages of `PAGES` and linked pictures to the website, and turns a link to any other file into its path as text.
"""

import os
import re
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "infra" / "docs"
PAGES = {
    "README.md": "outside/overview.md",
    "conf/README.md": "outside/presets.md",
    "infra/README.md": "outside/operations.md",
    "infra/CHANGELOG.md": "outside/changelog.md",
    ".github/CONTRIBUTING.md": "outside/contributing.md",
    ".github/SECURITY.md": "outside/security.md",
    ".github/SUPPORT.md": "outside/support.md",
}
"""Where files of the repository stand on the website."""
PICTURES = ROOT / "infra" / "pictures"
FENCE = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that lie outside of the folder."""
    for path, place in PAGES.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for picture in sorted(PICTURES.iterdir()):
        files.append(File.generated(config, f"outside/pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where their targets stand on the website."""
    return linked(markdown, Path(page.file.abs_src_path or DOCS), page.file.src_uri)


def linked(markdown: str, source: Path, place: str) -> str:
    """The text of a file, at its place on the website, with links for there; blocks stay as they are."""
    replace = partial(_link, source=source, place=place)
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, LINK.sub(replace, markdown[end:])])


def _link(link: re.Match[str], source: Path, place: str) -> str:
    target, _, anchor = link["target"].partition("#")
    if "://" in target or target.startswith("mailto:") or not target:
        return link.group()
    file = (source.parent / target).resolve()
    page = _website_path(file)
    if page is None:
        path = os.path.relpath(file, ROOT)
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"
    address = os.path.relpath(page, Path(place).parent)
    return f"{link['mark']}[{link['text']}]({address}{'#' if anchor else ''}{anchor})"


def _website_path(path: Path) -> str | None:
    """Where a file of the repository stands on the website; None if it is not there."""
    if path.is_relative_to(DOCS) and path.suffix in (".md", ".png", ".svg"):
        return str(path.relative_to(DOCS))
    if path.parent == PICTURES:
        return f"outside/pictures/{path.name}"
    return PAGES.get(str(path.relative_to(ROOT))) if path.is_relative_to(ROOT) else None
