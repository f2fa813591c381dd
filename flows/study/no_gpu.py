"""Arms of a study without a GPU: their checks, the fit of a classifier on features, and the rates of prediction."""

import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from prefect import get_run_logger
from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.pretrained import check_layer, check_weights
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.study.trainings import PlannedArm, StudyContext, StudyRequest, train_arm
from paceline.tasks.data.key import describe
from paceline.tasks.data.listing import Listing
from paceline.tasks.errors import InputError, PacelineError
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
from paceline.tasks.speedup.data_sheet import SHEETS
from paceline.tasks.speedup.study.no_gpu import FEATURES, SCRATCH, TRAINED, WAYS
from paceline.tasks.speedup.study.records import ArmRun, StudyArm
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle

OWN_SECTIONS = ("model.", "recipe.")  # in which arms may differ
PACE_SECONDS = 2.0


def check_arms(request: StudyRequest, environment: Environment) -> list[PlannedArm]:
    """Check everything before any work starts; raise InputError for the first fault."""
    if set(request.arms) != set(WAYS) or [name for name in WAYS if request.arms[name].linear_eval] != [FEATURES]:
        raise InputError(
            f"arms={', '.join(request.arms)}; a study with arms has {', '.join(WAYS)}, and linear_eval in {FEATURES} "
            "alone",
            hint="compare the plan with conf/plans/no-gpu.yaml",
            setting="--plan",
        )
    for name, plan_arm in request.arms.items():
        if wrong := [override for override in plan_arm.overrides if not override.startswith(OWN_SECTIONS)]:
            raise InputError(
                f"arm {name}: {wrong[0]} is not a setting of model or recipe; arms share all other settings",
                hint=f"give {wrong[0]} to the study, and not to one arm",
                setting=wrong[0].partition("=")[0],
            )
    _check_request(request)
    list_data = cache(describe)
    listing = list_data(request.config.stored_data)
    _check_data(request.config, listing)
    base = make_config(request.config, ["speedup.baseline=none", "speedup.diagnose=false"])
    planned = []
    for name in WAYS:  # a stored request may have another order
        overrides, layer = request.arms[name].overrides, request.arms[name].linear_eval
        arm = StudyArm(name=name, overrides=tuple(overrides), group="", is_baseline=name == SCRATCH)
        try:
            config = make_config(base, overrides)
            if layer is not None:
                check_weights(config, listing, environment)  # first: a network without a backbone has no such layer
                shape = (config.data.image_size, config.data.image_size, listing.channels)
                check_layer(layer, config.model, shape, (len(listing.class_names), 0))
            checked = preflight.check(config, environment, list_data=list_data)
        except (ConfigError, InputError) as error:
            raise InputError(f"{name}: {error}") from error
        train_fn = train_arm if layer is None else partial(fit_features, layer=layer)
        planned.append(PlannedArm(arm, config, checked, train_fn))
    return planned


def _check_request(request: StudyRequest) -> None:
    config = request.config
    if request.target is not None and not 0 < request.target <= 1:
        raise InputError(f"--target {request.target:g} is not an accuracy; give a share above 0, and at most 1")
    if request.gpu not in SHEETS:
        raise InputError(f"--gpu {request.gpu}: has no data sheet here; give one of {', '.join(SHEETS)}")
    if config.model.pretrained is None:
        raise InputError(
            "fine-tuning and features need weights to start from",
            hint="--pretrained RUN_ID, or model.pretrained=RUN_ID with paceline study",
            setting="model.pretrained",
        )
    if config.model.freeze != "none":
        raise InputError(f"model.freeze={config.model.freeze}: the arms differ in model.freeze; remove model.freeze")
    if config.execution.accelerator != "cpu":
        raise InputError(
            f"execution.accelerator={config.execution.accelerator} cannot be used with paceline no-gpu, which measures "
            f"on CPUs; remove execution.accelerator={config.execution.accelerator}"
        )
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes}: all ways run on one host, which computes the features; "
            "use 1"
        )


def _check_data(config: Config, listing: Listing) -> None:
    if config.model.task != "classify":
        fault = f"model.name={config.model.name} predicts pixels, which have no classifier on features"
        raise InputError(f"{fault}; choose a network that classifies images")
    if listing.target_names:
        raise InputError(
            f"data.source={config.data.source} has regression targets ({', '.join(listing.target_names)}), for which "
            "there is no classifier on features; choose a source that has only classes"
        )
    if not listing.num_validation:
        raise InputError(
            f"data.validation_fraction={config.data.validation_fraction} leaves no validation samples, on which the "
            "target is reached; raise it"
        )


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


def time_predictions(
    work: StudyContext, arms: list[PlannedArm], runs: Sequence[ArmRun]
) -> PredictionThroughputs | None:
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
