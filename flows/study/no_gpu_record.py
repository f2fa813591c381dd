"""Records a study with arms: the report in its run, and the ratios in the runs of each arm."""

from dataclasses import dataclass
from typing import Any

from paceline.conf.environment import Environment
from paceline.flows.compare import trained_runs
from paceline.flows.lifecycle.mlflow_views import describe_devices, log_environment, log_report, share_study
from paceline.flows.study.request import StudyRequest
from paceline.flows.study.trainings import PlannedArm
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.predict.throughput import PredictionThroughputs
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.report.no_gpu_report import draw_no_gpu, render_no_gpu
from paceline.tasks.speedup.data_sheet import SHEETS
from paceline.tasks.speedup.hardware_table import HardwareRow, same_work, tabulate
from paceline.tasks.speedup.study import no_gpu
from paceline.tasks.speedup.study.no_gpu import Approach, NoGpuResult
from paceline.tasks.speedup.study.no_gpu_verdict import judge, notes_of
from paceline.tasks.speedup.study.pairs import StudyRuns
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle

ACCELERATOR = "execution.accelerator"
SUMMARY = (
    *("run_id", "experiment", "choice", "verdict", "num_repeats", "target", "targets", "ways", "prediction_ratio"),
    "seconds",
)


@dataclass(frozen=True)
class NoGpuOutcome:
    """Results of the study's trainings."""

    request: StudyRequest
    arms: list[PlannedArm]
    trainings: StudyRuns
    prepared: PreparedSet
    paces: PredictionThroughputs | None
    seconds: float

    def result(self, environment: Environment, parent: RunHandle) -> NoGpuResult:
        """Analyse the trainings, and the runs on GPUs in the store."""
        request, checked = self.request, self.arms[-1].checked
        assert checked.pretrained is not None
        rates = self.paces.paces if self.paces else {}
        gpu = no_gpu.Gpu(
            sheet=SHEETS[request.gpu],
            rows=self._rows(environment, parent.experiment),
            rates=rates,
            name=self.paces.gpu_name if self.paces else None,
            cost=self.paces.cost if self.paces else None,
            num_train=self.prepared.num_train,
            batch_size=request.config.global_batch_size,
        )
        scratch = rates.get(no_gpu.SCRATCH)
        validity = self.paces.validity if self.paces else None
        disturbance = validity.reasons if validity and validity.contaminated else ()
        ways = no_gpu.ways_of(self.trainings, request.target, rates)
        result = NoGpuResult(
            run_id=parent.run_id,
            experiment=parent.experiment,
            preset=request.preset,
            pretrained=checked.pretrained.summary,
            layer=request.arms[no_gpu.FEATURES].linear_eval or "",
            num_repeats=request.repeats,
            target=request.target,
            targets=no_gpu.TargetScore(self.trainings, request.target).all(),
            ways=ways + no_gpu.on_gpu(self.trainings, request.target, gpu),
            prediction_ratio=scratch.ratio if scratch else None,
            prediction_disturbed=disturbance,
            cost=gpu.cost,
            sheet=gpu.sheet,
            hardware=f"{checked.hardware.host}: {describe_devices(checked.hardware)}",
            seconds=self.seconds,
        )
        choice, verdict = judge(result)
        return result.model_copy(update={"choice": choice, "verdict": verdict, "notes": tuple(notes_of(result))})

    def _rows(self, environment: Environment, experiment: str) -> dict[str, tuple[HardwareRow, ...]]:
        """Runs of the experiment that did the same work on GPUs, by way."""
        runs, _ = trained_runs(environment, experiment)
        on_gpus = [run for run in runs if run.facts.get(ACCELERATOR) == "gpu"]
        rows = {}
        for arm in self.trainings.arms:
            done = self.trainings.of(arm)
            same = same_work(on_gpus, done[0].facts) if done and arm.name in no_gpu.TRAINED else []
            rows[arm.name] = tuple(row for table in tabulate(same, {}, {}).tables for row in table.rows)
        return rows


def log_no_gpu(
    outcome: NoGpuOutcome, environment: Environment, parent: RunHandle
) -> tuple[NoGpuResult, dict[str, Any]]:
    """Record the study and its ways; return the result and the JSON of `paceline no-gpu`."""
    result = outcome.result(environment, parent)
    machine = log_environment(parent, outcome.arms[0].checked.hardware)
    log_report(parent, render_no_gpu(result, machine), draw_no_gpu(result))
    tracking.log_document(parent, Artifact.NO_GPU, result.model_dump(mode="json"))
    for way in result.ways:
        _log_way(parent, way)
    summary = summarise_no_gpu(result, parent) | {"view": share_study(parent, ["accuracy"])}
    tracking.log_document(parent, Artifact.SUMMARY, summary)
    tracking.log_facts(parent, _metrics(result), {Tag.VERDICT: result.verdict, Tag.CHOICE: result.choice})
    return result, summary


def _metrics(result: NoGpuResult) -> dict[str, float | None]:
    measured = [way for way in result.ways if way.is_measured]
    metrics: dict[str, float | None] = {
        Metric.STUDY_NUM_ARMS: len(measured),
        Metric.STUDY_NUM_FAILED: sum(way.num_failed for way in measured),
        Metric.STUDY_NUM_CONTAMINATED: sum(way.contaminated for way in measured),
        Metric.STUDY_SECONDS: result.seconds,
    }
    for way in measured:
        name = way.name.replace(" ", "_").replace("-", "_")
        metrics |= {
            f"{name}/accuracy": way.score,
            f"{name}/target_seconds": way.target_seconds.value,
            f"{name}/end_to_end_seconds": way.whole_seconds.value,
            f"{name}/joules": way.joules.value,
            f"{name}/prediction_samples_per_second": way.executed.value,
            f"{name}/eager_prediction_samples_per_second": way.eager.value,
        }
    return metrics


def _log_way(parent: RunHandle, way: Approach) -> None:
    """Log a way's ratios over all repeats in each of its runs; an estimated way has no runs."""
    if not way.is_measured:
        return
    ratio, end_to_end = way.target_ratio, way.whole_ratio
    metrics: dict[str, float | None] = {
        Metric.TARGET_SPEEDUP: ratio.value if ratio else None,
        Metric.TARGET_SPEEDUP_LOW: ratio.low if ratio else None,
        Metric.TARGET_SPEEDUP_HIGH: ratio.high if ratio else None,
        Metric.END_TO_END_SPEEDUP: end_to_end.value if end_to_end else None,
    }
    for run_id in way.run_ids:
        tracking.log_facts(parent.model_copy(update={"run_id": run_id}), metrics, {Tag.PARITY: way.parity})


def summarise_no_gpu(result: NoGpuResult, parent: RunHandle) -> dict[str, Any]:
    """The JSON of `paceline no-gpu`; names and shape are the public contract."""
    summary = result.model_dump(mode="json", include={*SUMMARY})
    return summary | {"tracking_uri": parent.public_uri, "report": Artifact.REPORT}
