"""Compares the forecasts in the store with the runs that test them."""

import time
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.flows.run.outcome import Outcome
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.forecast.records import AdviseResult, Check, calibration, check
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import find_runs, read_document
from paceline.tasks.track.run import RunHandle

R = TypeVar("R", bound=Record)


def execution_of(plan: Plan) -> str:
    """Describe the execution that a forecast is valid for, without the number of devices."""
    threads = f", {plan.num_threads} threads" if plan.accelerator == "cpu" else ""
    precision = f"{plan.precision} ({plan.arithmetic})" if plan.arithmetic else plan.precision
    return f"{plan.device_name}{threads}, {precision}, {plan.memory_format}, {plan.compile}, {plan.loading}"


def check_prediction(outcome: Outcome, handle: RunHandle) -> dict[str, Any] | None:
    """Compare the newest forecast for this work, execution and number of devices with the run, and log the result.

    Returns the fields of `Check`, and `calibration`: a verdict on all forecasts of the experiment. None on one device,
    without a measured efficiency, or on a contaminated machine.
    """
    plan, speedup = outcome.plan, outcome.speedup
    if plan.world_size < 2 or speedup.efficiency is None or speedup.contaminated:  # noqa: PLR2004
        return None
    conditions = f"tags.`{Tag.ROLE}` = 'advise' and tags.`{Tag.WORKLOAD}` = '{outcome.workload}'"
    finished = f"{conditions} and attributes.status = 'FINISHED'"
    for run in find_runs(handle.tracking_uri, handle.experiment, finished):
        if run.tags.get(Tag.EXECUTION) != execution_of(plan):
            continue
        advice = _parse(AdviseResult, read_document(handle.tracking_uri, run.run_id, Artifact.ADVICE))
        for prediction in advice.predictions if advice else ():
            if (prediction.num_devices, prediction.scaling) == (plan.world_size, outcome.config.recipe.batch_scaling):
                measured = speedup.efficiency * plan.world_size
                return _log(handle, check(prediction, run.run_id, handle.run_id, measured, time.time()))
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
    runs = find_runs(handle.tracking_uri, handle.experiment, "metrics.`prediction/error` > -1e9")
    documents = [read_document(handle.tracking_uri, run.run_id, Artifact.PREDICTION_CHECK) for run in reversed(runs)]
    return [check for document in documents if (check := _parse(Check, document)) is not None]


def _parse(kind: type[R], document: object) -> R | None:
    """Parse a stored record; None if there is none, or another version wrote it."""
    try:
        return kind.model_validate(document) if document else None
    except ValidationError:
        return None
