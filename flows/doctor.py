"""Examines a site before the first run: this host, its servers, its certificates, its cluster."""

from collections.abc import Callable, Iterator

from paceline.conf import plugins
from paceline.conf.config import Config
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.hints import fault_and_hint
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.cluster.client import demand_of
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.cluster.tls import (
    WARN_DAYS,
    choose_tls,
    days_left,
    expiry_text,
    find_certificates,
    proxy_days_left,
    proxy_renewal,
)
from paceline.tasks.data.sources.folder import absolute
from paceline.tasks.doctor.devices import measure_devices
from paceline.tasks.doctor.figures import Measurements, judge_measurements
from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.doctor.host import examine_host
from paceline.tasks.doctor.packages import examine_own, examine_packages, own_packages
from paceline.tasks.doctor.workers import examine_workers
from paceline.tasks.errors import PacelineError, one_line
from paceline.tasks.names import DOCTOR_EXPERIMENT, Artifact, Metric, Tag
from paceline.tasks.redact import redact
from paceline.tasks.track.environment import installed_version

MAX_EARLIER = 20  # runs to search for the last measurement of a device
SEE = "see the message"


def examine(
    config: Config, environment: Environment, note_measurements: Callable[[Measurements], None] | None = None
) -> Iterator[Finding]:
    """Examine everything, also after a stage fails; measure the cluster's devices too, with `note_measurements`."""
    stages: dict[str, Callable[[], list[Finding]]] = {
        "packages": examine_packages,
        "own packages": examine_own,
        "this host": lambda: examine_host(environment.root, environment.leases, config.limits.min_free_gib),
        "mlflow": lambda: [_mlflow(environment)],
        "prefect": lambda: [_prefect(environment)],
        "certificates": lambda: [_certificates(config, environment)],
        "proxy": lambda: _proxy(environment),
        "workers": lambda: _cluster(config, environment, note_measurements),
    }
    for name, stage in stages.items():
        try:
            yield from stage()
        except PacelineError as error:
            yield _wrong(name, error)
        except Exception as error:  # noqa: BLE001  every error is a finding
            yield bad(name, f"{type(error).__name__}: {redact(one_line(error))}", SEE)


def _mlflow(environment: Environment) -> Finding:
    from paceline.tasks.track.store import server_version

    place, version = redact(environment.tracking_uri), server_version(environment.tracking_uri)
    if not environment.tracking_uri.startswith("http"):
        return good("mlflow", f"{place}, {version or 'made by the first run'}")
    return _versions("mlflow", place, version or "", installed_version("mlflow"))


def _prefect(environment: Environment) -> Finding:
    url, client_version = prefect_api.prefect_server(environment), installed_version("prefect")
    if url is None:
        return good("prefect", f"no server: its temporary API, {client_version}; paceline serve needs a server")
    from httpx import HTTPError
    from prefect.client.orchestration import get_client

    try:
        prefect_api.check_prefect(environment)
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)  # needs credentials, unlike its health
            version = client.api_version()
    except HTTPError as error:
        remedy = "set PREFECT_API_AUTH_STRING, or look at the server's log"
        return bad("prefect", f"{redact(url)} refuses this user ({redact(one_line(error))[:200]})", remedy)
    return _versions("prefect", redact(url), version, client_version)


def _wrong(check: str, error: PacelineError) -> Finding:
    fault, hint = fault_and_hint(error)
    return bad(check, redact(fault), redact(hint or SEE))


def _versions(check: str, place: str, server: str, client: str | None) -> Finding:
    if client is None or server.split(".")[:2] != client.split(".")[:2]:
        return doubtful(check, f"{place} is {server}, the client {client}", "bring both to one version")
    return good(check, f"{place}, version {server}")


def _certificates(config: Config, environment: Environment) -> Finding:
    choice = choose_tls(config.cluster)
    if choice.value != "on":
        return good("certificates", f"not needed: {choice.reason}")
    days, remedy = days_left(find_certificates(environment)), f"infra/certificates --renew {environment.tls_directory}"
    text = expiry_text(days)
    return doubtful("certificates", text, remedy) if days < WARN_DAYS else good("certificates", text)


def _proxy(environment: Environment) -> list[Finding]:
    if (found := proxy_days_left(environment)) is None:
        return []
    path, days = found
    text = f"{path} {expiry_text(days)}"
    return [doubtful("proxy", text, proxy_renewal(path)) if days < WARN_DAYS else good("proxy", text)]


def _cluster(
    config: Config, environment: Environment, note_measurements: Callable[[Measurements], None] | None = None
) -> list[Finding]:
    root, findings = _root(config.data)
    demand = demand_of([config.execution], "gpu" if config.execution.accelerator == "gpu" else "cpu")
    with open_cluster(config.cluster, demand, environment) as address:
        size = config.execution.world_size
        findings += examine_workers(address, environment, size, own_packages(), config.packages, root)
        if note_measurements is None:
            return findings
        measured = measure_devices(address, environment, config.execution.accelerator)
    note_measurements(measured)
    last, history = _history(config, environment, measured)
    return [*findings, *judge_measurements(measured, last), history]


def _history(config: Config, environment: Environment, measured: Measurements) -> tuple[Measurements | None, Finding]:
    """The last measurement of one of these devices, and a finding on where this one is kept."""
    from paceline.tasks.track import queries, run, store

    uri, names = environment.tracking_uri, {device.name for device in measured.devices}
    try:
        experiment = store.check_store(uri, DOCTOR_EXPERIMENT, environment.artifact_root)
        earlier = (
            Measurements.model_validate(document)
            for earlier_run in queries.find_runs(uri, DOCTOR_EXPERIMENT, limit=MAX_EARLIER)
            if (document := queries.read_document(uri, earlier_run.run_id, Artifact.DEVICES)) is not None
        )
        last = next((each for each in earlier if names & {device.name for device in each.devices}), None)
        handle = run.begin(uri, experiment, config, {Tag.ROLE: "doctor"}, "devices")
        rates: dict[str, float | None] = {
            Metric.device(device.host, device.device, figure): rate
            for device in measured.devices
            for figure, rate in device.rates.items()
        }
        run.log_facts(handle, rates, {})
        run.log_document(handle, Artifact.DEVICES, measured.model_dump(mode="json"))
        run.finish(handle, "FINISHED")
    except PacelineError as error:
        return None, doubtful("history", f"the measurements are not kept: {redact(one_line(error))}", SEE)
    compared = "compared with the last measurement" if last else "there is no earlier measurement"
    return last, good("history", f"MLflow experiment {DOCTOR_EXPERIMENT}, run {handle.run_id}; {compared}")


def _root(data: Data) -> tuple[str | None, list[Finding]]:
    """The directory that workers read, or its fault; only a user's source knows what its root means."""
    if data.root is None or data.source not in plugins.EMBEDDED_SOURCES:
        return None, []
    try:
        return absolute(data.root), []
    except PacelineError as error:
        return None, [_wrong("data", error)]
