"""Metrics of one training of a study or a sweep, as a record and for MLflow."""

import itertools

from paceline.flows.run.record import compile_metrics, share_metrics
from paceline.tasks.names import Metric
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.speedup.limit_share import limit_share
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.speedup.study.records import ArmRun, StudyArm

OF_TRAINING = (
    *("world_size", "num_epochs", "startup_seconds", "time_budget", "data_wait_fraction", "communication_fraction"),
    *("idle_fraction", "peak_memory_bytes", "energy_joules", "predictions", "compile"),
)


def arm_run(arm: StudyArm, trained: TrainResult, evaluated: EvaluateResult) -> ArmRun:
    """Collect the metrics of a training that a study compares."""
    ends = trained.epoch_ends
    lengths = [later - sooner for sooner, later in itertools.pairwise(ends)]
    startup = trained.startup_seconds
    restarted = tuple(f"it was restarted: {restart.cause}" for restart in trained.restarts)
    return ArmRun(
        arm=arm.name,
        repeat=0,
        position=0,
        **{name: getattr(trained, name) for name in OF_TRAINING},
        samples_per_second=steady_rate(trained),
        **limit_share(trained).model_dump(include={"of_limit", "flops_per_second", "mfu"}),
        epoch_seconds=sorted(lengths)[len(lengths) // 2] if lengths else None,
        first_epoch_seconds=ends[0] - startup if ends and startup is not None else None,
        end_to_end_seconds=ends[-1] if ends else None,
        score_name=evaluated.score_name,
        score=evaluated.score,
        num_test=evaluated.num_samples,
        validation=tuple(zip(ends, trained.validation_scores[-len(ends) :], strict=False)),
        contaminated=bool(restarted) or (trained.validity.contaminated if trained.validity else None),
        contamination=restarted + (trained.validity.reasons if trained.validity else ()),
        prediction_samples_per_second=evaluated.samples_per_second,
    )


def training_metrics(run: ArmRun, trained: TrainResult, evaluated: EvaluateResult) -> dict[str, float | None]:
    """MLflow metrics of a training inside a study or a sweep."""
    metrics: dict[str, float | None] = {
        Metric.STEADY_THROUGHPUT: run.samples_per_second,
        Metric.THROUGHPUT: trained.samples_per_second,
        Metric.PREDICTION_THROUGHPUT: evaluated.samples_per_second,
        Metric.DATA_WAIT_FRACTION: run.data_wait_fraction,
        Metric.COMMUNICATION_FRACTION: run.communication_fraction,
        Metric.IDLE_FRACTION: run.idle_fraction,
        Metric.END_TO_END_SECONDS: run.end_to_end_seconds,
        Metric.EPOCH_SECONDS: run.epoch_seconds,
        Metric.WALL_SECONDS: trained.wall_seconds,
        Metric.PEAK_MEMORY: run.peak_memory_bytes,
        Metric.ENERGY: run.energy_joules,
        Metric.TEST_ACCURACY: evaluated.accuracy,
        Metric.test(evaluated.score_name): evaluated.score,
        Metric.TEST_SCORE: evaluated.score,
        Metric.TRAIN_FINAL_LOSS: trained.final_loss,
    }
    metrics |= share_metrics(limit_share(trained))
    metrics |= {Metric.seconds(item): seconds for item, seconds in trained.time_budget.items()}
    return metrics | compile_metrics(trained)
