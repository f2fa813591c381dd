"""Records a study: the report in its parent run, and the ratios in the runs of the arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.flows.lifecycle.mlflow_views import describe_devices, log_environment, log_report, share_study
from paceline.flows.study.request import StudyRequest
from paceline.tasks.evaluate.metrics import discordant, score_difference
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.report.study_charts import draw_study
from paceline.tasks.report.study_report import render_study
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.study.analysis import budget_differences, ladder, scalings, summarise_arms, target_accuracy
from paceline.tasks.speedup.study.pairs import StudyRuns
from paceline.tasks.speedup.study.records import ArmRun, ArmSummary, Scaling, StudyArm, StudyResult
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import package_versions
from paceline.tasks.track.run import RunHandle

SUMMARY = ("run_id", "experiment", "kind", "num_repeats", "contaminated", "seconds")
ARM_SUMMARY = (
    *("execution", "samples_per_second", "significant", "hit_rate", "score_name", "score", "parity"),
    *("parity_margin", "p_value", "confirmed", "break_even_epochs", "break_even_low", "break_even_high"),
    *("num_failed", "error", "flops_per_second", "of_limit", "mfu"),
)


@dataclass(frozen=True)
class StudyOutcome:
    """Results of a study's trainings."""

    request: StudyRequest
    arms: list[StudyArm]
    runs: tuple[ArmRun, ...]
    prepared: dict[str, PreparedSet]  # by fingerprint
    hardware: Hardware
    seconds: float

    def result(self, parent: RunHandle) -> StudyResult:
        """Analyse the trainings."""
        request, speedup = self.request, self.request.config.speedup
        trainings = StudyRuns(self.arms, with_parity(self.runs, self.arms, self.prepared))
        rungs, interaction = ladder(trainings)
        groups = {arm.group for arm in self.arms}
        target = request.target if request.target is not None or len(groups) > 1 else target_accuracy(trainings, "")
        return StudyResult(
            run_id=parent.run_id,
            experiment=parent.experiment,
            preset=request.preset,
            kind="ladder" if request.ladder else "grid",
            num_repeats=request.repeats,
            arms=summarise_arms(trainings, request.target, speedup.price_per_device_hour),
            rungs=rungs,
            interaction=interaction,
            differences=budget_differences(trainings),
            scalings=scalings(trainings),
            target_accuracy=target,
            price_per_device_hour=speedup.price_per_device_hour,
            contaminated=sum(bool(run.contaminated) for run in self.runs),
            seconds=self.seconds,
            hardware=f"{self.hardware.host}: {describe_devices(self.hardware)}",
            versions={name: version for name, version in package_versions().items() if version},
        )


def with_parity(runs: Sequence[ArmRun], arms: Sequence[StudyArm], prepared: Mapping[str, PreparedSet]) -> list[ArmRun]:
    """Compare the predictions of each training with the baseline of its group and repeat; `prepared` by fingerprint."""
    groups = {arm.name: arm.group for arm in arms}
    baselines = {
        (groups[run.arm], run.repeat): run
        for run in runs
        if run.status == "done" and any(arm.is_baseline and arm.name == run.arm for arm in arms)
    }
    return [_compare_with_baseline(run, baselines.get((groups[run.arm], run.repeat)), prepared) for run in runs]


def _compare_with_baseline(run: ArmRun, base: ArmRun | None, known: Mapping[str, PreparedSet]) -> ArmRun:
    prepared = known.get(run.facts.get("data", ""))
    if base is None or run.status != "done" or prepared is None or base.facts.get("data") != run.facts["data"]:
        return run
    if run.score_name != base.score_name:
        return run
    if run.score_name != "accuracy":  # no sample is simply right or wrong
        value, error = score_difference(base.predictions, run.predictions, prepared, run.score_name)
        return run.model_copy(update={"score_difference": value, "score_error": error})
    gained, lost = discordant(base.predictions, run.predictions, prepared)
    return run.model_copy(update={"num_gained": gained, "num_lost": lost})


def log_arm(handle: RunHandle, arm: StudyArm, run: ArmRun) -> None:
    """Log the tags and facts of an arm's run that do not depend on other arms."""
    tags = {
        Tag.ARM: arm.name,
        Tag.GROUP: arm.group,
        Tag.IS_BASELINE: str(arm.is_baseline),
        Tag.REPEAT: str(run.repeat),
        Tag.CONTAMINATED: str(run.contaminated),
        Tag.CONTAMINATION: "; ".join(run.contamination),
        Tag.DATASET: run.facts["data"],
    }
    tracking.set_tags(handle, tags)
    tracking.log_document(handle, Artifact.FACTS, run.facts)


def log_diagnosis(handle: RunHandle, speedup: SpeedupResult) -> None:
    """Log the bottleneck of an arm's step; the study computes its ratio."""
    shares: dict[str, float | None] = {f"speedup/share_{name}": share for name, (share, *_) in speedup.shares.items()}
    tracking.log_facts(handle, shares, {Tag.CAUSE: speedup.cause or "", Tag.VERDICT: speedup.verdict})


def log_study(outcome: StudyOutcome, parent: RunHandle) -> tuple[StudyResult, dict[str, Any]]:
    """Record the study in its parent run, and each arm's ratio in the arm's runs; the JSON of `paceline study`."""
    result = outcome.result(parent)
    environment = log_environment(parent, outcome.hardware)
    log_report(parent, render_study(result, environment), draw_study(result))
    tracking.log_document(parent, Artifact.STUDY, result.model_dump(mode="json"))
    for arm in result.arms:
        _log_ratio(parent, result, arm)
    summary = summarise_study(result, parent) | {"view": share_study(parent, [arm.score_name for arm in result.arms])}
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    metrics: dict[str, float | None] = {
        Metric.STUDY_NUM_ARMS: len(result.arms),
        Metric.STUDY_NUM_FAILED: sum(arm.num_failed for arm in result.arms),
        Metric.STUDY_NUM_CONTAMINATED: result.contaminated,
        Metric.STUDY_SECONDS: result.seconds,
    }
    tracking.log_facts(parent, metrics, {Tag.STUDY_KIND: result.kind})
    return result, summary


def _log_ratio(parent: RunHandle, result: StudyResult, arm: ArmSummary) -> None:
    """An arm's ratio over all repeats, in each of its runs, so that the columns of the UI can compare them."""
    ratio, efficiency = arm.ratio, arm.efficiency
    metrics: dict[str, float | None] = {
        Metric.SPEEDUP: ratio.value if ratio else None,
        Metric.SPEEDUP_LOW: ratio.low if ratio else None,
        Metric.SPEEDUP_HIGH: ratio.high if ratio else None,
        Metric.EFFICIENCY: efficiency.value if efficiency else None,
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


def summarise_study(result: StudyResult, parent: RunHandle) -> dict[str, Any]:
    """The JSON of `paceline study`; names and shape are the public contract."""
    arms = [
        {
            "name": arm.arm.name,
            "group": arm.arm.group,
            "run_id": arm.run_ids[0] if arm.run_ids else None,
            "run_ids": list(arm.run_ids),
            **{name: getattr(arm, name) for name in ARM_SUMMARY},
            "ratio": arm.ratio.value if arm.ratio else None,
            "low": arm.ratio.low if arm.ratio else None,
            "high": arm.ratio.high if arm.ratio else None,
            "confirmation": arm.confirmation and arm.confirmation.model_dump(mode="json"),
            "efficiency": arm.efficiency.value if arm.efficiency else None,
            "prediction_ratio": arm.prediction_ratio.value if arm.prediction_ratio else None,
            "accuracy": arm.score if arm.score_name == "accuracy" else None,
            "matches": None if arm.match is None else arm.match.matches,
        }
        for arm in result.arms
    ]
    return {
        **{name: getattr(result, name) for name in SUMMARY},
        "tracking_uri": parent.public_uri,
        "arms": arms,
        "karp_flatt": _serial_fractions(result.scalings),
        "report": Artifact.REPORT,
    }


def _serial_fractions(scalings: Sequence[Scaling]) -> dict[str, Any] | None:
    """By number of devices; where there is more than one scaling, by its group first."""
    by_group = {
        scaling.group: {str(point.num_devices): point.karp_flatt.value for point in scaling.points if point.karp_flatt}
        for scaling in scalings
    }
    non_empty = {group: fractions for group, fractions in by_group.items() if fractions}
    return next(iter(non_empty.values()), None) if len(non_empty) <= 1 else non_empty
