"""Installed plugins of the user, and why one cannot be used. Imports none of them."""

from paceline.conf.plugins import GROUPS, MISSING, Plugin, embedded, find_all
from paceline.tasks.doctor.finding import Finding, doubtful, good


def own_packages() -> list[Plugin]:
    """Usable plugins: those whose name only one package offers."""
    return [plugin for plugin in _all() if _wrong(plugin) is None]


def examine_own() -> list[Finding]:
    """One finding for all usable plugins, and one for each unusable plugin."""
    usable = [f"{plugin.kind} {plugin.name} of {plugin.package} {plugin.version}" for plugin in own_packages()]
    findings = [good("own packages", "; ".join(usable) or f"none in {' or '.join(GROUPS.values())}")]
    for plugin in _all():
        wrong = _wrong(plugin)
        if wrong is not None:
            findings.append(
                doubtful(f"own {plugin.kind} {plugin.name}", f"{plugin.package} {plugin.version}: {wrong[0]}", wrong[1])
            )
    return findings


def _all() -> list[Plugin]:
    return [plugin for kind in GROUPS for plugin in find_all(kind)]


def _wrong(plugin: Plugin) -> tuple[str, str] | None:
    """Why a plugin cannot be used, and the remedy; None if it can."""
    if plugin.name in embedded(plugin.kind):
        return "Paceline has one of that name, which is taken", "give its entry point another name"
    packages = [other.package for other in find_all(plugin.kind) if other.name == plugin.name and other != plugin]
    if packages:
        return f"{' and '.join(packages)} offers that name too", "uninstall one, or rename its entry point"
    if plugin.code == MISSING:
        return f"{plugin.entry} does not exist", "install the package again"
    return None
