"""The examination of a site before a run meets it: this host, its servers, its certificates, its cluster."""

from __future__ import annotations

from collections.abc import Callable

from paceline.conf import plugins
from paceline.conf.config import Config
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.hints import fault_and_hint
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.cluster.start import open_cluster
from paceline.tasks.cluster.tls import choose_tls, days_left, find_certificates
from paceline.tasks.data.sources.folder import absolute
from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.doctor.host import examine_host
from paceline.tasks.doctor.packages import examine_packages
from paceline.tasks.doctor.user_packages import examine_own, own_packages
from paceline.tasks.doctor.workers import examine_workers
from paceline.tasks.errors import PacelineError, one_line
from paceline.tasks.redact import redact
from paceline.tasks.track.environment import installed

WARN_DAYS = 30
"""Before certificates expire."""
SEE = "see the message"


def examine(config: Config, site: Environment, told: Callable[[Finding], None]) -> list[Finding]:
    """Examine everything; what is wrong in one place does not keep the others from being looked at.

    Args:
        config: whose cluster and execution are looked at.
        site: this machine's facts.
        told: hears of each finding as it is made.
    """
    stages: dict[str, Callable[[], list[Finding]]] = {
        "packages": examine_packages,
        "own packages": examine_own,
        "this host": lambda: examine_host(site.root, site.leases),
        "mlflow": lambda: [_mlflow(site)],
        "prefect": lambda: [_prefect(site)],
        "certificates": lambda: [_certificates(config, site)],
        "workers": lambda: _cluster(config, site),
    }
    found = []
    for name, stage in stages.items():
        try:
            made = stage()
        except PacelineError as error:
            made = [_wrong(name, error)]
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was to be found out
            made = [bad(name, f"{type(error).__name__}: {redact(one_line(error))}", SEE)]
        for finding in made:
            told(finding)
            found.append(finding)
    return found


def _mlflow(site: Environment) -> Finding:
    from paceline.tasks.track.store import server_version

    place, there = redact(site.tracking_uri), server_version(site.tracking_uri)
    if not site.tracking_uri.startswith("http"):
        return good("mlflow", f"{place}, {there or 'made by the first run'}")
    return _versions("mlflow", place, there or "", installed("mlflow"))


def _prefect(site: Environment) -> Finding:
    url, own = prefect_api.prefect_server(site), installed("prefect")
    if url is None:
        return good("prefect", f"no server: its temporary API, {own}; paceline serve needs a server")
    from httpx import HTTPError
    from prefect.client.orchestration import get_client

    try:
        prefect_api.check_prefect(site)
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)  # needs credentials where any are needed
            there = client.api_version()
    except HTTPError as error:
        remedy = "set PREFECT_API_AUTH_STRING, or look at the server's log"
        return bad("prefect", f"{redact(url)} refuses this user ({redact(one_line(error))[:200]})", remedy)
    return _versions("prefect", redact(url), there, own)


def _wrong(check: str, error: PacelineError) -> Finding:
    fault, hint = fault_and_hint(error)
    return bad(check, redact(fault), redact(hint or SEE))


def _versions(check: str, place: str, there: str, own: str | None) -> Finding:
    if own is None or there.split(".")[:2] != own.split(".")[:2]:
        return doubtful(check, f"{place} is {there}, the client {own}", "bring both to one version")
    return good(check, f"{place}, version {there}")


def _certificates(config: Config, site: Environment) -> Finding:
    choice = choose_tls(config.cluster)
    if choice.value != "on":
        return good("certificates", f"not needed: {choice.reason}")
    left = days_left(find_certificates(site))
    remedy = f"make new ones: infra/certificates, at {site.tls_directory}"
    if left < 0:
        return bad("certificates", f"expired {-left:.0f} days ago", remedy)
    text = f"valid for {left:.0f} days"
    return doubtful("certificates", text, remedy) if left < WARN_DAYS else good("certificates", text)


def _cluster(config: Config, site: Environment) -> list[Finding]:
    execution = config.execution
    root, found = _root(config.data)
    with open_cluster(
        config.cluster, demand_of([execution], "gpu" if execution.accelerator == "gpu" else "cpu"), site
    ) as address:
        return found + examine_workers(address, site, execution.world_size, own_packages(), config.packages, root)


def _root(data: Data) -> tuple[str | None, list[Finding]]:
    """Where workers will read, or what is wrong with it; of a source of the user's it alone knows what its root is."""
    if data.root is None or data.source not in plugins.EMBEDDED_SOURCES:
        return None, []
    try:
        return absolute(data.root), []
    except PacelineError as error:
        return None, [_wrong("data", error)]
