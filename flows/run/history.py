"""Compares a run with earlier runs of the same settings, and reports a regression."""

import time
from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from paceline.flows.lifecycle.outage import report
from paceline.flows.lifecycle.prefect_artifacts import plain, table
from paceline.flows.run.outcome import Outcome
from paceline.flows.run.record import judged_metrics
from paceline.tasks.errors import RegressionError
from paceline.tasks.measure.validity import most_foreign
from paceline.tasks.names import REGRESSION_EVENT, SERIES_RESOURCE, Artifact, Metric, Tag, is_contaminated
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.speedup.between_starts import MAX_STARTS
from paceline.tasks.speedup.comparability import differences
from paceline.tasks.speedup.nights.regression import RegressionVerdict, RunMetrics, Tolerances, is_measure, judge
from paceline.tasks.track.queries import find_runs, read_document
from paceline.tasks.track.run import RunHandle

ACCEPTED = "accepted"
MAX_PAST = 600  # runs; more than a history needs, since some are disturbed


def judge_run(outcome: Outcome, handle: RunHandle) -> RegressionVerdict | None:
    """Compare a run with its history; None if `track.on_regression` is off."""
    track = outcome.config.track
    if track.on_regression == "off":
        return None
    ranks, num_devices = outcome.trained.world_size, outcome.config.execution.world_size
    if ranks != num_devices:
        return RegressionVerdict(verdict="not comparable", text=f"finished on {ranks} of {num_devices} devices")
    past = past_runs(handle, outcome.series)
    metrics = {name: value for name, value in judged_metrics(outcome).items() if value is not None}
    tags = {Tag.CONTAMINATED: str(outcome.speedup.contaminated), Tag.HOSTS: outcome.hosts}
    now = run_metrics(handle.run_id, metrics, tags, time.time(), contaminated=outcome.is_disturbed)
    margins = Tolerances(
        throughput=track.max_throughput_loss,
        score=track.max_accuracy_loss,
        data_wait=track.max_data_wait_rise,
        foreign_cores=most_foreign(outcome.hardware.num_cores),
    )
    judgement = judge([*past, now], margins, outcome.evaluated.score_name)
    if judgement.verdict in ("regression", "disturbed"):
        last = next((run for run in reversed(past) if is_measure(run)), None)
        before = read_document(handle.tracking_uri, last.run_id, Artifact.FACTS) if last is not None else None
        changes = "what has changed since the last good run is not known"
        if last is not None and before:
            since = f"since the last good run ({last.run_id[:8]})"
            changed = "; ".join(differences(before, outcome.facts))
            changes = f"changed {since}: {changed}" if changed else f"no setting, code, version or data changed {since}"
        judgement = judgement.model_copy(update={"text": f"{judgement.text}; {changes}"})
        get_run_logger().warning("Worse than before: %s", judgement.text)
    return judgement


def past_runs(handle: RunHandle, series: str) -> list[RunMetrics]:
    """The runs of a series, the oldest first, since the newest accepted regression."""
    condition = f"tags.`{Tag.SERIES}` = '{series}' and attributes.status = 'FINISHED'"
    past = []
    for run in find_runs(handle.tracking_uri, handle.experiment, condition, MAX_PAST):
        if run.run_id == handle.run_id:
            continue
        regressed = run.tags.get(Tag.REGRESSION, "none") not in ("none", ACCEPTED)
        contaminated = run.tags.get(Tag.DISTURBED) == "True"
        facts = run.metrics, run.tags, run.start_time
        past.append(run_metrics(run.run_id, *facts, contaminated=contaminated, regressed=regressed))
        if run.tags.get(Tag.REGRESSION) == ACCEPTED:
            break
    return past[::-1]


def earlier_ratios(outcome: Outcome, handle: RunHandle) -> tuple[float, ...]:
    """Speedups of undisturbed earlier starts of this series with the same two arms, the oldest first."""
    probe = outcome.trained.probe
    if probe is None:
        return ()
    arms = {Tag.BASELINE: probe.baseline.label, Tag.CANDIDATE: probe.candidate.label}
    condition = f"tags.`{Tag.SERIES}` = '{outcome.series}' and attributes.status = 'FINISHED'"
    runs = find_runs(handle.tracking_uri, handle.experiment, condition, MAX_STARTS)
    ratios = (
        run.metrics.get(Metric.PROCESS_SPEEDUP, run.metrics.get(Metric.SPEEDUP))
        for run in runs[::-1]
        if run.run_id != handle.run_id
        and not is_contaminated(run.tags)
        and all(run.tags.get(tag) == label for tag, label in arms.items())
    )
    return tuple(ratio for ratio in ratios if ratio)


def run_metrics(
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    start_time: float,
    *,
    contaminated: bool = False,
    regressed: bool = False,
) -> RunMetrics:
    """Select the metrics of a run that a regression is judged by."""
    rate = metrics.get(Metric.THROUGHPUT)
    seconds = {name: metrics[key] for name in ("data_wait", *STEP_ITEMS) if (key := f"time/{name}_seconds") in metrics}
    total = sum(seconds.values())
    is_disturbed = tags.get(Tag.CONTAMINATED) == "True"  # the probe, in which the control was timed
    items = {name: spent / total / rate for name, spent in seconds.items()} if rate and total > 0 else {}
    return RunMetrics(
        run_id=run_id,
        throughput=metrics.get(Metric.STEADY_THROUGHPUT),
        score=metrics.get(Metric.TEST_SCORE, metrics.get(Metric.TEST_ACCURACY)),
        data_wait=metrics.get(Metric.DATA_WAIT_FRACTION),
        baseline_throughput=None if is_disturbed else metrics.get(Metric.BASELINE_THROUGHPUT),
        host=tags.get(Tag.HOSTS, tags.get(Tag.HOST, "")),
        start_time=start_time,
        item_seconds=items,
        foreign_cores=metrics.get(Metric.FOREIGN_CORES),
        contaminated=contaminated,
        regressed=regressed,
    )


def report_regression(outcome: Outcome, summary: dict[str, Any]) -> None:
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
