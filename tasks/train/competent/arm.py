"""The competent loop as an arm of a probe: what it is given, and its steps."""

import pickle
import socket
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from paceline.conf.recipe import FLIPPING, Vary
from paceline.tasks.data.loading.sampling import padding
from paceline.tasks.errors import one_line
from paceline.tasks.measure.probe import ArmLostError, ArmRunner
from paceline.tasks.model.objectives import DEGREES_PER_RADIAN
from paceline.tasks.model.transfer import core_of
from paceline.tasks.records.execution import Arm, arithmetic_of
from paceline.tasks.records.measurement import CompetentCosts
from paceline.tasks.train.competent.process import LoopError, take_process
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.context import RankContext

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
MAX_WORKERS = 8
RUN_SECONDS = 120.0  # longest wait for a block


class CompetentLoop:
    """A loop that has taken its first steps, in a process of its own on each rank; it ends with `stack`.

    Raises ArmLostError: on all ranks, where one of them cannot run it.
    """

    def __init__(self, context: RankContext, arm: Arm, stack: ExitStack) -> None:
        self._process = take_process()
        stack.callback(self._process.close)
        job = _job(context, arm)
        built = self._ask(job, context.config.speedup.max_seconds)
        if built.pop("modules"):
            raise ArmLostError("its network imports Paceline")
        self.costs = CompetentCosts(**built, num_workers=job["num_workers"], num_threads=job["num_threads"])
        num_samples = job["batch_size"] * context.spec.world_size
        arithmetic = arithmetic_of(arm.precision, context.spec.plan.accelerator)
        self.runner = ArmRunner(arm, lambda n: self._ask(n, RUN_SECONDS), num_samples, arithmetic=arithmetic)

    def _ask(self, request: Any, seconds: float) -> Any:
        answer, failure = None, ""
        try:
            answer = self._process.ask(request, seconds)
        except LoopError as error:
            failure = one_line(error)
        if min(group.all_gather(float(not failure))) == 0:
            self._process.close()
            raise ArmLostError(failure or "it failed on another rank")
        return answer


def portable(network: nn.Module) -> bytes:
    """Pickle a network so that a process without Paceline can load it.

    Tracing leaves torch's own modules in the same order. What cannot be traced goes by the names of its classes.

    Raises ArmLostError: it cannot be traced, and has classes of Paceline.
    """
    try:
        traced = fx.symbolic_trace(network)
        for node in traced.graph.nodes:
            node.type = None  # annotations with None cannot be pickled (torch 2.13)
        traced.recompile()
        return pickle.dumps(traced)
    except Exception as error:  # tracing executes the network, which may be the user's
        core = core_of(network)
        if any(type(part).__module__.startswith("paceline.") for part in core.modules()):
            raise ArmLostError(f"its network cannot be traced ({one_line(error)[:120]})") from error
        return pickle.dumps(core)


def _job(context: RankContext, arm: Arm) -> dict[str, Any]:
    """Plain values and tensors: `pickle` would name modules of Paceline for some types of torch."""
    config, spec, split, batches = context.config, context.spec, context.train_split, context.batches
    recipe, prepared = config.recipe, context.prepared
    reasons = {
        "it reads images of one size": not prepared.has_squares,
        "it has no recipe.vary": recipe.vary != Vary(),
        f"it has no optimizer {recipe.optimizer}": recipe.optimizer not in OPTIMIZERS,
        "it does not shard weights": arm.strategy == "fsdp" and arm.num_devices > 1,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise ArmLostError(reason)
    momentum = {"momentum": recipe.momentum} if recipe.optimizer == "sgd" else {}
    num_samples = batches.global_batch_size if batches.num_full_steps else batches.num_samples
    targets = torch.empty(split.num_samples, 0) if split.targets_NT is None else torch.from_numpy(split.targets_NT)
    return {
        "network": portable(context.network),
        "task": config.model.task,
        "images": [str(getattr(shard, "filename")) for shard in split.images],  # noqa: B009  they are memory maps
        "labels": torch.from_numpy(split.labels_N),
        "targets": targets,
        "mean": prepared.mean,
        "std": [std or 1.0 for std in prepared.std],
        "num_channels": prepared.picture_shape[2],
        "shift": padding(recipe.augment, recipe.shift_pixels),
        "flip": recipe.augment in FLIPPING,
        "batch_size": max(1, num_samples // spec.world_size),
        "optimizer": OPTIMIZERS[recipe.optimizer],
        "optimizer_settings": {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay} | momentum,
        "label_smoothing": recipe.label_smoothing,
        "target_weight": recipe.angle_weight * DEGREES_PER_RADIAN**2,
        "noise": recipe.noise,
        "dtype": "float64" if arm.precision == "64-true" else "float32",
        "autocast": {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(arm.precision),
        "tf32": arm.precision == "tf32",
        "channels_last": arm.memory_format == "channels_last",
        "compile": arm.compile == "step",
        "device": str(context.device),
        "num_threads": context.num_threads,
        "num_workers": min(MAX_WORKERS, max(1, context.num_threads // 2)),
        "seed": config.seed + spec.rank,
        "rank": spec.rank,
        "world_size": spec.world_size,
        "address": (spec.master_address, int(group.broadcast(0 if spec.rank else _free_port(spec.master_address)))),
        "directory": str(context.directory),
    }


def _free_port(address: str) -> int:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return int(server.getsockname()[1])
