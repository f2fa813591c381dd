"""Rebuilds the packages of an earlier run in folders that precede today's installation on a rank's Python path.

Names and sources are those of today's installation, and only versions and commits are taken from the record: whoever
can write to the store must not choose whose code is executed here. Only packages that a training step executes are
rebuilt. Their dependencies stay as they are today.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from paceline.conf.plugins import Plugin
from paceline.tasks import deadline
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.track.environment import git, package_versions

EXECUTED = ("torch", "lightning", "numpy")  # packages of a training step
UNAVAILABLE = "no version or commit of it is recorded that could be installed"
_VERSION, _COMMIT = re.compile(r"\d[\w.+!-]*"), re.compile(r"[0-9a-f]{40}")


class OldPackage(NamedTuple):
    """A package as an earlier run had it."""

    name: str
    before: str  # name and version then; of the user's packages also a digest
    now: str
    folder: Path | None = None  # where it is rebuilt


@dataclass(frozen=True)
class Rebuilt:
    """Packages of an earlier run."""

    packages: tuple[OldPackage, ...]
    current: tuple[str, ...]  # identities of the user's packages today
    missing: tuple[str, ...] = ()  # differences that could not be rebuilt, and why

    @property
    def path(self) -> str:
        """Folders for the start of the Python path; empty without a rebuilt package."""
        return os.pathsep.join(str(package.folder) for package in self.packages)

    @property
    def identities(self) -> tuple[str, ...]:
        """Identities of the user's packages on this path. A rank checks them when it starts."""
        before = {package.now: package.before for package in self.packages}
        return tuple(before.get(identity, identity) for identity in self.current)

    def without(self, names: Collection[str]) -> "Rebuilt":
        """Leave the named packages as they are today."""
        return replace(self, packages=tuple(package for package in self.packages if package.name not in names))


def package_commits(packages: Sequence[Plugin]) -> dict[str, str | None]:
    """Commits that the user's packages were installed from; None where unknown, or changed since."""
    return {package.package: _source(package.package)[1] for package in packages}


def rebuild(record: Mapping[str, Any], packages: Sequence[Plugin], folder: Path) -> Rebuilt:
    """Install what differs from the `environment.json` of an earlier run; raise TimeLimitError if time is over."""
    recorded = record.get("packages") or ()
    if len(recorded) != len(packages):
        recorded = [f"{package.package} (unknown)" for package in packages]
    rebuilt, missing = [], []
    for package, requirement in dict.fromkeys(_differences(record, packages, recorded)):
        place = folder / package.name
        if (fault := install_package(requirement, place) if requirement else UNAVAILABLE) is None:
            rebuilt.append(package._replace(folder=place))
        else:
            missing.append(f"{package.before} ({fault})")
    return Rebuilt(tuple(rebuilt), tuple(package.identity for package in packages), tuple(missing))


def _differences(
    record: Mapping[str, Any], packages: Sequence[Plugin], recorded: Sequence[str]
) -> Iterator[tuple[OldPackage, str]]:
    """Differences from the record, each with the requirement for pip; empty where pip cannot install it."""
    versions = package_versions()
    for name, version in (record.get("versions") or {}).items():
        if name in ("python", *EXECUTED) and version != versions.get(name):
            can_install = name in EXECUTED and _VERSION.fullmatch(str(version))
            package = OldPackage(name, f"{name} {version}", f"{name} {versions.get(name)}")
            yield package, f"{name}=={version}" if can_install else ""
    if record.get("code") != (code := code_fingerprint()):
        before, now = (f"Paceline's own code {each}" for each in (record.get("code"), code))
        yield OldPackage("paceline", before, now), ""
    for plugin, identity in zip(packages, recorded, strict=True):
        (source, _), name = _source(plugin.package), plugin.package
        commit, version = str((record.get("commits") or {}).get(name)), identity.removeprefix(f"{name} ").split(" ")[0]
        from_commit = source.replace("COMMIT", commit) if _COMMIT.fullmatch(commit) else ""
        can_install = not source and version != plugin.version and _VERSION.fullmatch(version)
        if identity != plugin.identity:
            package = OldPackage(name, identity, plugin.identity)
            yield package, f"{name}=={version}" if can_install else from_commit


def _source(package: str) -> tuple[str, str | None]:
    """Address of an installed package's repository for pip, and its commit (PEP 610); empty without one."""
    try:
        known = json.loads(metadata.distribution(package).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return "", None
    if "vcs_info" in known:
        return f"{known['vcs_info']['vcs']}+{known['url']}@COMMIT", known["vcs_info"]["commit_id"]
    place = Path(unquote(urlsplit(known.get("url", "")).path))
    root = git(place, "rev-parse", "--show-toplevel") if "dir_info" in known else None
    if root is None:
        return "", None
    is_clean = git(place, "status", "--porcelain", "--untracked-files=no", "--", ".") == ""
    subfolder = (git(place, "rev-parse", "--show-prefix") or "").rstrip("/")  # with a slash, pip takes all for a path
    source = f"git+file://{root}@COMMIT" + (f"#subdirectory={subfolder}" if subfolder else "")
    return source, git(place, "rev-parse", "HEAD") if is_clean else None


def install_package(requirement: str, folder: Path, interpreter: str = sys.executable) -> str | None:
    """Install one package without its dependencies; why that failed, or None. Versions come as wheels alone."""
    wheels = ["--only-binary", ":all:"] if "==" in requirement else []
    options = ["--no-deps", "--upgrade", "--no-input", "--quiet", *wheels, "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", *options, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline.seconds_left(), check=False)
    except subprocess.TimeoutExpired:
        deadline.check()
        raise
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1]) if done.returncode else None
