"""Two lock files as the ends of a search: what differs between them, and sides that have a part of the differences.

Each differing version is installed once, without its dependencies, into a folder of its own. A side has the folders of
its versions at the start of the Python path, so that they hide what is installed. What the files have in common must
be installed already.

A minimal set of packages is found by repeated binary search, a variant of QuickXplain (Junker 2004, "QuickXplain:
preferred explanations and relaxations for over-constrained problems"). The packages are put in a fixed order. A
bisection finds the smallest k for which the program is slower with the first k packages changed. Package k belongs to
the set, because without it the program is not slower; the packages after it do not. If package k alone does not make
the program slower, the next bisection is over package k and then those before it, and so on. If one package is the
cause, at most two bisections are needed. The j-th bisection spends a 2^-j-th part of the level, so that all of them
together err with at most the level.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.judge.bisection import LEVEL, Bisection
from paceline.tasks.judge.records import Commit, Side, SideName
from paceline.tasks.records.record import Record
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
START = Commit(name="the good", subject="versions")


class Package(Record):
    """A package that differs between two lock files."""

    name: str
    good: str | None  # its version in the good file; None where it is absent
    bad: str | None

    @property
    def commit(self) -> Commit:
        """Its change, in the form of a search."""
        return Commit(name=self.name, subject=f"{self.good or 'absent'} -> {self.bad or 'absent'}")

    def requirement(self, *, is_bad: bool) -> str | None:
        """What pip installs for a side; None for nothing."""
        version = self.bad if is_bad else self.good
        return version and f"{self.name}=={version}"


Group = tuple[Package, ...]
SearchChain = Callable[[Sequence[Group], float], Bisection]
"""Searches a chain, at a level, for the group with whose change the program becomes slower. Each group is changed with
all those before it. The name of a found commit is that of `change_of`."""


def change_of(group: Group) -> Commit:
    """The changes of a group as one."""
    commits = [package.commit for package in group]
    return Commit(name=" and ".join(each.name for each in commits), subject=", ".join(each.subject for each in commits))


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
    name: SideName, side: Side, packages: Sequence[Package], changed: Collection[Package], folder: Path
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


def find_minimal_set(packages: Sequence[Package], search: SearchChain) -> Bisection:
    """Find packages whose changes together make a program slower, and of which none can be left out."""
    searches = list[Bisection]()
    needed: Group = ()
    chain: list[Group] = [(package,) for package in packages]
    while True:
        try:
            found = search(chain, LEVEL / 2 ** (len(searches) + 1))
        except InputError as error:
            if not searches:
                raise
            return _conclude(searches, needed, chain, f"the set may not be minimal: {one_line(error)}")
        searches.append(found)
        names = [change_of(group).name for group in chain]
        positions = [names.index(commit.name) for commit in found.commits]
        if found.outcome != "FOUND":
            return _conclude(searches, needed, [chain[position] for position in positions], found.reason)
        (position,) = positions
        is_sufficient = bool(needed) and position == 0
        before = chain[bool(needed) : position]
        needed = needed if is_sufficient else (*needed, *chain[position])
        if is_sufficient or not before:
            return _conclude(searches, needed)
        chain = [needed, *before]


def _conclude(
    searches: Sequence[Bisection], needed: Group, others: Sequence[Group] = (), fault: str | None = None
) -> Bisection:
    """The outcome of all searches: the needed packages, and without a minimal set the others that may be, and why."""
    packages = dict.fromkeys([*needed, *(package for group in others for package in group)])
    commits = tuple(package.commit for package in packages)
    names, first, last = " and ".join(commit.label for commit in commits), searches[0], searches[-1]
    outcome, reason = last.outcome, fault
    if fault is None:
        how = "make it slower together, and none of them can be left out" if needed[1:] else "makes it slower"
        reason = f"{names} {how}"
    elif last.outcome == "FOUND" or len(searches) > 1:
        outcome = "UNDECIDED"
    whole = last if outcome == "FOUND" and not needed[1:] else first
    facts = {
        "outcome": outcome,
        "reason": reason,
        "commits": commits,
        "ratio": whole.ratio,
        "series": tuple(series for search in searches for series in search.series),
        "level": LEVEL,
        "seconds": sum(search.seconds for search in searches),
    }
    return first.model_copy(update=facts)
