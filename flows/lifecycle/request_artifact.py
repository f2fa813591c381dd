"""Stores the request of a study or a sweep in its run, from which a resume reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.mlflow_run import new_run, resume_run
from paceline.tasks.errors import InputError
from paceline.tasks.names import Artifact
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import read_document
from paceline.tasks.track.run import RunHandle

Kind = Literal["study", "sweep", "no-gpu"]
ARTIFACTS: dict[Kind, str] = {
    "study": Artifact.STUDY_REQUEST,
    "sweep": Artifact.SWEEP_REQUEST,
    "no-gpu": Artifact.NO_GPU_REQUEST,
}


@contextmanager
def open_parent_run(
    kind: Kind,
    config: Config,
    request: BaseModel,
    environment: Environment,
    experiment_id: str,
    workload: str,
    resume: str | None,
) -> Iterator[RunHandle]:
    """Open a new run with the request, or resume one."""
    if resume is not None:
        with resume_run(environment, resume, kind, workload) as parent:
            yield parent
        return
    with new_run(config, environment, experiment_id, kind, workload) as parent:
        tracking.log_document(parent, ARTIFACTS[kind], request.model_dump(mode="json"))
        yield parent


def load_request(kind: Kind, environment: Environment, run_id: str) -> dict[str, Any]:
    """Read the request of an unfinished run; raise InputError if it is finished or of another kind."""
    tracking.reopen(environment.tracking_uri, run_id)
    document: dict[str, Any] | None = read_document(environment.tracking_uri, run_id, ARTIFACTS[kind])
    if document is None:
        raise InputError(f"--resume {run_id}: that run is not a {kind}; use paceline run --resume")
    return document
