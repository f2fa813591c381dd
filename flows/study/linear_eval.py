"""The arm that fits a classifier on features of a frozen network, and the prediction rates of a study's networks."""

import os
from pathlib import Path

from prefect import get_run_logger
from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.study.trainings import PlannedArm, StudyContext
from paceline.tasks.errors import PacelineError
from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.files import load_result
from paceline.tasks.model_bundle import digest_of, write_model
from paceline.tasks.names import Metric, Tag
from paceline.tasks.predict.job import Settings, batch_size_for
from paceline.tasks.predict.linear_eval import LinearEvalJob, LinearEvalResult
from paceline.tasks.predict.prefect_tasks import classify_features, time_prediction
from paceline.tasks.predict.subprocess_job import RESULT
from paceline.tasks.predict.throughput import PredictionThroughputs, ThroughputJob
from paceline.tasks.records.training import TrainResult
from paceline.tasks.speedup.study.no_gpu import TRAINED
from paceline.tasks.speedup.study.records import ArmRun
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle

PACE_SECONDS = 2.0


def fit_features(work: StudyContext, arm: PlannedArm, config: Config, handle: RunHandle, *, layer: str) -> ArmRun:
    """Compute features of the frozen backbone and fit a classifier, on as many threads as a training has."""
    prepared, plan = work.prepared[config.data], arm.checked.plan
    assert arm.checked.pretrained is not None
    job = LinearEvalJob(
        config=config,
        prepared=prepared,
        pretrained=arm.checked.pretrained,
        layer=layer,
        precision=plan.precision,
        num_threads=plan.num_threads * plan.world_size,
        directory=str(work.environment.root / "runs" / handle.run_id),
        own_pids=(os.getpid(),),
    )
    result = classify_features(job, work.address, config.limits.train_seconds)
    truth = read_test_split(Path(prepared.path), prepared.class_names)
    evaluated = evaluate_predictions((result.predictions,), truth, result.prediction_samples_per_second)
    metrics: dict[str, float | None] = {
        Metric.PREDICTION_THROUGHPUT: result.prediction_samples_per_second,
        Metric.STARTUP_SECONDS: result.startup_seconds,
        Metric.EXTRACT_SECONDS: result.extract_seconds,
        Metric.FIT_SECONDS: result.fit_seconds,
        Metric.END_TO_END_SECONDS: result.ended_seconds,
        Metric.PEAK_MEMORY: result.peak_memory_bytes,
        Metric.ENERGY: result.joules,
        Metric.TEST_ACCURACY: evaluated.accuracy,
        Metric.TEST_SCORE: evaluated.score,
    }
    tracking.log_facts(handle, metrics, {Tag.LAYER: layer})
    return ArmRun(
        arm=arm.arm.name,
        repeat=0,
        position=0,
        num_epochs=1,
        startup_seconds=result.startup_seconds,
        end_to_end_seconds=result.ended_seconds,
        score=evaluated.accuracy,
        num_test=evaluated.num_samples,
        validation=((result.ended_seconds, result.validation_score),),
        peak_memory_bytes=result.peak_memory_bytes,
        energy_joules=result.joules,
        contaminated=result.validity.contaminated,
        contamination=result.validity.reasons,
        predictions=(result.predictions,),
        prediction_samples_per_second=result.prediction_samples_per_second,
    )


def time_predictions(work: StudyContext, arms: list[PlannedArm], runs: list[ArmRun]) -> PredictionThroughputs | None:
    """Time the predictions of the networks of the last repeat; None if that fails."""
    last = {run.arm: run.run_id for run in runs if run.status == "done" and run.run_id}
    settings = {arm.arm.name: _settings(work, arm, last[arm.arm.name]) for arm in arms if arm.arm.name in last}
    ways = {name: setting for name, setting in settings.items() if setting is not None}
    if not ways:
        return None
    plan, config = arms[0].checked.plan, work.request.config
    job = ThroughputJob(
        ways=ways,
        prepared=work.prepared[arms[0].config.data],
        directory=str(work.environment.root / "runs" / work.parent.run_id / "pace"),
        num_threads=plan.num_threads * plan.world_size,
        gpus=arms[0].checked.hardware.gpus,
        seconds=PACE_SECONDS,
        own_pids=(os.getpid(),),
    )
    try:
        return time_prediction(job, work.address, config.limits.predict_seconds)
    except PacelineError as error:
        if is_interruption(error):
            raise
        get_run_logger().warning("The predictions could not be timed: %s", error)
        return None


def _settings(work: StudyContext, arm: PlannedArm, run_id: str) -> Settings | None:
    """Prediction settings of the network of a run; None if its files are gone."""
    directory = work.environment.root / "runs" / run_id
    if arm.arm.name not in TRAINED:
        try:
            return LinearEvalResult.model_validate_json((directory / RESULT).read_bytes()).settings
        except (OSError, ValidationError):  # missing, or of another version
            return None
    trained = load_result(directory / "trained.json", TrainResult)
    if trained is None or trained.weights is None:
        return None
    prepared, plan = work.prepared[arm.config.data], arm.checked.plan
    facts = write_model(directory / "model", arm.config, prepared, Path(trained.weights).read_bytes())
    return Settings(
        model_directory=str(directory / "model"),
        model_digest=digest_of(facts),
        precision=plan.precision,
        gpu=False,
        num_threads=plan.num_threads * plan.world_size,
        batch_size=batch_size_for(facts.image_shape, facts.model.test_views),
        package=facts.package.identity if facts.package else None,
    )
