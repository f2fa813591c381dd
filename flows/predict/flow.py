"""Predicts a folder of images or a preset's test split with a trained model, into Parquet, in one MLflow run."""

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from prefect import flow, get_run_logger
from prefect.utilities.annotations import quote

from paceline.conf.config import Config
from paceline.conf.data import CLIP_SOURCES, SIGNAL_SOURCES, Data
from paceline.conf.environment import Environment
from paceline.conf.load import load, preset_names, validate_as
from paceline.flows.checks import preflight
from paceline.flows.checks.pretrained import check_layer, check_own_size
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.outage import guard_flow, with_retries
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.predict import module
from paceline.flows.predict.request import UNRECORDED, PredictRequest, check_out, require_room, write_facts
from paceline.tasks.cluster.client import demand_of
from paceline.tasks.cluster.kinds import kind_of, open_cluster
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.prepare.chunks import chunks_of
from paceline.tasks.errors import InputError
from paceline.tasks.files import compiled_directory
from paceline.tasks.model_bundle import check_package, digest_of
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.predict.job import Images, Settings, batch_size_for, cut, in_folder, key_of, of_test_split
from paceline.tasks.predict.prefect_tasks import Predicted, predict
from paceline.tasks.records.data import ModelFacts
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.scores import mean_iou
from paceline.tasks.track import run as tracking
from paceline.tasks.track.models import fetch_model, has_recorded_digest
from paceline.tasks.train.plan import resolve

PNG_CHANNELS = (1, 3)
FLOAT_BYTES = 4
COUNTS = {"num_samples", "num_rejected", "num_unread", "num_known", "num_correct"}
EXECUTION = {"accelerator", "device_name", "world_size", "num_threads", "precision", "compile"}
LARGE_BYTES = 2**20  # assumed size of a decoded image at its own size, so that a part has few of them


@dataclass(frozen=True)
class PredictionPlan:
    """A checked prediction."""

    config: Config
    facts: ModelFacts
    images: Images
    plan: Plan
    settings: Settings
    experiment_id: str
    out: Path
    key: str
    other_package: str | None  # a warning if the user's package of the model has changed
    num_values: int  # values of the layer per image; 0 without a layer


@preflight.reusable
def check_predict(request: PredictRequest, environment: Environment) -> PredictionPlan | module.ModulePlan:
    """Check model, images, devices, stores and the place for the result; fetch the model."""
    own = module.trained_in(request, environment)
    if own is not None:
        return module.check(own, request, environment)
    directory, facts = fetch_model(environment.tracking_uri, request.model, environment.root)
    if not isinstance(facts, ModelFacts):
        return module.check(module.of_model(directory, facts), request, environment)
    if request.source is None:
        fault = f"{request.model} is a model of a preset, which needs SOURCE"
        raise InputError(fault, hint="name a folder of images behind MODEL", setting="SOURCE")
    other_package = check_package(facts.model, facts.package)
    num_values, heads = 0, (len(facts.class_names), len(facts.target_names))
    if request.layer is not None:
        num_values = check_layer(request.layer, facts.model, facts.image_shape, heads)
    if request.own_size:
        if request.layer is not None:
            raise InputError(
                "--own-size cannot be used with --layer",
                hint="--own-size applies to the output of segmentation and denoising models only",
            )
        check_own_size(facts.model, facts.image_shape, heads)
    config, images = _source(request, facts)
    config, hardware = _workers(config, request, environment)
    plan = resolve(config, hardware, 0)
    settings = Settings(
        model_directory=str(directory),
        model_digest=digest_of(facts),
        precision=plan.precision,
        gpu=plan.accelerator == "gpu",
        num_threads=plan.num_threads,
        batch_size=batch_size_for(facts.image_shape, facts.model.test_views),
        package=facts.model.plugin.identity if facts.model.plugin else None,
        layer=request.layer,
        own_size=request.own_size,
    )
    if plan.compile == "step":
        if request.own_size:
            raise InputError("execution.compile=step compiles for one size, and --own-size has many; use compile=off")
        if request.layer is not None:
            raise InputError("execution.compile=step compiles the predictions, not a layer; use compile=off")
        # One directory of compiled models for each of these settings.
        identity = settings.model_dump(mode="json", exclude={"model_directory", "own_size"})
        compiled = compiled_directory(environment.root) / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        settings = settings.model_copy(update={"compiled": str(compiled)})
    key = key_of(settings, images)
    out = Path(request.out).expanduser().absolute() if request.out else environment.root / "predictions" / key[:16]
    check_out(request, out, key)
    require_room(config, out, environment)
    experiment_id = preflight.check_servers(config, environment)
    return PredictionPlan(config, facts, images, plan, settings, experiment_id, out, key, other_package, num_values)


def _source(request: PredictRequest, facts: ModelFacts) -> tuple[Config, Images]:
    assert request.source is not None
    is_preset = request.source in preset_names() or request.source.endswith((".yaml", ".yml"))
    folders = "clips" if facts.num_frames else "folder" if facts.signal is None else "signals"
    config = load(request.source if is_preset else folders, list(request.overrides))
    if not is_preset and config.data.root is not None:
        raise InputError(f"data.root={config.data.root} and the source {request.source}; name only one")
    changes: dict[str, Any] = {"image_size": facts.image_shape[0], "fit": _fit(request, facts, config)}
    changes |= {} if is_preset else {"root": request.source}
    if config.data.source in SIGNAL_SOURCES:
        if facts.signal is None:
            fault = f"{request.source}: signals, and {request.model} was trained on images"
            raise InputError(f"{fault}; give a folder of images", setting="SOURCE")
        if given := _given(request, "data.signal."):
            raise InputError(f"{given[0]}: {request.model} fixes the spectrogram settings; remove it")
        changes["signal"] = facts.signal.model_dump(mode="json")
    if facts.num_frames and config.data.source in CLIP_SOURCES:
        if _given(request, "data.num_frames=") and config.data.num_frames != facts.num_frames:
            raise InputError(
                f"data.num_frames={config.data.num_frames}: {request.model} takes clips of {facts.num_frames} frames; "
                "remove it"
            )
        changes["num_frames"] = facts.num_frames
    data = validate_as(Data, config.data.model_dump(mode="json") | changes)
    if is_preset:
        images = of_test_split(data)
    else:
        task = facts.model.task
        class_names = facts.class_names if task == "classify" else ()
        valid_names = class_names if request.layer is None else None  # a layer's output is valid for any classes
        form: dict[str, Any] = {"num_frames": facts.num_frames, "fit": facts.fit or "scale"}
        images = in_folder(request.source, valid_names, facts.signal, leave_masks=task == "segment", **form)
    _check_fits(request, facts, images)
    # Not validated together: a network trains only on data of its task, but predicts any images.
    return config.model_copy(update={"data": data, "model": facts.model}), images


def _given(request: PredictRequest, start: str) -> list[str]:
    return [override for override in request.overrides if override.startswith(start)]


def _fit(request: PredictRequest, facts: ModelFacts, config: Config) -> Literal["scale", "crop"]:
    if given := _given(request, "data.fit="):
        raise InputError(f"{given[0]}: {request.model} fixes how images are resized; remove it")
    if request.own_size and not config.data.has_sizes:
        raise InputError(
            f"--own-size: the samples of data.source={config.data.source} do not have their own sizes; remove it"
        )
    return facts.fit if facts.fit is not None and config.data.has_sizes else "scale"


def _check_fits(request: PredictRequest, facts: ModelFacts, images: Images) -> None:
    channels, task, of_layer = images.channels, facts.model.task, request.layer is not None
    theirs, ours = ("clips" if number else "images" for number in (images.origin.num_frames, facts.num_frames))
    fault = ""
    if facts.signal is not None and images.origin.signal is None:
        fault = (
            f"images, and {request.model} was trained on signals; give a folder of signals, or the preset that it was "
            "trained with"
        )
    elif facts.num_frames != images.origin.num_frames:
        fault = f"{theirs}, and {request.model} was trained on {ours}; predict what it was trained for"
    elif channels != facts.image_shape[2]:
        fault = (
            f"images of {channels} channels, and the model {request.model} takes {facts.image_shape[2]}; predict what "
            "it was trained for"
        )
    elif images.num_planes and task == "classify" and not of_layer:
        fault = f"has classes of pixels, and the model {request.model} classifies images; predict a folder of images"
    elif images.num_planes and task == "segment" and images.class_names != facts.class_names and not of_layer:
        fault = (
            f"its masks have the classes {', '.join(images.class_names)}, and the model {request.model} those of "
            f"{', '.join(facts.class_names)}; give the folder of the images, without masks"
        )
    if fault:
        raise InputError(f"{request.source}: {fault}", setting="SOURCE")
    if task == "denoise" and channels not in PNG_CHANNELS and not of_layer:
        raise InputError(
            f"{request.model}: takes images of {channels} channels, and its output is written as PNG, which "
            "has 1 or 3; train on grey or colour images",
            setting="MODEL",
        )


def _workers(config: Config, request: PredictRequest, environment: Environment) -> tuple[Config, Hardware]:
    """Choose one worker for each device of a host, or the requested number; plain workers share one GPU."""
    hardware = preflight.training_host(config, environment)
    uses_gpus = bool(hardware.gpus) and config.execution.accelerator != "cpu"
    is_plain = kind_of(config.cluster).shares_gpu
    devices = config.execution.num_devices
    if not _given(request, "execution.num_devices="):
        devices = hardware.num_cores if not uses_gpus else 1 if is_plain else len(hardware.gpus)
        if is_plain and not uses_gpus and config.cluster.num_workers != "auto":
            devices = min(devices, config.cluster.num_workers)
    if is_plain and uses_gpus and devices > 1:
        fault = f"execution.num_devices={devices} on GPUs and cluster.kind=local, whose workers all use the first GPU"
        raise InputError(f"{fault}; use cluster.kind=local_cuda, which gives each its own")
    changes: dict[str, Any] = {"execution": config.execution.model_copy(update={"num_devices": devices})}
    if is_plain:
        changes["cluster"] = config.cluster.model_copy(update={"num_workers": devices})
    return config.model_copy(update=changes), hardware


@flow(name="paceline-predict", flow_run_name="predict {request.subject}", persist_result=False)
@guard_flow
def run_predict(request: PredictRequest) -> dict[str, Any]:
    """Predict every image of a source with a trained model, or every batch of own Lightning code.

    Args:
        request: Model, source and settings.
    """
    started = time.monotonic()
    environment = Environment()
    checked = preflight.result_of(check_predict, request, environment)
    cancel_older()
    if isinstance(checked, module.ModulePlan):
        return module.predict_with(checked, request, environment, started)
    images, config, size = checked.images, checked.config, checked.facts.image_shape[0]
    num_bytes = size * size * (images.channels + images.num_planes) + FLOAT_BYTES * checked.num_values
    if checked.settings.own_size:
        num_bytes = max(num_bytes, LARGE_BYTES)
    parts = list(cut(images, checked.out, checked.key, chunks_of(images.samples, images.origin, num_bytes)))
    demand = demand_of([config.execution], checked.plan.accelerator)
    compiles = checked.plan.compile == "step"  # a CUDA graph is of training steps alone
    executed = checked.plan if compiles else checked.plan.model_copy(update={"compile": "off"})
    with open_cluster(config.cluster, demand, environment) as address:
        require_packages(address, config.packages)
        with new_run(config, environment, checked.experiment_id, "predict") as handle:
            digest = checked.settings.model_digest
            tags = {Tag.MODEL: request.model, Tag.MODEL_DIGEST: digest, Tag.PREDICTIONS: str(checked.out)}
            tracking.set_tags(handle, tags)
            log = get_run_logger()
            if checked.other_package is not None:
                log.warning("%s: its predictions may have changed", checked.other_package)
            checked.out.mkdir(parents=True, exist_ok=True)
            facts: dict[str, Any] = {
                **{name: getattr(request, name) for name in ("model", "source", "layer", "own_size")},
                "key": checked.key,
                "model_digest": digest,
                "model_recorded": has_recorded_digest(request.model),
                "task": checked.facts.model.task,
                "class_names": list(checked.facts.class_names),
                "num_values": checked.num_values,
            }
            write_facts(checked.out, facts, is_complete=False)
            if not facts["model_recorded"]:
                log.warning(UNRECORDED, request.model, digest)
            # Quoted, or Prefect would inspect every name.
            stage = with_retries(predict, config.limits)
            limit = config.limits.predict_seconds
            predicted = stage(quote(parts), checked.settings, address, limit)  # type: ignore[call-overload]
            summary = {
                "run_id": handle.run_id,
                "experiment": handle.experiment,
                "tracking_uri": handle.public_uri,
                **facts,
                "out": str(checked.out),
                **_numbers(predicted),
                "execution": executed.model_dump(mode="json", include=EXECUTION),
                "seconds": time.monotonic() - started,
            }
            write_facts(checked.out, summary, is_complete=True)
            tracking.log_document(handle, Artifact.SUMMARY, summary)
            tracking.log_facts(handle, _metrics(summary, predicted), {})
    return summary


def _numbers(predicted: Predicted) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for record in predicted.records:
        counts.update(record.model_dump(include=COUNTS))
    pixels = np.sum([record.class_pixels for record in predicted.records if record.class_pixels], axis=0)
    predicted_now = counts["num_samples"] + counts["num_rejected"] - predicted.num_reused
    return {
        **{name: counts[name] for name in ("num_samples", "num_rejected", "num_unread")},
        "num_reused": predicted.num_reused,
        "accuracy": counts["num_correct"] / counts["num_known"] if counts["num_known"] else None,
        "mean_iou": mean_iou(pixels.tolist()) if pixels.any() else None,
        "samples_per_second": predicted_now / predicted.seconds if predicted_now else None,
        "reads": predicted.reads.model_dump(mode="json"),
        "parity": predicted.parity.model_dump(mode="json") if predicted.parity else None,
    }


def _metrics(summary: dict[str, Any], predicted: Predicted) -> dict[str, float | None]:
    names = ("num_samples", "num_rejected", "num_unread", "num_reused", "accuracy", "mean_iou")
    metrics = {f"predict/{name}": summary[name] for name in names}
    metrics |= {Metric.PREDICTION_THROUGHPUT: summary["samples_per_second"], Metric.WALL_SECONDS: summary["seconds"]}
    metrics |= predicted.reads.metrics
    if predicted.parity is not None:
        metrics[Metric.PARITY_AGREEMENT] = predicted.parity.agreement
        metrics[Metric.PARITY_MAX_DIFFERENCE] = predicted.parity.max_difference
    return metrics
