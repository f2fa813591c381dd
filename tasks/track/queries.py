"""Reads runs back from MLflow as plain records. Knows nothing of what their metrics mean."""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.entities.paged_list import PagedList
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.names import Tag
from paceline.tasks.records.record import Record
from paceline.tasks.redact import redact
from paceline.tasks.track.store import existing_client, open_store, sqlite_path

MAX_RUNS = 1000  # of an answer of MLflow's
NEWEST_FIRST = ["attributes.start_time DESC"]
T = TypeVar("T")


class FoundRun(Record):
    """A run as the store knows it."""

    run_id: str
    name: str
    status: str
    start_time: float  # Unix seconds
    metrics: dict[str, float] = Field(default_factory=dict)
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)


def get_runs(tracking_uri: str, run_ids: Sequence[str], *, is_patient: bool = False) -> list[FoundRun]:
    """Runs by id, in the order given. Raises InputError: the store does not answer, or a run does not exist.

    A patient caller, such as a flow, waits for a server that is away, as long as MLflow's client does.
    """
    client = open_store(tracking_uri) if is_patient else existing_client(tracking_uri)
    runs = []
    for run_id in run_ids:
        try:
            runs.append(_plain(client.get_run(run_id)))
        except MlflowException as error:
            fault = f"run {run_id}: there is none in {redact(tracking_uri)}"
            raise InputError(f"{fault}; see paceline ui for the ids") from error
    return runs


def run_page(tracking_uri: str, run_id: str) -> str:
    """The page of a run, behind `#/` of the UI. Raises InputError: the store does not answer, or has no such run."""
    try:
        run = existing_client(tracking_uri).get_run(run_id)
    except MlflowException as error:
        fault = f"{redact(tracking_uri)} has no run {run_id}"
        raise InputError(fault, hint="list the runs with: paceline ui", setting="RUN_ID") from error
    return f"experiments/{run.info.experiment_id}/runs/{run_id}"


def find_runs(
    tracking_uri: str,
    experiment: str | None,
    condition: str = "",
    limit: int | None = MAX_RUNS,
    *,
    is_patient: bool = False,
) -> list[FoundRun]:
    """Runs of an experiment, or of all, newest first; none if it does not exist.

    `is_patient` as for `get_runs`. Raises InputError: the store does not answer.
    """
    client = open_store(tracking_uri) if is_patient else existing_client(tracking_uri)
    named = client.search_experiments() if experiment is None else [client.get_experiment_by_name(experiment)]
    return _search(client, [entity.experiment_id for entity in named if entity is not None], condition, limit)


def runs_with_tag(tracking_uri: str, name: str, value: str) -> list[FoundRun]:
    """Runs of all experiments with a value of a tag, newest first. Raises InputError: the store does not answer."""
    try:
        return find_runs(tracking_uri, None, f"tags.`{name}` = '{value}'", is_patient=True)
    except (MlflowException, SQLAlchemyError) as error:
        raise InputError(f"MLFLOW_TRACKING_URI={redact(tracking_uri)} cannot be read ({one_line(error)})") from error


def _search(
    client: MlflowClient, experiment_ids: list[str], condition: str, limit: int | None, view: int = ViewType.ACTIVE_ONLY
) -> list[FoundRun]:
    if not experiment_ids:
        return []
    search = partial(client.search_runs, experiment_ids, condition, view, order_by=NEWEST_FIRST)
    return [_plain(run) for run in _pages(search, limit)]


class Inventory(Record):
    """All runs of a store, and the registered models, for a clean-up."""

    runs: tuple[FoundRun, ...] = ()  # newest first
    deleted: frozenset[str] = frozenset()  # ids of runs that are deleted, and not yet removed for ever
    models: dict[str, str] = Field(default_factory=dict)
    """Registered model, such as `models:/digits@champion` or `models:/digits/3` without an alias, by its run's id."""
    digests: dict[str, str] = Field(default_factory=dict)
    """The same by the digest of the model."""


def take_inventory(tracking_uri: str) -> Inventory:
    """All runs and registered models; none if the store does not exist yet. Raises InputError: it does not answer."""
    file = sqlite_path(tracking_uri)
    if file is not None and not file.exists():
        return Inventory()
    client = existing_client(tracking_uri)
    try:
        ids = [each.experiment_id for each in _pages(partial(client.search_experiments, ViewType.ALL))]
        versions = _pages(client.search_model_versions)
        models = {version.run_id or "": f"models:/{version.name}/{version.version}" for version in versions}
        for model in _pages(client.search_registered_models):
            for alias, number in model.aliases.items():
                owner = client.get_model_version(model.name, str(number)).run_id or ""
                models[owner] = f"models:/{model.name}@{alias}"
        runs, deleted = (
            tuple(_search(client, ids, "", None, view)) for view in (ViewType.ACTIVE_ONLY, ViewType.DELETED_ONLY)
        )
        registered = (run for run in (*runs, *deleted) if run.run_id in models and Tag.MODEL_DIGEST in run.tags)
        digests = {run.tags[Tag.MODEL_DIGEST]: models[run.run_id] for run in registered}
        gone = frozenset(run.run_id for run in deleted)
        return Inventory(runs=runs, deleted=gone, models=models, digests=digests)
    except MlflowException as error:
        raise InputError(f"MLFLOW_TRACKING_URI={redact(tracking_uri)} cannot be read ({one_line(error)})") from error


def _pages(search: Callable[..., PagedList[T]], limit: int | None = None) -> list[T]:
    """All pages of a search, or the first results up to a limit."""

    def read(size: int, token: str | None) -> PagedList[T]:
        return search(max_results=size, page_token=token)

    results: list[T] = get_results_from_paginated_fn(read, MAX_RUNS, limit)  # type: ignore[no-untyped-call]
    return results


def read_document(tracking_uri: str, run_id: str, name: str) -> Any:
    """A JSON artifact of a run; None when it has none of that name."""
    content = read_artifact(tracking_uri, run_id, name)
    with suppress(ValueError):
        return json.loads(content or b"null")
    return None


def read_artifact(tracking_uri: str, run_id: str, name: str) -> bytes | None:
    """An artifact of a run; None when it has none of that name."""
    client = MlflowClient(tracking_uri)
    with tempfile.TemporaryDirectory() as directory, suppress(MlflowException, OSError):
        return Path(client.download_artifacts(run_id, name, directory)).read_bytes()
    return None


def has_artifact(tracking_uri: str, run_id: str, name: str) -> bool:
    """Whether a run's artifacts list that name. Raises InputError: they cannot be listed."""
    try:
        return any(artifact.path == name for artifact in MlflowClient(tracking_uri).list_artifacts(run_id))
    except (MlflowException, OSError) as error:
        raise InputError(f"the artifacts of run {run_id} cannot be listed ({one_line(error)})") from error


def _plain(run: Run) -> FoundRun:
    return FoundRun(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        start_time=run.info.start_time / 1000,
        metrics=dict(run.data.metrics),
        params=dict(run.data.params),
        tags=dict(run.data.tags),
    )
