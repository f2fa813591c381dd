"""What a study or a sweep was asked to do: kept in its run, so that a resume goes on with that and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.mlflow_run import new_run, resume_run
from paceline.tasks.errors import InputError
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import read_document
from paceline.tasks.track.run import RunHandle

Kind = Literal["study", "sweep", "no-gpu"]
ARTIFACTS: dict[Kind, str] = {
    "study": tracking.STUDY_ARTIFACT,
    "sweep": tracking.SWEEP_ARTIFACT,
    "no-gpu": tracking.NO_GPU_ARTIFACT,
}


class Request(Protocol):
    """Of either."""

    @property
    def config(self) -> Config:
        """What its trainings have in common."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """As JSON has it."""


@contextmanager
def open_parent_run(
    kind: Kind, request: Request, environment: Environment, experiment_id: str, workload: str, resume: str | None
) -> Iterator[RunHandle]:
    """Its run: a new one that keeps the request, or the one that goes on."""
    if resume is not None:
        with resume_run(environment, resume, kind, workload) as parent:
            yield parent
        return
    with new_run(request.config, environment, experiment_id, kind, workload) as parent:
        tracking.log_document(parent, ARTIFACTS[kind], request.model_dump(mode="json"))
        yield parent


def load_request(kind: Kind, environment: Environment, run_id: str) -> dict[str, Any]:
    """What a run that is to go on was asked to do.

    Raises:
        InputError: no such run, none that can go on, or one of another kind.
    """
    tracking.reopen(environment.tracking_uri, run_id)
    document: dict[str, Any] | None = read_document(environment.tracking_uri, run_id, ARTIFACTS[kind])
    if document is None:
        raise InputError(f"--resume {run_id}: that run is no {kind}; use paceline run --resume")
    return document
