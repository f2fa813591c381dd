"""Packages of users, as pip leaves them: modules beside a `dist-info` with entry points; and the one of the guide."""

import importlib
import sys
import tomllib
from contextlib import contextmanager

from paceline.conf import plugins
from tests.support.documents import ROOT, fences

EXTEND = ROOT / "infra" / "docs" / "guides" / "extend.md"
"""The guide whose toml and python blocks are the files of a package."""


def install(directory, name, modules, sources=None, models=None, version="1.0"):
    """Put a package where Python finds it.

    Args:
        directory: to be on the path.
        name: of the package, and of its folder.
        modules: their code by name, without suffix.
        sources: `module:attribute` by the name of the source.
        models: the same of models.
        version: of the package.
    """
    for module, code in modules.items():
        path = directory / name / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    for old in directory.glob(f"{name}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    facts = directory / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, offered in (("paceline.sources", sources), ("paceline.models", models)):
        lines += [f"[{group}]", *(f"{key} = {name}.{value}" for key, value in (offered or {}).items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def on_path(directory):
    """Packages in a directory are this process's for the body, and forgotten behind it."""
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        forget(path.name for path in directory.iterdir())


def forget(names):
    """What was imported of packages, as a new process has it."""
    plugins._loaded.clear()
    importlib.invalidate_caches()
    names = set(names)
    for module in [one for one in sys.modules if one.partition(".")[0] in names]:
        del sys.modules[module]


def write_example_package(directory):
    """Write the package of the guide, file by file, and return its folder."""
    blocks = [fence.body for fence in fences(EXTEND) if fence.language in ("toml", "python")]
    for body in blocks:
        path = directory / body.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return directory / "acme"


def install_example_package(directory):
    """Install that package where Python finds it."""
    folder = write_example_package(directory / "source")
    offered = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    modules = {path.stem: path.read_text() for path in (folder / "acme").glob("*.py")}
    entries = [
        {name: entry.removeprefix("acme.") for name, entry in offered[f"paceline.{kind}"].items()}
        for kind in ("sources", "models")
    ]
    install(directory, "acme", modules, *entries)
