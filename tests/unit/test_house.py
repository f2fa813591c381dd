"""The rules of the house that no linter holds: file names, locked versions, scripts."""

import ast
import os
import re
import subprocess
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CODE = ("conf", "flows", "tasks", "tests", "infra")
BANNED_NAMES = {"utils", "helpers", "common", "base"}
SCRIPTS = ("install", "run", "test", "check", "certificates", "up", "down", "backup", "restore", "upgrade", "uninstall")
MAX_MODULES = 16
MAX_LINES = 500
INSTALLED_EXTRAS = ("dev", "ssh", "slurm", "s3", "postgres", "services")  # `cuda` is not part of the lock


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = list(project["dependencies"])
    for extra in INSTALLED_EXTRAS:
        texts += [text for text in project["optional-dependencies"][extra] if not text.startswith("paceline[")]
    return [Requirement(text) for text in texts]


def locked_versions() -> dict[str, Version]:
    lines = (ROOT / "infra" / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def scripts() -> list[Path]:
    """All files of infra/ and .ci/ that start with a line for a shell."""
    files = [path for folder in ("infra", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path for path in files if path.read_bytes().split(b"\n", 1)[0].startswith((b"#!/usr/bin/env bash", b"#!/bin/"))
    )


def test_a_file_is_named_after_what_it_holds():
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    assert paths
    assert [str(path) for path in paths if path.stem in BANNED_NAMES] == []


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_malicious_releases_are_excluded_by_name(name, version):
    (requirement,) = [requirement for requirement in requirements() if requirement.name == name]
    assert f"!={version}" in {str(specifier) for specifier in requirement.specifier}
    assert locked_versions()[name] != Version(version)


def test_lock_pins_torch():
    assert locked_versions()["torch"] == Version("2.13.0")


def test_lock_leaves_torchvision_out():
    # Beside a CPU torch it fails at import, and takes lightning and torchmetrics with it.
    assert "torchvision" not in locked_versions()


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_lock_satisfies_the_range(requirement):
    version = locked_versions()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version), f"infra/constraints.txt has {version}, pyproject.toml {requirement}"


def test_the_wheel_contains_every_file_that_the_product_reads():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    suffixes = {".yaml", ".j2", ".css"}
    files = {
        path for room in ("conf", "flows", "tasks") for path in (ROOT / room).rglob("*") if path.suffix in suffixes
    }
    assert files == packaged


def test_scripts_are_where_users_look():
    wanted = {ROOT / "infra" / name for name in SCRIPTS} | {ROOT / ".ci" / "run"}
    assert wanted <= set(scripts())


@pytest.mark.parametrize("script", scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_script_is_executable_and_parses(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def tracked_modules(*folders: str) -> list[Path]:
    """Python files of the repository's folders that are not a package's `__init__.py`."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if path.name != "__init__.py" and "src" not in path.relative_to(ROOT).parts]


def imports_of(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_folder_is_crowded_and_no_file_is_long():
    modules = tracked_modules("conf", "flows", "tasks", "infra")
    folders = Counter(path.parent for path in modules)
    assert {str(folder): number for folder, number in folders.items() if number > MAX_MODULES} == {}
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_nothing_imports_the_code_by_its_folders():
    """A module that is imported as `tasks.x` and as `paceline.tasks.x` exists twice."""
    old = re.compile(r"(conf|flows|tasks)(\.|$)")
    wrong = {str(path): sorted(filter(old.match, imports_of(path))) for path in tracked_modules(*CODE)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_no_modules_import_each_other():
    paths = {
        ".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in tracked_modules("conf", "flows", "tasks")
    }
    graph = {name: imports_of(path) & paths.keys() - {name} for name, path in paths.items()}
    assert list(TopologicalSorter(graph).static_order())  # CycleError names the circle
