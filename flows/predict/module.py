"""Predicts with own Lightning code: its `predict_step` on the batches of its `predict_dataloader`, into Parquet."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prefect import get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.execution import Precision
from paceline.conf.lightning import Lightning
from paceline.conf.load import validate_as
from paceline.flows.checks import preflight
from paceline.flows.checks.lightning import CHECKPOINT, load_prediction
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.predict.request import UNRECORDED, PredictRequest, check_out, require_room, write_facts
from paceline.tasks.cluster.client import demand_of
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.errors import InputError
from paceline.tasks.model_bundle import digest_of
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.predict.module_job import ModuleJob
from paceline.tasks.predict.prefect_tasks import predict_with_module
from paceline.tasks.records.data import ModuleFacts
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Gpu
from paceline.tasks.track import run as tracking
from paceline.tasks.track.models import has_recorded_digest
from paceline.tasks.track.queries import get_runs, read_artifact
from paceline.tasks.track.store import existing_client
from paceline.tasks.train.launch.module_data import require_code
from paceline.tasks.train.lightning import code
from paceline.tasks.train.plan import resolve
from paceline.tasks.train.prefect_tasks import prepare_module_partitions
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint

RUN_ID = re.compile(r"[0-9a-f]{32}")


class TrainedModule(NamedTuple):
    """A trained module, and where its weights are."""

    lightning: Lightning
    precision: Precision
    checkpoint: Path | None  # of a run
    model: Path | None = None  # directory of a logged or registered model, with its digest
    digest: str | None = None


@dataclass(frozen=True)
class ModulePlan:
    """A checked prediction with own Lightning code."""

    trained: TrainedModule
    config: Config
    plan: Plan
    gpus: tuple[Gpu, ...]
    experiment_id: str


def trained_in(request: PredictRequest, environment: Environment) -> TrainedModule | None:
    """The module of a run of own code, with its newest checkpoint unless the request names one.

    None for all else, also for a run that has a logged model alone.

    Raises InputError: the run has neither a checkpoint nor a model, or the copy of its code is gone.
    """
    run_id, uri = request.model, environment.tracking_uri
    if not RUN_ID.fullmatch(run_id):
        return None
    existing_client(uri)  # else the next line would create the store
    tree = yaml.safe_load(read_artifact(uri, run_id, Artifact.CONFIG) or b"") or {}
    lightning = validate_as(Lightning, tree.get("lightning") or {})
    if not lightning.settings:
        return None
    directory = environment.root / "runs" / run_id
    names_one = _given_checkpoint(request) is not None
    checkpoint = None if names_one else newest_valid_checkpoint(directory / "checkpoints")
    if checkpoint is None and not names_one and Tag.MODEL_DIGEST in get_runs(uri, [run_id])[0].tags:
        return None
    if lightning.code is not None:
        if not (directory / code.FOLDER).is_dir():
            fault = f"{run_id} has no copy of its code in {directory}; paceline clean removes those of older runs"
            raise InputError(fault, hint="train it again, or set PACELINE_HOME to that of the run", setting="MODEL")
        lightning = lightning.model_copy(update={"code": str(directory / code.FOLDER)})
    summary = json.loads(read_artifact(uri, run_id, Artifact.SUMMARY) or b"{}")
    if checkpoint is None and not names_one:
        best = (Path(model["path"]) for model in summary.get("train", {}).get("best_models", ()))
        fault = f"{run_id} has no checkpoint in {directory}; paceline clean removes those of finished runs"
        raise InputError(fault, hint=f"add ckpt_path={next(filter(Path.is_file, best), 'FILE')}", setting="ckpt_path")
    precision = tree["execution"]["precision"]
    if precision == "auto":  # what it was is recorded with the result
        precision = summary.get("execution", {}).get("precision", "32-true")
    return TrainedModule(lightning, precision, checkpoint)


def _overrides(request: PredictRequest) -> list[str]:
    """The overrides of a request; what stands in the place of SOURCE may be one too."""
    return [*filter(None, [request.source]), *request.overrides]


def _given_checkpoint(request: PredictRequest) -> str | None:
    """The checkpoint that a request names."""
    given = dict(override.partition("=")[::2] for override in _overrides(request)).get(CHECKPOINT)
    return None if given in ("", "null") else given


def of_model(directory: Path, facts: ModuleFacts) -> TrainedModule:
    """A logged or registered module."""
    lightning = Lightning(settings=facts.settings, packages=facts.packages)
    return TrainedModule(lightning, facts.precision, None, directory, digest_of(facts))


def check(trained: TrainedModule, request: PredictRequest, environment: Environment) -> ModulePlan:
    """Check code, settings, devices, stores and the place for the result."""
    for option, is_given in (("--layer", request.layer is not None), ("--own-size", request.own_size)):
        if is_given:
            fault = f"{option} applies to models of presets, and {request.model} is of own Lightning code"
            raise InputError(fault, hint="paceline predict MODEL", setting=option)
    if request.source is not None and "=" not in request.source:
        raise InputError(
            f"SOURCE={request.source} cannot be used with own Lightning code, which has a predict_dataloader",
            hint="leave it out, or change the arguments of your DataModule: data.init_args.NAME=VALUE",
            setting="SOURCE",
        )
    config = load_prediction(trained.lightning, trained.precision, _overrides(request))
    if config.lightning.ckpt_path is not None:
        trained = trained._replace(checkpoint=Path(config.lightning.ckpt_path), model=None, digest=None)
    hardware = preflight.training_host(config, environment)
    if config.cluster.address is not None:
        require_code(config.lightning, config.cluster.address)
    plan = resolve(config, hardware, 0)
    out = Path(request.out).expanduser().absolute() if request.out else environment.root
    if request.out is not None:
        check_out(request, out, "")
    require_room(config, out, environment)
    gpus = hardware.gpus[:1] if plan.accelerator == "gpu" else ()
    return ModulePlan(trained, config, plan, gpus, preflight.check_servers(config, environment))


def predict_with(
    checked: ModulePlan, request: PredictRequest, environment: Environment, started: float
) -> dict[str, Any]:
    """Predict in a process of a worker, and record it; the summary."""
    config, plan, trained = checked.config, checked.plan, checked.trained
    with open_cluster(config.cluster, demand_of([config.execution], plan.accelerator), environment) as address:
        require_code(config.lightning, address)
        with new_run(config, environment, checked.experiment_id, "predict") as handle:
            for now in config.lightning.packages:
                then = [package for package in trained.lightning.packages if package.split(" ")[0] == now.split(" ")[0]]
                if then not in ([], [now]):
                    get_run_logger().warning("%s, and the model was trained with %s", now, then[0])
            out = Path(request.out).expanduser().absolute() if request.out else None
            out = out or environment.root / "predictions" / handle.run_id
            out.mkdir(parents=True, exist_ok=True)
            tracking.set_tags(handle, {Tag.MODEL: request.model, Tag.PREDICTIONS: str(out)})
            if trained.digest is not None:
                tracking.set_tags(handle, {Tag.MODEL_DIGEST: trained.digest})
                if not has_recorded_digest(request.model):
                    get_run_logger().warning(UNRECORDED, request.model, trained.digest)
            facts: dict[str, Any] = {
                **{"model": request.model, "key": handle.run_id, "model_digest": trained.digest},
                "checkpoint": str(trained.checkpoint) if trained.checkpoint else None,
                "packages": config.lightning.packages,
            }
            write_facts(out, facts, is_complete=False)
            own, home = config.lightning, str(environment.root)
            partitions = prepare_module_partitions(own, own.code, home, address, config.limits)
            job = ModuleJob(
                partitions=partitions,
                **config.lightning.model_dump(include={"settings", "code", "packages"}),
                checkpoint=facts["checkpoint"],
                model_directory=str(trained.model) if trained.model else None,
                model_digest=trained.digest,
                precision=plan.precision,
                gpu=plan.accelerator == "gpu",
                num_threads=plan.num_threads,
                directory=str(environment.root / "runs" / handle.run_id / "prediction"),
                out=str(out),
            )
            predicted = predict_with_module(job, checked.gpus, address, config.limits.predict_seconds)
            summary = {
                **{"run_id": handle.run_id, "experiment": handle.experiment, "tracking_uri": handle.public_uri},
                **facts,
                "out": str(out),
                **predicted.model_dump(include={"num_samples", "num_batches", "columns"}),
                "samples_per_second": predicted.num_samples / predicted.seconds,
                "execution": plan.model_dump(mode="json"),
                "seconds": time.monotonic() - started,
            }
            write_facts(out, summary, is_complete=True)
            tracking.log_document(handle, Artifact.SUMMARY, summary)
            metrics: dict[str, float | None] = {
                "predict/num_samples": predicted.num_samples,
                Metric.PREDICTION_THROUGHPUT: summary["samples_per_second"],
                Metric.WALL_SECONDS: summary["seconds"],
            }
            tracking.log_facts(handle, metrics, {})
    return summary
