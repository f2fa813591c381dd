"""Two lock files as the ends of a search: what differs between them, and sides that have a part of the differences.

Each differing version is installed once, without its dependencies, into a folder of its own. A side has the folders of
its versions at the start of the Python path, so that they hide what is installed. What the files have in common must
be installed already.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from paceline.tasks.errors import InputError
from paceline.tasks.judge.minimal_set import START, Change
from paceline.tasks.judge.records import Side, SideName
from paceline.tasks.track.rebuild import install_package

IGNORED_OPTIONS = (
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--trusted-host",
    "--only-binary",
    "--no-binary",
    "--pre",
)
"""Lines of a lock file that start with these are ignored; they are not passed to pip."""
MAX_LETTERS = 200  # of pip's message


class Package(Change):
    """A package that differs between two lock files, with its versions."""

    def requirement(self, *, is_bad: bool) -> str | None:
        """What pip installs for a side; None for nothing."""
        version = self.bad if is_bad else self.good
        return version and f"{self.name}=={version}"


def read_lock(path: Path, setting: str) -> dict[str, str]:
    """The versions in a lock file of pip, by package. Raises InputError: a line is not a package with its version."""
    try:
        lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fault = f"{setting} {path} cannot be read as text"
        raise InputError(fault, hint=f"pip freeze > {path}", setting=setting) from error
    versions = dict[str, str]()
    for line in lines:
        text = line.split(" #")[0].split(" --")[0].strip()
        if not text or text.startswith("#") or text.split("=")[0].split()[0] in IGNORED_OPTIONS:
            continue
        requirement = _pinned(text)
        if requirement is None:
            fault = f"{setting} {path}: {text[:80]} is not a package with one version"
            raise InputError(fault, hint=f"pip freeze > {path}", setting=setting)
        if requirement.marker is None or requirement.marker.evaluate():
            (pin,) = requirement.specifier
            versions[canonicalize_name(requirement.name)] = pin.version
    return versions


def _pinned(text: str) -> Requirement | None:
    """A requirement of exactly one version; None for anything else."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    pins = [each for each in requirement.specifier if each.operator == "==" and not each.version.endswith("*")]
    return requirement if len(pins) == len(requirement.specifier) == 1 else None


def list_packages(good: Path, bad: Path) -> list[Package]:
    """What differs between two lock files. Raises InputError: nothing does, or a file cannot be read."""
    before, after = read_lock(good, "--good"), read_lock(bad, "--bad")
    names = sorted(before.keys() | after.keys())
    packages = [Package(name=name, good=before.get(name), bad=after.get(name)) for name in names]
    packages = [package for package in packages if package.good != package.bad]
    if not packages:
        fault = f"--bad {bad} has the same versions as --good {good}"
        raise InputError(fault, hint="name the lock file of a fast installation with --good", setting="--bad")
    return packages


def install_versions(packages: Sequence[Package], command: str, folder: Path) -> None:
    """Install both versions of each package below a folder, as wheels.

    Raises InputError: one cannot be installed, or is absent in a file and cannot be hidden from its side.
    """
    interpreter = _interpreter(command)
    for package in packages:
        if None in (package.good, package.bad) and _is_installed(package.name, interpreter):
            setting = "--good" if package.good is None else "--bad"
            fault = f"{setting}: {package.name} is absent in this file, and {interpreter} has it installed"
            raise InputError(fault, hint=f"{interpreter} -m pip uninstall {package.name}", setting=setting)
    for package in packages:
        for setting, requirement in (
            ("--good", package.requirement(is_bad=False)),
            ("--bad", package.requirement(is_bad=True)),
        ):
            if requirement and (reason := install_package(requirement, folder / requirement, interpreter)):
                fault = f"{setting}: {requirement} cannot be installed from a wheel ({reason[:MAX_LETTERS]})"
                raise InputError(fault, hint=f"pip download --no-deps {requirement}", setting=setting)


def _is_installed(name: str, interpreter: str) -> bool:
    program = "import importlib.metadata, sys; importlib.metadata.distribution(sys.argv[1])"
    return subprocess.run([interpreter, "-c", program, name], capture_output=True, check=False).returncode == 0


def _interpreter(command: str) -> str:
    """The Python that a command starts, or else the first one of the path."""
    word = command.split(maxsplit=1)[0].strip("'\"")
    return shutil.which(word if Path(word).name.startswith("python") else "python") or sys.executable


def side_with(
    name: SideName, side: Side, packages: Sequence[Package], changed: Collection[Change], folder: Path
) -> Side:
    """A side with the bad versions of the changed packages, and the good ones of the others."""
    requirements = [package.requirement(is_bad=package in changed) for package in packages]
    folders = [str(folder / requirement) for requirement in requirements if requirement is not None]
    exports = ""
    for variable, paths in (("PYTHONPATH", folders), ("PATH", [f"{path}/bin" for path in folders])):
        if paths:  # an empty entry would be the current directory
            exports += f'export {variable}={shlex.quote(os.pathsep.join(paths))}"${{{variable}:+:${variable}}}"; '
    changes = [package.commit.label for package in packages if package in changed]
    label = f"{len(changes)} of {len(packages)} changes" if len(changes) > 1 else "".join(changes) or START.label
    update = {"name": name, "command": exports + side.command, "shown": side.command, "revision": label}
    return side.model_copy(update=update)
