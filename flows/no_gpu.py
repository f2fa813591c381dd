"""The study "no GPU?": from scratch, fine-tuned, and features with a classifier, on CPUs, matched and repeated.

The flow, and what is wrong with its input. Its trainings are those of any study (`study_arms`), of which the third kind
is no training but a classifier on what a frozen backbone gives.
"""

from __future__ import annotations

import copy
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict, Field

from conf.credentials import Text
from conf.load import ConfigError, apply, validate
from conf.schema import Config
from conf.site import Site, quieten
from flows import preflight, views
from flows.interrupt import heard, is_interruption
from flows.no_gpu_record import Found, log_no_gpu
from flows.overlap import cancel_older
from flows.pipeline import publish
from flows.study_arms import ReadyArm, Work, begun_study, learn_by_training, run_all
from flows.study_record import with_parity
from flows.weights import check_layer, check_weights
from tasks.bundle import digest_of, write_model
from tasks.data.key import describe
from tasks.errors import InputError, PacelineError
from tasks.evaluate.metrics import evaluate_predictions, read_test_split
from tasks.kept import find_kept
from tasks.predict.alone import RESULT
from tasks.predict.frozen import Frozen, FrozenJob
from tasks.predict.job import Settings, batch_size_for
from tasks.predict.pace import PaceJob, Paces
from tasks.predict.steps import classify_features, time_prediction
from tasks.records import Listing, TrainResult
from tasks.redact import discreet
from tasks.speedup.datasheet import SHEETS
from tasks.speedup.no_gpu import FEATURES, SCRATCH, TRAINED, TUNED
from tasks.speedup.study import ArmRun, StudyArm
from tasks.speedup.trainings import Trainings
from tasks.track import run as tracking
from tasks.track.run import RunHandle

BACKBONE_RATE = 0.1
"""Of the fine-tuned network, unless another is asked for."""
LAYER = "pool"
GPU = "L4"
PACE_SECONDS = 2.0
TUNED_SECTION = "recipe."


class NoGpuRequest(BaseModel):
    """What is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """What all ways have in common."""
    pretrained: Text
    """Weights to begin with: a file, a run's id, `runs:/RUN_ID/model`, `models:/NAME@ALIAS` or a directory."""
    tuned: list[Text] = []
    """Settings of the recipe, as key=value, of the fine-tuned network alone."""
    layer: Text = LAYER
    """Whose output the classifier takes as features."""
    # The bounds are for the form, and refuse there; `clear_no_gpu` says what is wrong in a sentence.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Of each way."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Accuracy on the validation split to which the time is taken; None for what training from scratch ends with in
    the same repeat."""
    gpu: Text = GPU
    """GPU whose data sheet bounds what nobody measured."""


def clear_no_gpu(request: NoGpuRequest, site: Site) -> list[ReadyArm]:
    """Check everything before any work starts; the ways, ready to run.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    _check_asked(request)
    listing = describe(request.config.data)
    _check_data(request.config, listing)
    ready = []
    for name, config in _configs(request).items():
        learn = partial(_learn_frozen, layer=request.layer) if name == FEATURES else learn_by_training
        arm = StudyArm(name=name, overrides=(), group="", is_baseline=name == SCRATCH)
        try:
            if name == FEATURES:
                _check_features(request, config, listing, site)
            ready.append(ReadyArm(arm, config, preflight.check(config, site), learn))
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return ready


def _check_asked(request: NoGpuRequest) -> None:
    config = request.config
    if request.repeats < 1:
        raise InputError(f"--repeats {request.repeats}; each way is gone at least once: use 3 or more for intervals")
    if request.target is not None and not 0 < request.target <= 1:
        raise InputError(f"--target {request.target:g} is no accuracy; give a share above 0, and at most 1")
    if request.gpu not in SHEETS:
        raise InputError(f"--gpu {request.gpu}: no data sheet is known; give one of {', '.join(SHEETS)}")
    wrong = [one for one in request.tuned if not one.startswith(TUNED_SECTION)]
    if wrong:
        raise InputError(f"--fine-tune {wrong[0]} is no setting of the recipe, and all else is the same for all ways")
    if config.model.pretrained is not None or config.model.freeze != "none":
        raise InputError(
            "model.pretrained and model.freeze are what the ways differ in; name the weights after --pretrained"
        )
    if config.execution.accelerator == "gpu":
        raise InputError("execution.accelerator=gpu, and this is the study of what to do without one; drop it")
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes}: features are computed on one host, and all ways have "
            "the same; use 1"
        )


def _check_data(config: Config, listing: Listing) -> None:
    if config.model.task != "classify":
        raise InputError(
            f"model.name={config.model.name} tells something of each pixel, for which there is no classifier on "
            "features; choose a network that classifies images"
        )
    if listing.target_names:
        raise InputError(
            f"data.source={config.data.source} has regression targets ({', '.join(listing.target_names)}), for which "
            "there is no classifier on features; choose a source with classes alone"
        )
    if not listing.num_validation:
        raise InputError(
            f"data.validation_fraction={config.data.validation_fraction} leaves no validation samples, on which the "
            "target is reached; raise it"
        )


def _check_features(request: NoGpuRequest, config: Config, listing: Listing, site: Site) -> None:
    """Weights before layers: of a network without a backbone it is not the layer that is wrong."""
    check_weights(config, listing, site)
    shape = (config.data.image_size, config.data.image_size, listing.channels)
    check_layer(request.layer, config.model, shape, (len(listing.class_names), 0))


def _configs(request: NoGpuRequest) -> dict[str, Config]:
    """Of each way: the same but for how it begins and, fine-tuned, the recipe."""
    tree = request.config.model_dump(mode="json")
    tree["execution"]["accelerator"] = "cpu"
    tree["speedup"] |= {"baseline": "none", "diagnose": False}
    weights = {"pretrained": request.pretrained}
    rate = tree["recipe"]["backbone_rate"]
    plain = tree["recipe"] | {"backbone_rate": 1.0}
    tuned = tree | {
        "model": tree["model"] | weights,
        "recipe": copy.deepcopy(plain) | {"backbone_rate": BACKBONE_RATE if rate == 1 else rate},
    }
    trees = {
        SCRATCH: tree | {"recipe": plain},
        TUNED: tuned,
        FEATURES: tree | {"recipe": plain, "model": tree["model"] | weights | {"freeze": "backbone"}},
    }
    for override in request.tuned:
        apply(trees[TUNED], override)
    found = {}
    for name, one in trees.items():
        try:
            found[name] = validate(one)
        except ConfigError as error:
            raise InputError(f"{name}: {error}") from error
    return found


@flow(name="paceline-no-gpu", flow_run_name="no GPU: {request.config.name}", persist_result=False)
@heard
@discreet
def run_no_gpu(request: NoGpuRequest, resume: str | None = None) -> dict[str, Any]:
    """Learn in three ways on CPUs, and say which to take without a GPU.

    Args:
        request: Weights, repeats, and what the ways have in common.
        resume: Id of an unfinished study to go on with.
    """
    quieten()
    started = time.monotonic()
    site = Site()
    arms = clear_no_gpu(request, site)
    cancel_older()
    with begun_study("no-gpu", request, arms, site, resume) as (work, arms):
        run_all(work, arms)
        prepared = work.prepared[arms[0].config.data]
        runs = with_parity(work.ledger.runs(), [arm.arm for arm in arms], {prepared.fingerprint: prepared})
        found = Found(
            request=request,
            arms=arms,
            trainings=Trainings([arm.arm for arm in arms], runs),
            prepared=prepared,
            paces=_paces(work, arms, runs),
            seconds=time.monotonic() - started,
        )
        result, summary = log_no_gpu(found, site, work.parent)
    publish([("", result.verdict), *(("", note) for note in result.notes)], "no-gpu", "What to do without a GPU")
    views.link(summary["view"], "The trainings of this study")
    return summary | {"result": result.model_dump(mode="json")}


def _learn_frozen(work: Work, arm: ReadyArm, config: Config, handle: RunHandle, *, layer: str) -> ArmRun:
    """Features of the frozen backbone, and a classifier on them; all of it on as many threads as a training has."""
    prepared, plan = work.prepared[config.data], arm.cleared.plan
    assert arm.cleared.pretrained is not None
    job = FrozenJob(
        config=config,
        prepared=prepared,
        pretrained=arm.cleared.pretrained,
        layer=layer,
        precision=plan.precision,
        num_threads=plan.num_threads * plan.world_size,
        directory=str(work.site.root / "runs" / handle.run_id),
        own_pids=(os.getpid(),),
    )
    found = classify_features(job, work.address, config.limits.train_seconds)
    truth = read_test_split(Path(prepared.path), prepared.class_names)
    evaluated = evaluate_predictions((found.predictions,), truth, found.prediction_samples_per_second)
    metrics: dict[str, float | None] = {
        "throughput/prediction_samples_per_second": found.prediction_samples_per_second,
        "time/startup_seconds": found.startup_seconds,
        "time/extract_seconds": found.extract_seconds,
        "time/fit_seconds": found.fit_seconds,
        "time/end_to_end_seconds": found.ended_seconds,
        "memory/peak_bytes": found.peak_memory_bytes,
        "energy/joules": found.joules,
        "test/accuracy": evaluated.accuracy,
        "test/score": evaluated.score,
    }
    tracking.log_facts(handle, metrics, {"paceline.layer": layer})
    return ArmRun(
        arm=arm.arm.name,
        repeat=0,
        position=0,
        num_epochs=1,
        startup_seconds=found.startup_seconds,
        end_to_end_seconds=found.ended_seconds,
        accuracy=evaluated.accuracy,
        num_test=evaluated.num_samples,
        validation=((found.ended_seconds, found.validation_score),),
        peak_memory_bytes=found.peak_memory_bytes,
        energy_joules=found.joules,
        contaminated=found.validity.contaminated,
        contamination=found.validity.reasons,
        predictions=(found.predictions,),
        prediction_samples_per_second=found.prediction_samples_per_second,
    )


def _paces(work: Work, arms: list[ReadyArm], runs: list[ArmRun]) -> Paces | None:
    """How fast the networks predict that the last repeat has left; None where that cannot be timed."""
    last = {run.arm: run.run_id for run in runs if run.status == "done" and run.run_id}
    found = {arm.arm.name: _settings(work, arm, last[arm.arm.name]) for arm in arms if arm.arm.name in last}
    ways = {name: settings for name, settings in found.items() if settings is not None}
    if not ways:
        return None
    plan, config = arms[0].cleared.plan, work.request.config
    job = PaceJob(
        ways=ways,
        prepared=work.prepared[arms[0].config.data],
        directory=str(work.site.root / "runs" / work.parent.run_id / "pace"),
        num_threads=plan.num_threads * plan.world_size,
        gpus=arms[0].cleared.hardware.gpus,
        seconds=PACE_SECONDS,
        own_pids=(os.getpid(),),
    )
    try:
        return time_prediction(job, work.address, config.limits.predict_seconds)
    except PacelineError as error:
        if is_interruption(error):
            raise
        get_run_logger().warning("How fast the networks predict is not known: %s", error)
        return None


def _settings(work: Work, arm: ReadyArm, run_id: str) -> Settings | None:
    """How the network that a run has left is executed in prediction; None if it is not there any more."""
    directory = work.site.root / "runs" / run_id
    if arm.arm.name not in TRAINED:
        kept = directory / RESULT
        return Frozen.model_validate_json(kept.read_bytes()).settings if kept.exists() else None
    trained = find_kept(directory / "trained.json", TrainResult)
    if trained is None or trained.weights is None:
        return None
    prepared, plan = work.prepared[arm.config.data], arm.cleared.plan
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
