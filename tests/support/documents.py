"""The documents of the repository as data: their commands, their links, the settings that they name."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "conf", "flows", "infra", "tasks", "tests")
HISTORY = ROOT / "infra" / "LOG.md"
"""Says what was typed on its days, and is never rewritten."""
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\((?!https?://)([^)\s]+)\)")
COMMENT = re.compile(r"(^|\s+)# .*$")


@dataclass(frozen=True)
class Fence:
    """A fenced block."""

    document: Path
    language: str
    body: str


def documents():
    """Every Markdown file."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return sorted(found)


def living():
    """Those that must be true today."""
    return [path for path in documents() if path != HISTORY]


def fences(path):
    """The fenced blocks of a document."""
    return [Fence(path, found["language"], found["body"]) for found in FENCE.finditer(path.read_text())]


def commands(fence):
    """A block's commands, one line each, without comments."""
    found, pending = [], ""
    for line in fence.body.splitlines():
        pending += COMMENT.sub("", line).strip()
        if pending.endswith("\\"):
            pending = pending.removesuffix("\\")
        elif pending:
            shlex.split(pending)  # a quotation that does not end is an error of the document
            found.append(" ".join(pending.split()))
            pending = ""
    assert not pending, f"{fence.document}: {pending} goes on after its block"
    return found


def all_commands():
    """The commands of all living documents, each once, in their order."""
    blocks = [fence for path in living() for fence in fences(path) if fence.language == "bash"]
    return list(dict.fromkeys(command for fence in blocks for command in commands(fence)))


def inline_codes():
    """(document, code) of what stands between backquotes in the text of living documents."""
    texts = [(path, FENCE.sub("", path.read_text())) for path in living()]
    return [(path, " ".join(code.split())) for path, text in texts for code in INLINE.findall(text)]


def links(path):
    """Relative links of a document, outside of its blocks."""
    return LINK.findall(FENCE.sub("", path.read_text()))


def anchors(path):
    """What links can lead to inside a document: its headings as GitHub calls them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
