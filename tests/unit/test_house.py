"""The rules of the house that no linter holds: file names, locked versions, scripts."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
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
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "infra" / "lock.txt").read_text(), re.MULTILINE)
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
    assert requirement.specifier.contains(version), f"infra/lock.txt has {version}, pyproject.toml {requirement}"


@pytest.mark.parametrize("name", ["lock.txt", "lock-cpu.txt", "lock-cuda.txt"])
def test_every_locked_version_has_hashes(name):
    blocks = re.split(r"\n(?=\S)", (ROOT / "infra" / name).read_text().strip())
    assert blocks
    assert [block for block in blocks if not re.search(r"^[\w.-]+==\S+.*\n +--hash=sha256:[0-9a-f]{64}", block)] == []


def test_a_package_with_another_content_is_not_installed(tmp_path):
    """An index serves a wheel under the name and version of a locked package; the command is that of infra/install."""
    name, version = "locket", locked_versions()["locket"]
    block = re.search(rf"^{name}==[^=]*(?:\n +--hash.*)+", (ROOT / "infra" / "lock.txt").read_text(), re.MULTILINE)[0]
    (tmp_path / "lock.txt").write_text(block.rstrip(" \\"))
    wheel = tmp_path / f"{name}-{version}-1planted-py3-none-any.whl"
    facts = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "planted = True")
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    script = (ROOT / "infra" / "install").read_text()
    options = re.search(r"hashes=\((.*)\)", script)[1].split()
    assert script.count('"${pip[@]}" "${hashes[@]}" --requirement') == 3
    source = [
        "--no-index",
        f"--find-links={tmp_path}",
        f"--target={tmp_path}/out",
        f"--requirement={tmp_path}/lock.txt",
    ]
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", *source]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
    assert not (tmp_path / "out" / f"{name}.py").exists()


def audit(*locks, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "infra" / "audit", *locks],
        env=os.environ | {"PYTHONPATH": f"{ROOT}/infra/src:{ROOT}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_audit_names_what_is_vulnerable(tmp_path):
    assert audit(ROOT / "infra" / "lock.txt").returncode == 0
    bad = tmp_path / "lock.txt"
    bad.write_text("lightning==2.6.2 \\\n    --hash=sha256:00\n")
    done = audit(bad)
    assert done.returncode == 1
    assert "lightning 2.6.2 (==2.6.2): was malware" in done.stderr
    bad.write_text("")
    assert audit(bad).returncode == 1, "an empty lock is not a sound one"


def test_the_audit_reads_every_lock(tmp_path):
    """Also the CUDA libraries, which are installed next to the packages of lock.txt."""
    shutil.copy(ROOT / "infra" / "audit", tmp_path)
    (tmp_path / "lock.txt").write_text("numpy==2.0.0\n")
    (tmp_path / "lock-cuda.txt").write_text("lightning==2.6.2 \\\n    --hash=sha256:00\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/infra/src:{ROOT}"}
    command = [sys.executable, tmp_path / "audit"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lock-cuda.txt: lightning 2.6.2 (==2.6.2): was malware" in done.stderr
    assert audit().returncode == 0


def test_the_audit_knows_the_data_base_or_says_that_it_is_missing(tmp_path):
    bad = tmp_path / "lock.txt"
    bad.write_text("Pillow==8.1.0\n")
    hide = "u.find_spec = lambda name, *rest: None if name == 'safety_db' else find(name, *rest)"
    (tmp_path / "sitecustomize.py").write_text(f"import importlib.util as u\nfind = u.find_spec\n{hide}\n")
    missing = audit(bad, PYTHONPATH=f"{tmp_path}:{ROOT}/infra/src:{ROOT}")
    assert missing.returncode == 0
    assert "skipped, because safety-db is not installed" in missing.stdout
    if importlib.util.find_spec("safety_db") is None:
        pytest.skip("needs safety-db")
    done = audit(bad, PYTHONPATH=os.environ.get("PYTHONPATH", "") + f":{ROOT}/infra/src:{ROOT}")
    assert done.returncode == 1
    assert "pillow 8.1.0" in done.stderr


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


PRIVATE = ROOT / "infra" / "decisions" / "0038-one-private-class-of-lightning.md"


def test_one_private_class_of_lightning_is_subclassed_which_a_decision_explains():
    bases = set()
    for path in (path for folder in ("conf", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        private = {
            alias.asname or alias.name
            for node in imports
            if node.module.partition(".")[0] in ("lightning", "pytorch_lightning")
            for alias in node.names
            if alias.name.startswith("_")
        }
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        bases |= {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)} & private
    assert bases == {"_TrainingEpochLoop"}
    assert all(base in PRIVATE.read_text() for base in bases)


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
