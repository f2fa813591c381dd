"""A run among those of the same settings before it: found in the store, judged, and told where it is worse."""

from __future__ import annotations

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
from paceline.tasks.names import REGRESSION_EVENT, SERIES_RESOURCE, Artifact, Metric, Tag
from paceline.tasks.records import STEP_ITEMS
from paceline.tasks.speedup.comparability import differences
from paceline.tasks.speedup.regression import WINDOW, RegressionVerdict, RunMetrics, Tolerances, is_measure, judge
from paceline.tasks.track.queries import FoundRun, find_runs, read_document
from paceline.tasks.track.run import RunHandle

EVENT = REGRESSION_EVENT
"""Name of the event that a Prefect automation may wait for."""
ACCEPTED = "accepted"
MAX_PAST = 10 * WINDOW


def judge_run(outcome: Outcome, handle: RunHandle) -> RegressionVerdict | None:
    """Hold a run against its history; None where nobody looks."""
    track = outcome.config.track
    if track.on_regression == "off":
        return None
    ranks, wanted = outcome.trained.world_size, outcome.config.execution.world_size
    if ranks != wanted:
        return RegressionVerdict(verdict="not comparable", text=f"trained to its end on {ranks} of {wanted} devices")
    past = past_runs(handle, outcome.series)
    known = {name: value for name, value in judged_metrics(outcome).items() if value is not None}
    now = figures(handle.run_id, known, contaminated=outcome.disturbed)
    margins = Tolerances(
        throughput=track.max_throughput_loss,
        score=track.max_accuracy_loss,
        data_wait=track.max_data_wait_rise,
        foreign_cores=most_foreign(outcome.hardware.num_cores),
    )
    judgement = judge([*past, now], margins, outcome.evaluated.score_name)
    if judgement.verdict in ("regression", "disturbed"):
        judgement = judgement.model_copy(update={"text": f"{judgement.text}; {_changed(handle, past, outcome.facts)}"})
        get_run_logger().warning("Worse than before: %s", judgement.text)
    return judgement


def past_runs(handle: RunHandle, series: str) -> list[RunMetrics]:
    """The runs of a series, the oldest first; from the newest one on whose regression somebody has accepted."""
    condition = f"tags.`{Tag.SERIES}` = '{series}' and attributes.status = 'FINISHED'"
    found = find_runs(handle.tracking_uri, handle.experiment, condition, MAX_PAST)
    past = []
    for run in found:
        if run.run_id == handle.run_id:
            continue
        past.append(_figures_of(run))
        if run.tags.get(Tag.REGRESSION) == ACCEPTED:
            break
    return past[::-1]


def _figures_of(run: FoundRun) -> RunMetrics:
    regressed = run.tags.get(Tag.REGRESSION, "none") not in ("none", ACCEPTED)
    contaminated = run.tags.get(Tag.DISTURBED) == "True"
    return figures(run.run_id, run.metrics, contaminated=contaminated, regressed=regressed)


def figures(
    run_id: str, metrics: Mapping[str, float], *, contaminated: bool = False, regressed: bool = False
) -> RunMetrics:
    """What the metrics of a run say of it."""
    rate = metrics.get(Metric.THROUGHPUT)
    seconds = {name: metrics[key] for name in ("data_wait", *STEP_ITEMS) if (key := Metric.seconds(name)) in metrics}
    total = sum(seconds.values())
    items = {name: spent / total / rate for name, spent in seconds.items()} if rate and total > 0 else {}
    return RunMetrics(
        run_id=run_id,
        throughput=metrics.get(Metric.STEADY_THROUGHPUT),
        score=metrics.get(Metric.TEST_SCORE, metrics.get(Metric.TEST_ACCURACY)),
        data_wait=metrics.get(Metric.DATA_WAIT_FRACTION),
        baseline_throughput=metrics.get(Metric.BASELINE_THROUGHPUT),
        item_seconds=items,
        foreign_cores=metrics.get(Metric.FOREIGN_CORES),
        contaminated=contaminated,
        regressed=regressed,
    )


def _changed(handle: RunHandle, past: list[RunMetrics], facts: Mapping[str, str]) -> str:
    """What is not as it was in the last good run."""
    last = next((run for run in reversed(past) if is_measure(run)), None)
    before = read_document(handle.tracking_uri, last.run_id, Artifact.FACTS) if last is not None else None
    if last is None or not before:
        return "what has changed since the last good run is not known"
    found = differences(before, facts)
    since = f"since the last good run ({last.run_id[:8]})"
    return f"changed {since}: {'; '.join(found)}" if found else f"no setting, code, version or data changed {since}"


def report_regression(outcome: Outcome, summary: dict[str, Any]) -> None:
    """Tell of a regression: an artifact and an event of the flow run, and failure where that is wanted.

    Args:
        outcome: of the run.
        summary: of the run; travels with the failure.

    Raises:
        RegressionError: the run was told to fail.
    """
    config, judged = outcome.config, summary["regression"]
    if not judged or judged["verdict"] != "regression":
        return
    rows = [
        (
            change["name"],
            *(f"{change[figure]:.4g}" for figure in ("value", "expected", "limit")),
            change["num_runs"],
            change["num_before"],
        )
        for change in judged["changes"]
    ]
    figures_of_it = table(("measure", "now", "before", "alarm at", "runs", "runs before"), rows)
    report(
        create_markdown_artifact,
        key="regression",
        markdown=f"{plain(judged['text'])}\n\n{figures_of_it}",
        description=f"{plain(config.name)} is worse than before",
    )
    emit_event(
        EVENT,
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
