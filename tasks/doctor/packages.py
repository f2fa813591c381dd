"""The installed packages, plugins of the user among them: what is wrong with them. Imports no plugin."""

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from paceline.conf.plugins import GROUPS, MISSING, Plugin, embedded, find_all
from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.track.environment import LOCK, installed_version

NAME, MAX_NAMED = "paceline", 5
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
    required = metadata.metadata(NAME)["Requires-Python"]
    version = platform.python_version()
    if Requirement(f"python{required}").specifier.contains(version):
        return good("python", version)
    return bad("python", f"{version}, {required} is needed", "make the environment with a newer Python")


def _ranges() -> Finding:
    listed = map(Requirement, metadata.requires(NAME) or [])
    needed = [each for each in listed if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [
        f"{each.name} {version or 'missing'} ({each.specifier or 'any'} is needed)"
        for each in needed
        if (version := installed_version(each.name)) is None or not each.specifier.contains(version, prereleases=True)
    ]
    if not wrong:
        return good("packages", f"{len(needed)} requirements met")
    remedy = "install again: infra/install, or pip install --require-hashes --no-deps -r infra/lock.txt"
    return bad("packages", "; ".join(wrong), remedy)


def _lock() -> Finding:
    if not LOCK.is_file():
        return good("lock", "not part of this installation")
    pins = dict(line.split("==") for line in LOCK.read_text(encoding="utf-8").split() if "==" in line)
    other = [
        f"{name} {version} (locked: {pinned})"
        for name, pinned in pins.items()
        if (version := installed_version(canonicalize_name(name))) and Version(version).public != Version(pinned).public
    ]
    if not other:
        return good("lock", f"as locked, {len(pins)} pins")
    named = "; ".join(other[:MAX_NAMED]) + ("; ..." if len(other) > MAX_NAMED else "")
    remedy = "fine if meant; runs with other versions are not compared. infra/install goes back"
    return doubtful("lock", f"{len(other)} packages differ: {named}", remedy)


def _bad_releases() -> Finding:
    wrong = []
    for name, (releases, why) in BAD_RELEASES.items():
        version = installed_version(name)
        specifiers = (Requirement(f"{name}{release}").specifier for release in releases.split(","))
        if version is not None and any(specifier.contains(version) for specifier in specifiers):
            wrong.append(f"{name} {version} {why}")
    if wrong:
        return bad("bad releases", "; ".join(wrong), "install the locked versions: infra/install")
    return good("bad releases", "none of those that are known")


def _torchvision() -> Finding:
    version = installed_version("torchvision")
    if version is None:
        return good("torchvision", "absent, as it should be")
    required = [Requirement(text) for text in metadata.requires("torchvision") or [] if text.startswith("torch=")]
    torch = installed_version("torch") or ""
    if required and required[0].specifier.contains(torch):
        return good("torchvision", f"{version}, for torch {torch}")
    fault = f"{version} is not for torch {torch}: lightning and torchmetrics fail at their import"
    return bad("torchvision", fault, "pip uninstall torchvision: nothing here uses it")


def own_packages() -> list[Plugin]:
    """Usable plugins: those whose name only one package offers."""
    return [plugin for plugin in _plugins() if _fault_of(plugin) is None]


def examine_own() -> list[Finding]:
    """One finding for all usable plugins, and one for each unusable plugin."""
    usable = [f"{plugin.kind} {plugin.name} of {plugin.package} {plugin.version}" for plugin in own_packages()]
    findings = [good("own packages", "; ".join(usable) or f"none in {' or '.join(GROUPS.values())}")]
    for plugin in _plugins():
        if (fault := _fault_of(plugin)) is not None:
            text = f"{plugin.package} {plugin.version}: {fault[0]}"
            findings.append(doubtful(f"own {plugin.kind} {plugin.name}", text, fault[1]))
    return findings


def _plugins() -> list[Plugin]:
    return [plugin for kind in GROUPS for plugin in find_all(kind)]


def _fault_of(plugin: Plugin) -> tuple[str, str] | None:
    """Why a plugin cannot be used, and the remedy; None if it can."""
    if plugin.name in embedded(plugin.kind):
        return "Paceline has one of that name, which is taken", "give its entry point another name"
    packages = [other.package for other in find_all(plugin.kind) if other.name == plugin.name and other != plugin]
    if packages:
        return f"{' and '.join(packages)} offers that name too", "uninstall one, or rename its entry point"
    if plugin.code == MISSING:
        return f"{plugin.entry} does not exist", "install the package again"
    return None
