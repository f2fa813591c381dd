"""The report and the machine of a run in the MLflow UI, and views of similar runs, linked from Prefect and the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prefect.artifacts import create_link_artifact

from paceline.flows.lifecycle.mlflow_run import DEPLOYMENT_NAME_TAG, DEPLOYMENT_TAG
from paceline.flows.lifecycle.outage import report
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Record
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment, package_versions
from paceline.tasks.track.run import RunHandle
from paceline.tasks.track.ui_views import ACCURACY, View, share_view, view_of_series, view_of_study

if TYPE_CHECKING:  # 0.3 s that a run of own Lightning code does not need
    from matplotlib.figure import Figure

R = TypeVar("R", bound=Record)


def log_report(handle: RunHandle, page: str, figures: Mapping[str, "Figure"]) -> None:
    """Log the page and its pictures."""
    from paceline.tasks.report.plotting import png_bytes

    tracking.log_document(handle, Artifact.REPORT, page)
    for name, figure in figures.items():
        tracking.log_document(handle, Artifact.picture(name), png_bytes(figure))


def describe_devices(hardware: Hardware) -> str:
    """Describe the devices of a host."""
    if hardware.gpus:
        return f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
    return f"{hardware.num_cores} cores of {hardware.cpu_name}"


def describe_host(hardware: Hardware) -> str:
    """Name the host, and describe its devices."""
    return f"{hardware.host}: {describe_devices(hardware)}"


def known_versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    return {name: version for name, version in package_versions().items() if version}


def log_result(
    handle: RunHandle,
    artifact: str,
    result: R,
    hardware: Hardware,
    render: Callable[[R, dict[str, Any]], str],
    draw: Callable[[R], Mapping[str, "Figure"]],
) -> None:
    """Log the environment of a study or a sweep, its report with the pictures, and its result as JSON."""
    environment = describe_environment((hardware.host,), (describe_devices(hardware),))
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    log_report(handle, render(result, environment), draw(result))
    tracking.log_document(handle, artifact, result.model_dump(mode="json"))


def share_with_like(handle: RunHandle, series: str, scores: Sequence[str]) -> str:
    """Update the view of a run's deployment, or of its series, and return its address."""
    identifier = tracking.tag(handle, DEPLOYMENT_TAG)  # a resume may happen outside of the deployment
    if identifier is None:
        return share(handle, view_of_series(Tag.SERIES, series, scores=scores))
    name = tracking.tag(handle, DEPLOYMENT_NAME_TAG)
    return share(handle, view_of_series(DEPLOYMENT_TAG, identifier, name, scores))


def share_study(parent: RunHandle, scores: Iterable[str | None]) -> str:
    """Update the view of a study's trainings, and return its address, which alone opens it."""
    names = [name for name in dict.fromkeys(scores) if name is not None]
    return share(parent, view_of_study(parent.run_id, names or ACCURACY))


def share(handle: RunHandle, view: View) -> str:
    """Update a view, name it in the run's tags, and return its address."""
    address = share_view(handle.tracking_uri, handle.experiment_id, view)
    tracking.set_tags(handle, {Tag.VIEW: address})
    return address


def link(address: str, description: str) -> None:
    """Show the address of a view with the flow run in the Prefect UI."""
    report(create_link_artifact, link=address, link_text="See it in MLflow", key="mlflow-view", description=description)
