"""Where a run is looked at among those like it: a view in the MLflow UI, linked from Prefect and from the run itself.

The runs of a Prefect deployment share one view, which the experiment's page lists by the deployment's name. Other runs
share that of their series; the trainings of a study and the trials of a sweep have their own: found by their addresses
alone, for the list is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect.artifacts import create_link_artifact
from prefect.runtime import deployment

from paceline.flows.lifecycle.outage import report
from paceline.tasks.names import Tag
from paceline.tasks.records import ScoreName
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.track.ui_views import ACCURACY, View, share_view, view_of_series, view_of_study, view_of_sweep

DEPLOYMENT_TAG = "prefect.deployment_id"
DEPLOYMENT_NAME_TAG = "prefect.deployment_name"


def deployment_tags() -> dict[str, str]:
    """The tags by which the runs of a deployment are found; none where no deployment started this one."""
    identifier = deployment.get_id()
    if identifier is None:
        return {}
    return {DEPLOYMENT_TAG: identifier, DEPLOYMENT_NAME_TAG: deployment.get_name() or identifier}


def share_with_like(handle: RunHandle, series: str, score_name: ScoreName) -> str:
    """Bring the view of a run's deployment, or else of its series, up to date; its address."""
    identifier = tracking.tag(handle, DEPLOYMENT_TAG)  # a run that goes on may do so outside of its deployment
    if identifier is None:
        return _share(handle, view_of_series(Tag.SERIES, series, scores=[score_name]))
    name = tracking.tag(handle, DEPLOYMENT_NAME_TAG)
    return _share(handle, view_of_series(DEPLOYMENT_TAG, identifier, name, [score_name]))


def share_study(parent: RunHandle, scores: Iterable[ScoreName | None]) -> str:
    """Bring the view of a study's trainings up to date; its address."""
    known = [name for name in dict.fromkeys(scores) if name is not None]
    return _share(parent, view_of_study(parent.run_id, known or ACCURACY))


def share_sweep(parent: RunHandle, settings: Sequence[str]) -> str:
    """Bring the view of a sweep's trials up to date; its address."""
    return _share(parent, view_of_sweep(parent.run_id, settings))


def _share(handle: RunHandle, view: View) -> str:
    address = share_view(handle.tracking_uri, handle.experiment_id, view)
    tracking.set_tags(handle, {Tag.VIEW: address})
    return address


def link(address: str, description: str) -> None:
    """Show the address of a view with the flow run in the Prefect UI."""
    report(create_link_artifact, link=address, link_text="See it in MLflow", key="mlflow-view", description=description)
