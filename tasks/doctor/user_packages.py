"""The user's own sources and models: which are installed, and what keeps one from being used. Imports none of them."""

from __future__ import annotations

from paceline.conf.plugins import GROUPS, MISSING, Plugin, embedded, installed
from paceline.tasks.doctor.finding import Finding, doubtful, good


def own_packages() -> list[Plugin]:
    """What can be named: each name that one package alone offers, and Paceline does not."""
    return [one for one in _all() if _wrong(one) is None]


def examine_own() -> list[Finding]:
    """One finding for all that can be named, and one for each that cannot."""
    usable = [f"{one.kind} {one.name} of {one.package} {one.version}" for one in own_packages()]
    found = [good("own packages", "; ".join(usable) or f"none in {' or '.join(GROUPS.values())}")]
    for one in _all():
        wrong = _wrong(one)
        if wrong is not None:
            found.append(doubtful(f"own {one.kind} {one.name}", f"{one.package} {one.version}: {wrong[0]}", wrong[1]))
    return found


def _all() -> list[Plugin]:
    return [one for kind in GROUPS for one in installed(kind)]


def _wrong(plugin: Plugin) -> tuple[str, str] | None:
    """Why a plugin cannot be named, and what to do."""
    if plugin.name in embedded(plugin.kind):
        return "Paceline has one of that name, which is taken", "give its entry point another name"
    others = [one.package for one in installed(plugin.kind) if one.name == plugin.name and one != plugin]
    if others:
        return f"{' and '.join(others)} offers that name too", "uninstall one, or rename its entry point"
    if plugin.code == MISSING:
        return f"there is no {plugin.entry}", "install the package again"
    return None
