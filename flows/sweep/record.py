"""Records a sweep in its MLflow run: the table of trials, the report, the best trial's settings."""

from typing import Any

from paceline.flows.lifecycle.mlflow_views import share
from paceline.flows.lifecycle.report_artifacts import describe_devices, log_environment, log_report
from paceline.flows.sweep.trial import SweepContext
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.report.sweep_report import draw_sweep, render_sweep
from paceline.tasks.scores import SCORE_OF_TASK
from paceline.tasks.speedup.study.pairs import figures_of
from paceline.tasks.sweep.concurrency import Colocation
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import most_epochs
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import package_versions
from paceline.tasks.track.ui_views import view_of_sweep

SUMMARY = ("run_id", "experiment", "sampler", "pruner", "score_name", "occupancy", "seconds")


def log_sweep(
    work: SweepContext, colocation: Colocation | None, no_colocation: str, seconds: float
) -> tuple[SweepResult, dict[str, Any]]:
    """Record the sweep in its run, with the reason for no measurement of colocation; the JSON of `paceline sweep`."""
    parent, hardware = work.parent, work.checked.hardware
    result = SweepResult(
        run_id=parent.run_id,
        experiment=parent.experiment,
        preset=work.request.preset,
        parameters=work.parameters,
        sampler=work.request.sampler,
        pruner=work.request.pruner,
        at_once=work.room.at_once,
        num_epochs=most_epochs(work.config, work.parameters),
        score_name=SCORE_OF_TASK[work.config.model.task],
        trials=work.proposer.trials(),
        colocation=colocation,
        no_colocation=no_colocation,
        seconds=seconds,
        hardware=f"{hardware.host}: {describe_devices(hardware)}",
        versions={name: version for name, version in package_versions().items() if version},
    )
    environment = log_environment(parent, hardware)
    log_report(parent, render_sweep(result, environment), draw_sweep(result))
    tracking.log_document(parent, Artifact.SWEEP, result.model_dump(mode="json"))
    view = share(parent, view_of_sweep(parent.run_id, [parameter.setting for parameter in result.parameters]))
    best = result.best
    summary: dict[str, Any] = {
        **{name: getattr(result, name) for name in SUMMARY},
        "tracking_uri": parent.public_uri,
        "at_once": result.at_once.value,
        "best": _plain(result, best) | {"test_score": best.test_score} if best else None,
        "trials": [_plain(result, trial) for trial in result.trials],
        "num_done": result.num("done"),
        "num_pruned": result.num("pruned"),
        "num_failed": result.num("failed"),
        "speedup": _speedup(result),
        "report": Artifact.REPORT,
        "view": view,
    }
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    tags = {Tag.LAYOUT: colocation.layout, Tag.CONTAMINATED: str(colocation.contaminated)} if colocation else {}
    if best is not None:
        tags |= {Tag.BEST_RUN_ID: best.run_id or "", Tag.BEST: " ".join(result.overrides(best))}
    tracking.log_facts(parent, _metrics(result), tags)
    return result, summary


def _metrics(result: SweepResult) -> dict[str, float | None]:
    best, (speedup, low, high) = result.best, figures_of(result.speedup)
    return {
        Metric.SWEEP_NUM_TRIALS: len(result.trials),
        Metric.SWEEP_NUM_PRUNED: result.num("pruned"),
        Metric.SWEEP_NUM_FAILED: result.num("failed"),
        Metric.SWEEP_SECONDS: result.seconds,
        Metric.SWEEP_OCCUPANCY: result.occupancy,
        Metric.SPEEDUP: speedup,
        Metric.SPEEDUP_LOW: low,
        Metric.SPEEDUP_HIGH: high,
        Metric.SWEEP_BEST_SCORE: best.score if best else None,
        Metric.SWEEP_BEST_TEST_SCORE: best.test_score if best else None,
    }


def _plain(result: SweepResult, trial: Trial) -> dict[str, Any]:
    names = ("number", "run_id", "status", "score", "values", "restarts", "seconds", "error")
    facts = {name: getattr(trial, name) for name in names}
    return facts | {"overrides": list(result.overrides(trial)), "num_epochs": len(trial.scores)}


def _speedup(result: SweepResult) -> dict[str, Any]:
    speedup, colocation = result.speedup, result.colocation
    if speedup is None or colocation is None:
        return {"ratio": None, "low": None, "high": None, "layout": None, "reason": result.no_colocation}
    ratios = {name: getattr(colocation, name) for name in ("over_alone", "over_together", "over_whole")}
    return {
        "ratio": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "layout": colocation.layout,
        "num_rounds": colocation.num_rounds,
        "contaminated": colocation.contaminated,
        **{name: ratio and ratio.model_dump() for name, ratio in ratios.items()},
    }
