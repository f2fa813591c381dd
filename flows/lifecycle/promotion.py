"""The promotion of a registered model to champion once its run is FINISHED, also after a kill between the two."""

import logging
from typing import Any
from uuid import UUID

from prefect.logging import get_logger

from paceline.conf.environment import Environment
from paceline.flows.lifecycle.mlflow_run import FLOW_RUN_TAG
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.track import registry
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import find_runs, has_artifact, read_document
from paceline.tasks.track.run import RunHandle
from paceline.tasks.track.store import sqlite_path


def promote(
    registered: dict[str, Any] | None, handle: RunHandle, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
) -> None:
    """Make the version of a summary's `registered` the champion, unless a better one became champion meanwhile.

    The run gets tags with the outcome, which mark that this is done.
    """
    if not registered:
        return
    name, version, tags = registered["name"], registered["version"], {Tag.GATE: registered["gate"]}
    if version is None:
        log.warning("Model %s is not registered: %s", name, registered["gate"])
    elif better := registry.promote(handle, name, version, registered["champion_before"]):
        log.warning("Version %s of %s has become champion meanwhile and is better: it stays", better, name)
    else:
        log.info("Version %s is models:/%s@%s", version, name, registry.CHAMPION)
    if version is not None:
        tags[Tag.REGISTERED] = f"{name} version {version}"
    tracking.set_tags(handle, tags)  # at last: `promote_finished` looks for runs without them


def promote_finished(environment: Environment, flow_run_id: UUID) -> None:
    """Promote the model of a FINISHED run whose flow run lost its process before it did.

    An error that would come again is logged: the model is deleted, or the user may not promote it. Raises InputError:
    MLflow does not answer, or the summary cannot be read; other errors of MLflow as they are.
    """
    uri = environment.tracking_uri
    if (file := sqlite_path(uri)) is not None and not file.exists():
        return
    mine = f"attributes.status = 'FINISHED' and tags.`{FLOW_RUN_TAG}` = '{flow_run_id}' and tags.`{Tag.ROLE}` = 'run'"
    for run in find_runs(uri, None, mine):
        if Tag.GATE in run.tags:
            continue
        summary = read_document(uri, run.run_id, Artifact.SUMMARY)
        if summary is None and has_artifact(uri, run.run_id, Artifact.SUMMARY):
            raise InputError(f"{Artifact.SUMMARY} of run {run.run_id} cannot be read")
        if summary is not None:
            handle = RunHandle(tracking_uri=uri, experiment="", experiment_id="", run_id=run.run_id)
            log = get_logger("paceline")
            try:
                promote(summary["registered"], handle, log)
            except Exception as error:
                if not registry.is_permanent(error):  # an attempt later may succeed
                    raise
                log.warning("The model of run %s cannot be promoted (%s)", run.run_id, one_line(error))
