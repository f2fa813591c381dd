"""The installed packages: against the ranges of this package, its lock, and releases that are known to be bad."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.track.environment import LOCK, installed

NAME = "paceline"
MAX_NAMED = 5
BAD_RELEASES = {
    "lightning": ("==2.6.2,==2.6.3", "was malware (GHSA-w37p-236h-pfx3)"),
    "pytorch-lightning": ("==2.6.2,==2.6.3", "was malware (GHSA-w37p-236h-pfx3)"),
    "fastapi": (">=0.151", "breaks Prefect's server at its import"),
    "sqlalchemy": (">=2.1", "keeps Prefect's scheduler from making runs: nothing starts by schedule"),
}
"""Alternatives, separated by commas, and why."""


def examine_packages() -> list[Finding]:
    """Python and the packages."""
    return [_python(), _ranges(), _lock(), _bad_releases(), _torchvision()]


def _python() -> Finding:
    wanted = metadata.metadata(NAME)["Requires-Python"]
    found = platform.python_version()
    if Requirement(f"python{wanted}").specifier.contains(found):
        return good("python", found)
    return bad("python", f"{found}, {wanted} is needed", "make the environment with a newer Python")


def _ranges() -> Finding:
    needed = [Requirement(text) for text in metadata.requires(NAME) or []]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = []
    for one in needed:
        found = installed(one.name)
        if found is None or not one.specifier.contains(found, prereleases=True):
            wrong.append(f"{one.name} {found or 'missing'} ({one.specifier or 'any'} is needed)")
    if not wrong:
        return good("packages", f"{len(needed)} requirements met")
    return bad("packages", "; ".join(wrong), "install again: infra/install, or pip install with infra/constraints.txt")


def _lock() -> Finding:
    if not LOCK.is_file():
        return good("lock", "not part of this installation")
    pins = dict(line.split("==") for line in LOCK.read_text(encoding="utf-8").split() if "==" in line)
    other = []
    for name, pinned in pins.items():
        found = installed(canonicalize_name(name))
        if found is not None and Version(found).public != Version(pinned).public:
            other.append(f"{name} {found} (locked: {pinned})")
    if not other:
        return good("lock", f"as locked, {len(pins)} pins")
    named = "; ".join(other[:MAX_NAMED]) + ("; ..." if len(other) > MAX_NAMED else "")
    remedy = "fine if meant; runs with other versions are not compared. infra/install goes back"
    return doubtful("lock", f"{len(other)} packages differ: {named}", remedy)


def _bad_releases() -> Finding:
    wrong = []
    for name, (releases, why) in BAD_RELEASES.items():
        found = installed(name)
        if found is not None and any(
            Requirement(f"{name}{one}").specifier.contains(found) for one in releases.split(",")
        ):
            wrong.append(f"{name} {found} {why}")
    if wrong:
        return bad("bad releases", "; ".join(wrong), "install the locked versions: infra/install")
    return good("bad releases", "none of those that are known")


def _torchvision() -> Finding:
    found = installed("torchvision")
    if found is None:
        return good("torchvision", "absent, as it should be")
    wanted = next(
        (Requirement(text) for text in metadata.requires("torchvision") or [] if text.startswith("torch=")), None
    )
    torch = installed("torch") or ""
    if wanted is not None and wanted.specifier.contains(torch):
        return good("torchvision", f"{found}, for torch {torch}")
    remedy = "pip uninstall torchvision: nothing here uses it"
    return bad(
        "torchvision", f"{found} is not for torch {torch}: lightning and torchmetrics fail at their import", remedy
    )
