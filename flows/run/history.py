"""Compares a run with what is in the store: earlier runs of its settings, a baseline, and forecasts of it."""

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.conf.lightning import Objective
from paceline.flows.checks.preflight import ROLES
from paceline.flows.compare import read_compared_run
from paceline.flows.lifecycle.outage import plain, report, table
from paceline.flows.run.outcome import FinishedRun, judged_metrics
from paceline.tasks.errors import RegressionError
from paceline.tasks.measure.validity import most_foreign
from paceline.tasks.names import REGRESSION_EVENT, SERIES_RESOURCE, Artifact, Metric, Tag, is_contaminated
from paceline.tasks.records.execution import BASELINE, Plan
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.scores import own_name
from paceline.tasks.speedup.between_starts import MAX_STARTS
from paceline.tasks.speedup.comparability import differences
from paceline.tasks.speedup.compare import ComparedRun, is_plain, speedup_across
from paceline.tasks.speedup.forecast.records import AdviseResult, Check, ScalingKind, calibration, check
from paceline.tasks.speedup.nights.regression import RegressionVerdict, RunMetrics, Tolerances, is_measure, judge
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import MAX_RUNS, FoundRun, find_runs, get_runs, read_document
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.plan import arm_of

ACCEPTED = "accepted"
MAX_PAST = 600  # runs; more than a history needs, since some are disturbed
MAX_BASES = 10
MAX_SEEN = 50  # runs of the same work among which to look for plain executions
HOW = (
    "execution.num_devices=1 execution.precision=32-true execution.compile=off execution.memory_format=contiguous "
    "execution.loading=foreground speedup.baseline=none"
)
R = TypeVar("R", bound=Record)


def _finished_runs(handle: RunHandle, tags: dict[str, str], limit: int | None = MAX_RUNS) -> list[FoundRun]:
    condition = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
    condition += " and attributes.status = 'FINISHED'"
    return find_runs(handle.tracking_uri, handle.experiment, condition, limit, is_patient=True)


def judge_run(outcome: FinishedRun, handle: RunHandle) -> RegressionVerdict | None:
    """Compare a run with its history; None if `track.on_regression` is off."""
    track = outcome.config.track
    if track.on_regression == "off":
        return None
    ranks, num_devices = outcome.trained.world_size, outcome.config.execution.world_size
    if ranks != num_devices:
        return RegressionVerdict(verdict="not comparable", text=f"finished on {ranks} of {num_devices} devices")
    if changed := tracking.tag(handle, Tag.RESUMED_WITH):
        return RegressionVerdict(verdict="not comparable", text=f"resumed after a change: {changed}")
    past, metrics = past_runs(handle, outcome.series, outcome.score_metric), judged_metrics(outcome)
    tags = {Tag.CONTAMINATED: str(outcome.speedup.contaminated), Tag.HOSTS: outcome.hosts}
    marks = {"contaminated": outcome.is_disturbed, "score": metrics.get(outcome.score_metric)}
    now = run_metrics(handle.run_id, metrics, tags, time.time(), **marks)
    margins = Tolerances(
        throughput=track.max_throughput_loss,
        score=track.max_accuracy_loss,
        data_wait=track.max_data_wait_rise,
        foreign_cores=most_foreign(outcome.hardware.num_cores),
    )
    judgement = judge([*past, now], margins, outcome.score)
    has_score = any(is_measure(run) and run.score is not None for run in past)
    if isinstance(outcome.score, Objective) and now.score is None and has_score:
        text = f"{own_name(outcome.score)} is no finite number at the end of the training"
        text = f"{judgement.text}; {text}" if judgement.verdict == "regression" else text
        judgement = judgement.model_copy(update={"verdict": "regression", "text": text})
    if judgement.verdict in ("regression", "disturbed"):
        last = next((run for run in reversed(past) if is_measure(run)), None)
        before = read_document(handle.tracking_uri, last.run_id, Artifact.FACTS) if last is not None else None
        changes = "what has changed since the last good run is not known"
        if last is not None and before:
            since = f"since the last good run ({last.run_id[:8]})"
            changed = "; ".join(differences(before, outcome.facts))
            same = "code, version or data" if outcome.prepared else "code or version"  # own data are not compared
            changes = f"changed {since}: {changed}" if changed else f"no setting, {same} changed {since}"
        judgement = judgement.model_copy(update={"text": f"{judgement.text}; {changes}"})
        get_run_logger().warning("Worse than before: %s", judgement.text)
    return judgement


def past_runs(handle: RunHandle, series: str, score: str = Metric.TEST_SCORE) -> list[RunMetrics]:
    """The runs of a series, the oldest first, since the newest accepted regression."""
    past = []
    for run in _finished_runs(handle, {Tag.SERIES: series}, MAX_PAST):
        if run.run_id == handle.run_id:
            continue
        regressed = run.tags.get(Tag.REGRESSION, "none") not in ("none", ACCEPTED)
        contaminated = run.tags.get(Tag.DISTURBED) == "True"
        marks = {"contaminated": contaminated, "regressed": regressed, "score": run.metrics.get(score)}
        past.append(run_metrics(run.run_id, run.metrics, run.tags, run.start_time, **marks))
        if run.tags.get(Tag.REGRESSION) == ACCEPTED:
            break
    return past[::-1]


def earlier_ratios(outcome: FinishedRun, handle: RunHandle) -> tuple[float, ...]:
    """Speedups of undisturbed earlier starts of this series with the same two arms, the oldest first."""
    if (probe := outcome.trained.probe) is None:
        return ()
    arms = {Tag.BASELINE: probe.baseline.label, Tag.CANDIDATE: probe.candidate.label}
    ratios = (
        run.metrics.get(Metric.PROCESS_SPEEDUP, run.metrics.get(Metric.SPEEDUP))
        for run in _finished_runs(handle, {Tag.SERIES: outcome.series}, MAX_STARTS)[::-1]
        if run.run_id != handle.run_id
        and not is_contaminated(run.tags)
        and Tag.RESUMED_WITH not in run.tags
        and all(run.tags.get(tag) == label for tag, label in arms.items())
    )
    return tuple(ratio for ratio in ratios if ratio)


def run_metrics(
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    start_time: float,
    score: float | None = None,
    **marks: Any,
) -> RunMetrics:
    """Select the metrics of a run that a regression is judged by; marks are `contaminated` and `regressed`.

    `score` is given of own Lightning code, whose metrics have any names.
    """
    rate = metrics.get(Metric.THROUGHPUT)
    seconds = {name: metrics[key] for name in ("data_wait", *STEP_ITEMS) if (key := f"time/{name}_seconds") in metrics}
    total = sum(seconds.values())
    is_disturbed = tags.get(Tag.CONTAMINATED) == "True"  # the probe, in which the control was timed
    items = {name: spent / total / rate for name, spent in seconds.items()} if rate and total > 0 else {}
    return RunMetrics(
        run_id=run_id,
        throughput=metrics.get(Metric.STEADY_THROUGHPUT),
        score=metrics.get(Metric.TEST_SCORE, metrics.get(Metric.TEST_ACCURACY)) if score is None else score,
        data_wait=metrics.get(Metric.DATA_WAIT_FRACTION),
        baseline_throughput=None if is_disturbed else metrics.get(Metric.BASELINE_THROUGHPUT),
        host=tags.get(Tag.HOSTS, tags.get(Tag.HOST, "")),
        start_time=start_time,
        item_seconds=items,
        foreign_cores=metrics.get(Metric.FOREIGN_CORES),
        **marks,
    )


def speedup_over_others(outcome: FinishedRun, handle: RunHandle) -> SpeedupResult:
    """Compute the speedup over the named run, or over runs of the same work with the baseline's execution."""
    baseline = outcome.config.speedup.baseline
    if baseline == "matched":
        runs = _finished_runs(handle, {Tag.WORKLOAD: outcome.workload}, MAX_SEEN)
        same = (read_compared_run(handle.tracking_uri, run) for run in runs if run.tags.get(Tag.ROLE) in ROLES)
        bases = list(islice((base for base in same if is_plain(base, BASELINE)), MAX_BASES))
        if not bases:
            return SpeedupResult(
                verdict=f"not divided: no run of this work in the experiment was executed as the baseline is; add "
                f"{HOW} for one",
                cause="not divided",
            )
    else:
        baseline_runs = get_runs(handle.tracking_uri, [baseline], is_patient=True)
        bases = [read_compared_run(handle.tracking_uri, run) for run in baseline_runs]
    now = ComparedRun(
        run_id=handle.run_id,
        name=outcome.config.name,
        status="FINISHED",
        start_time=0.0,
        facts=outcome.facts,
        metrics=judged_metrics(outcome),
        tags={Tag.DISTURBED: str(outcome.is_disturbed)},
    )
    limit = most_foreign(outcome.hardware.num_cores)
    return speedup_across(now, bases, limit, arm_of(outcome.plan).label)


def report_regression(outcome: FinishedRun, summary: dict[str, Any]) -> None:
    """Report a regression by an artifact and an event; raise RegressionError if track.on_regression=fail."""
    config, judged = outcome.config, summary["regression"]
    if not judged or judged["verdict"] != "regression":
        return
    rows = []
    for change in judged["changes"]:
        figures = (f"{change[figure]:.4g}" for figure in ("value", "expected", "limit"))
        rows.append((change["name"], *figures, change["num_runs"], change["num_before"]))
    changes = table(("measure", "now", "before", "alarm at", "runs", "runs before"), rows)
    report(
        create_markdown_artifact,
        key="regression",
        markdown=f"{plain(judged['text'])}\n\n{changes}",
        description=f"{plain(config.name)} is worse than before",
    )
    emit_event(
        REGRESSION_EVENT,
        resource={"prefect.resource.id": f"{SERIES_RESOURCE}.{outcome.series}", "prefect.resource.name": config.name},
        payload={
            "text": judged["text"],
            "measures": [change["name"] for change in judged["changes"]],
            "grew": judged["grew"],
            "run_id": summary["run_id"],
            "experiment": summary["experiment"],
        },
    )
    if config.track.on_regression == "fail":
        raise RegressionError(f"worse than before: {judged['text']}", summary)


def execution_of(plan: Plan) -> str:
    """Describe the execution that a forecast is valid for, without the number of devices."""
    threads = f", {plan.num_threads} threads" if plan.accelerator == "cpu" else ""
    precision = f"{plan.precision} ({plan.arithmetic})" if plan.arithmetic else plan.precision
    return f"{plan.device_name}{threads}, {precision}, {plan.memory_format}, {plan.compile}, {plan.loading}"


def scaling_of(config: Config) -> ScalingKind:
    """How more devices change the batch: each rank of own Lightning code has the loader's own."""
    return "weak" if config.lightning.settings else config.recipe.batch_scaling


def check_prediction(outcome: FinishedRun, handle: RunHandle) -> dict[str, Any] | None:
    """Compare the newest forecast for this work, execution and number of devices with the run, and log the result.

    Returns the fields of `Check`, and `calibration`: a verdict on all forecasts of the experiment. None on one device,
    without a measured efficiency, or on a contaminated machine.
    """
    plan, speedup = outcome.plan, outcome.speedup
    if plan.world_size < 2 or speedup.efficiency is None or speedup.contaminated:  # noqa: PLR2004
        return None
    for run in _finished_runs(handle, {Tag.ROLE: "advise", Tag.WORKLOAD: outcome.workload}):
        if run.tags.get(Tag.EXECUTION) != execution_of(plan):
            continue
        advice = _parse(AdviseResult, read_document(handle.tracking_uri, run.run_id, Artifact.ADVICE))
        for prediction in advice.predictions if advice else ():
            if (prediction.num_devices, prediction.scaling) == (plan.world_size, scaling_of(outcome.config)):
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
    condition = "metrics.`prediction/error` > -1e9"
    runs = find_runs(handle.tracking_uri, handle.experiment, condition, is_patient=True)
    documents = [read_document(handle.tracking_uri, run.run_id, Artifact.PREDICTION_CHECK) for run in reversed(runs)]
    return [check for document in documents if (check := _parse(Check, document)) is not None]


def _parse(kind: type[R], document: object) -> R | None:
    """Parse a stored record; None if there is none, or another version wrote it."""
    try:
        return kind.model_validate(document) if document else None
    except ValidationError:
        return None
