"""Views of similar runs in the MLflow UI, linked from Prefect and from the run itself.

Runs share that of their deployment or series; each study and each sweep has its own, which only its address opens.
"""

from collections.abc import Iterable

from prefect.artifacts import create_link_artifact
from prefect.runtime import deployment

from paceline.flows.lifecycle.outage import report
from paceline.tasks.names import Tag
from paceline.tasks.records.training import ScoreName
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.track.ui_views import ACCURACY, View, share_view, view_of_series, view_of_study

DEPLOYMENT_TAG = "prefect.deployment_id"
DEPLOYMENT_NAME_TAG = "prefect.deployment_name"


def deployment_tags() -> dict[str, str]:
    """Tags of the deployment that started this run; none without a deployment."""
    identifier = deployment.get_id()
    if identifier is None:
        return {}
    return {DEPLOYMENT_TAG: identifier, DEPLOYMENT_NAME_TAG: deployment.get_name() or identifier}


def share_with_like(handle: RunHandle, series: str, score_name: ScoreName) -> str:
    """Update the view of a run's deployment, or of its series, and return its address."""
    identifier = tracking.tag(handle, DEPLOYMENT_TAG)  # a resume may happen outside of the deployment
    if identifier is None:
        return share(handle, view_of_series(Tag.SERIES, series, scores=[score_name]))
    name = tracking.tag(handle, DEPLOYMENT_NAME_TAG)
    return share(handle, view_of_series(DEPLOYMENT_TAG, identifier, name, [score_name]))


def share_study(parent: RunHandle, scores: Iterable[ScoreName | None]) -> str:
    """Update the view of a study's trainings, and return its address."""
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
