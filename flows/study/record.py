"""Records a study, of either kind: the report in its parent run, and the ratios in the runs of its arms."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.flows.compare import trained_runs
from paceline.flows.lifecycle.mlflow_views import describe_host, known_versions, log_result, share_study
from paceline.flows.study.no_gpu import time_predictions
from paceline.flows.study.trainings import PlannedArm, StudyContext
from paceline.tasks.evaluate.metrics import discordant, score_difference
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.report.no_gpu_report import draw_no_gpu, render_no_gpu
from paceline.tasks.report.study_charts import draw_study
from paceline.tasks.report.study_report import render_study, study_notes
from paceline.tasks.scores import is_share
from paceline.tasks.speedup.data_sheet import SHEETS
from paceline.tasks.speedup.hardware_table import HardwareRow, same_work, tabulate
from paceline.tasks.speedup.study import analysis, no_gpu
from paceline.tasks.speedup.study.inference import own_difference
from paceline.tasks.speedup.study.no_gpu_verdict import judge, notes_of
from paceline.tasks.speedup.study.pairs import StudyRuns, figures_of
from paceline.tasks.speedup.study.records import ArmRun, ArmSummary, Scaling, StudyArm, StudyResult
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle

SUMMARY = ("run_id", "experiment", "kind", "num_repeats", "contaminated", "seconds")
ARM_SUMMARY = (
    *("execution", "samples_per_second", "significant", "hit_rate", "score_name", "score", "parity"),
    *("parity_margin", "p_value", "confirmed", "break_even_epochs", "break_even_low", "break_even_high"),
    *("num_failed", "error", "flops_per_second", "of_limit", "mfu"),
)
NO_GPU_SUMMARY = (
    *("run_id", "experiment", "choice", "verdict", "num_repeats", "target", "targets", "ways", "prediction_ratio"),
    "seconds",
)
MAX_UNCHOSEN = 2  # a baseline and one arm: nothing is chosen, so nothing needs to be confirmed


def study_runs(work: StudyContext, arms: list[PlannedArm]) -> StudyRuns:
    """The trainings so far, each compared with that of its group's baseline in the same repeat."""
    planned, prepared = [arm.arm for arm in arms], {each.fingerprint: each for each in work.prepared.values()}
    groups = {arm.name: arm.group for arm in planned}
    names = {arm.name for arm in planned if arm.is_baseline}
    runs = work.ledger.runs()
    baselines = {(groups[run.arm], run.repeat): run for run in runs if run.status == "done" and run.arm in names}
    compared = [_compare_with_baseline(run, baselines.get((groups[run.arm], run.repeat)), prepared) for run in runs]
    return StudyRuns(planned, compared)


def unconfirmed_winners(work: StudyContext, arms: list[PlannedArm]) -> list[StudyArm]:
    """Winners among several arms, which fresh trainings must confirm."""
    summaries = analysis.summarise_arms(study_runs(work, arms))
    groups = Counter(arm.arm.group for arm in arms)
    winners = [analysis.winner(summaries, group) for group, count in groups.items() if count > MAX_UNCHOSEN]
    return [best.arm for best in winners if best is not None and not best.arm.is_baseline]


def _compare_with_baseline(run: ArmRun, base: ArmRun | None, known: dict[str, PreparedSet]) -> ArmRun:
    prepared = known.get(run.facts.get("data", ""))
    if base is None or run.status != "done" or run.score_name != base.score_name:
        return run
    if not is_share(run.score_name):
        value, error = own_difference(run, base) or (None, None)
        return run.model_copy(update={"score_difference": value, "score_error": error})
    if prepared is None or base.facts.get("data") != run.facts["data"]:
        return run
    if run.score_name != "accuracy":  # no sample is simply right or wrong
        value, error = score_difference(base.predictions, run.predictions, prepared, run.score_name)
        return run.model_copy(update={"score_difference": value, "score_error": error})
    gained, lost = discordant(base.predictions, run.predictions, prepared)
    return run.model_copy(update={"num_gained": gained, "num_lost": lost})


def log_study(work: StudyContext, arms: list[PlannedArm], started: float) -> tuple[dict[str, Any], list[str]]:
    """Record a study in its parent run, and each arm's ratio in the arm's runs.

    Returns the JSON of the command, a public contract, and notes.
    """
    request, parent, hardware = work.request, work.parent, arms[0].checked.hardware
    price, seconds = request.config.speedup.price_per_device_hour, time.monotonic() - started
    trainings = study_runs(work, arms)
    rungs, interaction = analysis.ladder(trainings)
    target = request.target
    if target is None and len({arm.group for arm in trainings.arms}) == 1:
        target = analysis.target_accuracy(trainings, "")
    result = StudyResult(
        run_id=parent.run_id,
        experiment=parent.experiment,
        preset=request.preset,
        kind="ladder" if request.ladder else "grid",
        num_repeats=request.repeats,
        arms=analysis.summarise_arms(trainings, request.target, price),
        rungs=rungs,
        interaction=interaction,
        differences=analysis.budget_differences(trainings),
        scalings=analysis.scalings(trainings),
        target_accuracy=target,
        price_per_device_hour=price,
        contaminated=sum(bool(run.contaminated) for run in trainings.runs),
        seconds=seconds,
        hardware=describe_host(hardware),
        versions=known_versions(),
    )
    log_result(parent, Artifact.STUDY, result, hardware, render_study, draw_study)
    for arm in result.arms:
        _log_ratio(parent, result, arm)
    view = share_study(parent, [arm.score_name for arm in result.arms])
    summary: dict[str, Any] = {
        **{name: getattr(result, name) for name in SUMMARY},
        "tracking_uri": parent.public_uri,
        "arms": [_plain(arm) for arm in result.arms],
        "karp_flatt": _serial_fractions(result.scalings),
        "report": Artifact.REPORT,
        "view": view,
    }
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    num_failed = sum(arm.num_failed for arm in result.arms)
    metrics = _study_metrics(len(result.arms), num_failed, result.contaminated, result.seconds)
    tracking.log_facts(parent, metrics, {Tag.STUDY_KIND: result.kind})
    return summary | {"result": result.model_dump(mode="json")}, study_notes(result)


def _study_metrics(num_arms: int, num_failed: int, num_contaminated: int, seconds: float) -> dict[str, float | None]:
    return {
        Metric.STUDY_NUM_ARMS: num_arms,
        Metric.STUDY_NUM_FAILED: num_failed,
        Metric.STUDY_NUM_CONTAMINATED: num_contaminated,
        Metric.STUDY_SECONDS: seconds,
    }


def _log_ratio(parent: RunHandle, result: StudyResult, arm: ArmSummary) -> None:
    """An arm's ratio over all repeats, in each of its runs, so that the columns of the UI can compare them."""
    ratio, low, high = figures_of(arm.ratio)
    metrics: dict[str, float | None] = {
        Metric.SPEEDUP: ratio,
        Metric.SPEEDUP_LOW: low,
        Metric.SPEEDUP_HIGH: high,
        Metric.EFFICIENCY: arm.efficiency.value if arm.efficiency else None,
        Metric.BREAK_EVEN_EPOCHS: arm.break_even_epochs,
        Metric.END_TO_END_SPEEDUP: arm.end_to_end_ratio.value if arm.end_to_end_ratio else None,
        Metric.PREDICTION_SPEEDUP: arm.prediction_ratio.value if arm.prediction_ratio else None,
        Metric.COST_PER_EPOCH: arm.cost_per_epoch,
    }
    baseline = next(other for other in result.arms if other.arm.is_baseline and other.arm.group == arm.arm.group)
    tags = {
        Tag.BASELINE: baseline.arm.name,
        Tag.BASELINE_RUN_ID: ", ".join(baseline.run_ids),
        Tag.MATCH: "" if arm.match is None else str(arm.match.matches),
        Tag.PARITY: arm.parity,
    }
    for run_id in arm.run_ids:
        tracking.log_facts(parent.model_copy(update={"run_id": run_id}), metrics, tags)


def _plain(arm: ArmSummary) -> dict[str, Any]:
    """An arm in the JSON of `paceline study`; names and shape are the public contract."""
    ratio, low, high = figures_of(arm.ratio)
    return {
        "name": arm.arm.name,
        "group": arm.arm.group,
        "run_id": arm.run_ids[0] if arm.run_ids else None,
        "run_ids": list(arm.run_ids),
        **{name: getattr(arm, name) for name in ARM_SUMMARY},
        "ratio": ratio,
        "low": low,
        "high": high,
        "confirmation": arm.confirmation and arm.confirmation.model_dump(mode="json"),
        "efficiency": arm.efficiency and arm.efficiency.value,
        "prediction_ratio": arm.prediction_ratio and arm.prediction_ratio.value,
        "accuracy": arm.score if arm.score_name == "accuracy" else None,
        "matches": None if arm.match is None else arm.match.matches,
    }


def _serial_fractions(scalings: Sequence[Scaling]) -> dict[str, Any] | None:
    """By number of devices; where there is more than one scaling, by its group first."""
    by_group = {
        scaling.group: {str(point.num_devices): point.karp_flatt.value for point in scaling.points if point.karp_flatt}
        for scaling in scalings
    }
    non_empty = {group: fractions for group, fractions in by_group.items() if fractions}
    return next(iter(non_empty.values()), None) if len(non_empty) <= 1 else non_empty


def log_no_gpu(work: StudyContext, arms: list[PlannedArm], started: float) -> tuple[dict[str, Any], list[str]]:
    """Record a study with arms and its ways, with what the store's runs on GPUs say.

    Returns the JSON of the command, a public contract, and notes.
    """
    request, parent, checked = work.request, work.parent, arms[-1].checked
    assert checked.pretrained is not None
    trainings = study_runs(work, arms)
    predictions = time_predictions(work, arms, trainings.runs)
    seconds, rates = time.monotonic() - started, predictions.paces if predictions else {}
    gpu = no_gpu.Gpu(
        sheet=SHEETS[request.gpu],
        rows=_gpu_rows(work, trainings),
        rates=rates,
        name=predictions.gpu_name if predictions else None,
        cost=predictions.cost if predictions else None,
        num_train=work.prepared[arms[0].config.data].num_train,
        batch_size=request.config.global_batch_size,
    )
    validity, scratch = predictions.validity if predictions else None, rates.get(no_gpu.SCRATCH)
    goal = no_gpu.TargetScore(trainings, request.target)
    result = no_gpu.NoGpuResult(
        run_id=parent.run_id,
        experiment=parent.experiment,
        preset=request.preset,
        pretrained=checked.pretrained.summary,
        layer=request.arms[no_gpu.FEATURES].linear_eval or "",
        num_repeats=request.repeats,
        target=request.target,
        targets=goal.all(),
        ways=(
            *(no_gpu.measured_way(arm, goal, rates.get(arm.name)) for arm in trainings.arms),
            *(no_gpu.way_on_gpu(arm, goal, gpu) for arm in trainings.arms),
        ),
        prediction_ratio=scratch.ratio if scratch else None,
        prediction_disturbed=validity.reasons if validity and validity.contaminated else (),
        cost=gpu.cost,
        sheet=gpu.sheet,
        hardware=describe_host(checked.hardware),
        seconds=seconds,
    )
    choice, verdict = judge(result)
    result = result.model_copy(update={"choice": choice, "verdict": verdict, "notes": tuple(notes_of(result))})
    log_result(parent, Artifact.NO_GPU, result, arms[0].checked.hardware, render_no_gpu, draw_no_gpu)
    measured = [way for way in result.ways if way.is_measured]
    num_failed, contaminated = sum(way.num_failed for way in measured), sum(way.contaminated for way in measured)
    metrics = _study_metrics(len(measured), num_failed, contaminated, result.seconds)
    for way in measured:
        metrics |= _log_way(parent, way)
    summary = result.model_dump(mode="json", include={*NO_GPU_SUMMARY})
    summary |= {"tracking_uri": parent.public_uri, "report": Artifact.REPORT, "view": share_study(parent, ["accuracy"])}
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    tracking.log_facts(parent, metrics, {Tag.VERDICT: result.verdict, Tag.CHOICE: result.choice})
    return summary | {"result": result.model_dump(mode="json")}, [result.verdict, *result.notes]


def _gpu_rows(work: StudyContext, trainings: StudyRuns) -> dict[str, tuple[HardwareRow, ...]]:
    """Runs of the experiment that did the same work on GPUs, by way."""
    runs, _ = trained_runs(work.environment, work.parent.experiment)
    on_gpus = [run for run in runs if run.facts.get("execution.accelerator") == "gpu"]
    rows = {}
    for arm in trainings.arms:
        done = trainings.of(arm)
        same = same_work(on_gpus, done[0].facts) if done and arm.name in no_gpu.TRAINED else []
        rows[arm.name] = tuple(row for table in tabulate(same, {}, {}).tables for row in table.rows)
    return rows


def _log_way(parent: RunHandle, way: no_gpu.Approach) -> dict[str, float | None]:
    """Log a way's ratios over all repeats in each of its runs; the metrics of the way in the study's run."""
    ratio, low, high = figures_of(way.target_ratio)
    metrics: dict[str, float | None] = {
        Metric.TARGET_SPEEDUP: ratio,
        Metric.TARGET_SPEEDUP_LOW: low,
        Metric.TARGET_SPEEDUP_HIGH: high,
        Metric.END_TO_END_SPEEDUP: way.whole_ratio.value if way.whole_ratio else None,
    }
    for run_id in way.run_ids:
        tracking.log_facts(parent.model_copy(update={"run_id": run_id}), metrics, {Tag.PARITY: way.parity})
    name = way.name.replace(" ", "_").replace("-", "_")
    return {
        f"{name}/accuracy": way.score,
        f"{name}/target_seconds": way.target_seconds.value,
        f"{name}/end_to_end_seconds": way.whole_seconds.value,
        f"{name}/joules": way.joules.value,
        f"{name}/prediction_samples_per_second": way.executed.value,
        f"{name}/eager_prediction_samples_per_second": way.eager.value,
    }
