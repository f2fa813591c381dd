"""Predictions in the store: found again when a run at their number of devices comes, and held against it."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records import Plan, Record
from paceline.tasks.speedup.forecast.records import AdviseResult, Check, calibration, check
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import find_runs, read_document
from paceline.tasks.track.run import RunHandle

R = TypeVar("R", bound=Record)


def execution_of(plan: Plan) -> str:
    """What of an execution a prediction is made for; the number of devices is what it predicts."""
    threads = f", {plan.num_threads} threads" if plan.accelerator == "cpu" else ""
    return f"{plan.device_name}{threads}, {plan.precision}, {plan.memory_format}, {plan.compile}, {plan.loading}"


def check_prediction(
    handle: RunHandle, config: Config, plan: Plan, workload: str, speedup: SpeedupResult
) -> dict[str, Any] | None:
    """Hold the newest prediction for this work, execution and number of devices against what was measured, and log it.

    Nothing is checked on one device, without a measured efficiency, or on a contaminated machine.

    Returns:
        The fields of `Check`, and `calibration`: in words, how good all predictions of the experiment have been.
    """
    if plan.world_size < 2 or speedup.efficiency is None or speedup.contaminated:  # noqa: PLR2004
        return None
    condition = (
        f"tags.`{Tag.ROLE}` = 'advise' and tags.`{Tag.WORKLOAD}` = '{workload}' and attributes.status = 'FINISHED'"
    )
    for found in find_runs(handle.tracking_uri, handle.experiment, condition):
        if found.tags.get(Tag.EXECUTION) != execution_of(plan):
            continue
        document = read_document(handle.tracking_uri, found.run_id, Artifact.ADVICE)
        advised = _known(AdviseResult, document)
        for prediction in advised.predictions if advised else ():
            if (prediction.num_devices, prediction.scaling) == (plan.world_size, config.recipe.batch_scaling):
                measured = speedup.efficiency * plan.world_size
                return _log(handle, check(prediction, found.run_id, handle.run_id, measured, time.time()))
    return None


def _log(handle: RunHandle, checked: Check) -> dict[str, Any]:
    metrics: dict[str, float | None] = {
        Metric.FORECAST_RATIO: checked.predicted,
        Metric.FORECAST_LOW: checked.low,
        Metric.FORECAST_HIGH: checked.high,
        Metric.FORECAST_MEASURED: checked.measured,
        Metric.FORECAST_ERROR: checked.error,
        Metric.FORECAST_INSIDE: float(checked.inside),
    }
    verdict = calibration([*past_checks(handle), checked])["verdict"]
    tags = {Tag.PREDICTION_RUN_ID: checked.prediction_run_id, Tag.CALIBRATION: verdict}
    tracking.log_facts(handle, metrics, tags)
    tracking.log_document(handle, Artifact.PREDICTION_CHECK, checked.model_dump(mode="json"))
    return checked.model_dump(mode="json") | {"calibration": verdict}


def past_checks(handle: RunHandle) -> list[Check]:
    """All checks of the experiment, the oldest first."""
    found = find_runs(handle.tracking_uri, handle.experiment, f"metrics.`{Metric.FORECAST_ERROR}` > -1e9")
    documents = [read_document(handle.tracking_uri, run.run_id, Artifact.PREDICTION_CHECK) for run in reversed(found)]
    return [check for document in documents if (check := _known(Check, document)) is not None]


def _known(kind: type[R], document: object) -> R | None:
    """A record of the store; None where it is not there, or another version wrote it."""
    try:
        return kind.model_validate(document) if document else None
    except ValidationError:
        return None
