"""The fit: the network, the schedule and the callbacks of a training, in a Lightning trainer."""

import copy
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from paceline.conf.execution import COMPILED
from paceline.tasks.data.loading.sampling import StepSchedule
from paceline.tasks.data.loading.train_loader import TrainLoader
from paceline.tasks.errors import RunError
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.measure.paired_ratio import input_share
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.train.checkpoint_interval import FailureHistory, read_failures
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.rank import callbacks
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO, ShardedStrategy, load_rest
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank.predictions import validate
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.step.activation_checkpointing import checkpoint_activations
from paceline.tasks.train.step.compile import CompileWatch, compile_network
from paceline.tasks.train.step.distributed import ExchangeStrategy, ShardedLearner
from paceline.tasks.train.step.epoch_loop import StepLoop
from paceline.tasks.train.step.learner import STATE_KEY, Learner
from paceline.tasks.train.step.precision import lightning_precision, prepare_network, set_arithmetic


def restore_schedule(context: RankContext) -> StepSchedule:
    """The steps of the training, from the checkpoint's position on. Raises RunError: it holds no number of samples."""
    resume_from = context.spec.resume_from
    if resume_from is None:
        return StepSchedule(context.batches)
    state = load_rest(Path(resume_from))[STATE_KEY]
    if "first_sample" not in state:
        raise RunError(f"{resume_from} was written by an older version, which counted steps alone; start a new run")
    return StepSchedule(context.batches, state["step"], state["epoch"], state["first_sample"])


def fit(
    context: RankContext,
    loader: TrainLoader,
    schedule: StepSchedule,
    stopwatch: Stopwatch,
    heartbeat: Heartbeat,
    compile_watch: CompileWatch,
    log: callbacks.LogMetrics | None,
) -> tuple[Learner, dict[str, Any]]:
    """Train the network, and return it with fields of the result.

    `compile_watch` counts from before the probe, which compiles code that the steps find in the cache. `log` takes
    metrics and the step; it is None on ranks that do not write.
    """
    stopwatch.switch("setup")
    spec, config, plan = context.spec, context.config, context.spec.plan
    set_arithmetic(plan.precision, context.device)
    learner_type = ShardedLearner if plan.strategy == "fsdp" else Learner
    rate = config.learning_rate_over(spec.world_size)
    learner = learner_type(_training_network(context), context.task, config.recipe, rate, schedule)
    budget = callbacks.BudgetCallback(stopwatch)
    progress_path = context.directory / "progress.json" if context.writes else None
    progress = callbacks.ProgressCallback(stopwatch, log, progress_path, dict(plan.reasons))
    validation = callbacks.ValidationCallback(stopwatch, lambda: validate(context, learner), context.task, log)
    every_steps = config.execution.checkpoint_steps
    # Rank 0 decides for all.
    failures: Callable[[], FailureHistory]
    failures = partial(read_failures, Path(spec.home)) if context.writes else FailureHistory
    place = Path(spec.checkpoint_directory)
    checkpoints = callbacks.CheckpointCallback(stopwatch, place, every_steps, progress, failures)
    trainer = _make_trainer(context, [budget, progress, validation, checkpoints])
    # Networks of user packages may have dropout; our own draw no random numbers in a step.
    draws = (config.seed, spec.rank) if config.model.plugin is not None else None
    trainer.fit_loop.epoch_loop = loop = StepLoop(trainer, plan, stopwatch, draws)
    steps = callbacks.StepLoader(loader, stopwatch, schedule.first_step)
    energy = EnergyMeter(context.gpu_uuids(), own=context.own_processes) if spec.local_rank == 0 else None
    validity = ValidityWatch(context.own_processes(), gpu_uuids=context.gpu_uuids()) if context.writes else None
    step_compiles = CompileWatch()
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)  # without the arms of the probe
    cpu_seconds = time.process_time()
    loader.follow(schedule)
    heartbeat.count_steps = lambda: steps.next_step
    trainer.fit(learner, steps, ckpt_path=spec.resume_from)
    cpu_seconds = time.process_time() - cpu_seconds
    observed = validity.stop() if validity else None

    compiled = step_compiles.stats(loop.num_passes) if plan.compile != "off" else None
    if compiled is not None:
        total = compile_watch.stats(loop.num_passes) or compiled
        compiled = compiled.model_copy(update={"seconds": total.seconds, "is_warm": total.is_warm})
    captured = loop.capture_stats()
    if captured is not None and compiled is not None:
        captured = captured.model_copy(update={"seconds": captured.seconds + compiled.seconds})
    idle_fraction = None  # unknown on a GPU, which works asynchronously; on a CPU, waiting in a spin counts as work
    if budget.fit_seconds and not on_gpu:
        idle_fraction = max(0.0, 1.0 - cpu_seconds / (budget.fit_seconds * plan.num_threads))
    return learner, {
        "compile": captured or compiled,
        "seconds": budget.fit_seconds,
        "startup_seconds": budget.startup_seconds,
        "epoch_ends": checkpoints.epoch_ends,
        "windows": progress.windows,
        "checkpoint": str(checkpoints.last or spec.resume_from),
        "plan": plan.model_copy(update={"reasons": progress.choices}),
        "validity": observed,
        "energy": energy.energy(bool(observed and observed.foreign_device_processes)) if energy else None,
        "communication_fraction": budget.communication_fraction,
        "idle_fraction": idle_fraction,
        "peak_memory_bytes": int(torch.cuda.max_memory_allocated(context.device))
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _training_network(context: RankContext) -> nn.Module:
    plan = context.spec.plan
    if plan.strategy == "fsdp":
        network = copy.deepcopy(context.network)  # on the CPU until it is sharded, which takes contiguous weights
    else:  # Lightning's own plugin converts to float64; here only the layout is set
        network = prepare_network(context.network, "32-true", plan.memory_format == "channels_last", context.device)
    if plan.activation_checkpointing:
        checkpoint_activations(network)
    if plan.compile in COMPILED:
        compile_network(network)
    return network


def _make_trainer(context: RankContext, observers: list[Any]) -> Trainer:
    spec, plan = context.spec, context.spec.plan
    is_group = plan.strategy != "single"
    strategy: Any = "auto"
    if is_group:
        sharded = plan.strategy == "fsdp"
        strategy = ShardedStrategy(spec.world_size) if sharded else ExchangeStrategy(plan.gradient_compression)
    return Trainer(
        accelerator=plan.accelerator,
        devices=spec.num_devices,
        num_nodes=spec.num_nodes,
        strategy=strategy,
        precision=lightning_precision(plan.precision),
        plugins=[AtomicCheckpointIO(context.directory.parent), group.lightning_environment(spec, is_group)],
        max_epochs=context.config.recipe.num_epochs,
        callbacks=observers,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=str(context.directory),
    )


def training_facts(
    context: RankContext,
    learner: Learner,
    schedule: StepSchedule,
    stopwatch: Stopwatch,
    windows: Sequence[callbacks.Window],
    probe: ProbeResult | None,
) -> dict[str, Any]:
    """Fields of the result that follow from the losses, the schedule, the time budget and the windows."""
    spec, budget = context.spec, stopwatch.budget()
    # The throughput is taken over windows, at whose ends the device has finished: the host's items would give the rate
    # of launches on a GPU.
    seconds = sum(duration for _, _, duration in windows)
    window_samples = [schedule.samples(first + number) - schedule.samples(first) for first, number, _ in windows]
    num_samples = sum(window_samples)
    last_epoch = learner.epoch_ends[-2] if len(learner.epoch_ends) > 1 else 0
    data_wait = min(1.0, budget.get("data_wait", 0.0) / seconds) if seconds else None
    if context.device.type == "cuda":  # by the probe: the host's waits are not the device's
        data_wait = input_share(probe) if probe is not None else None
    return {
        "world_size": spec.world_size,
        "num_epochs": context.config.recipe.num_epochs,
        "num_steps": len(learner.losses),
        "samples_per_epoch": context.train_split.num_samples,
        "samples_per_second": num_samples / seconds if num_samples else None,
        "window_samples": window_samples,
        "steps_per_epoch": schedule.plan.steps_per_epoch,
        "final_loss": float(np.mean(learner.losses[last_epoch:])),
        "resumed_from": spec.resume_from,
        "losses": learner.losses,
        "first_step": schedule.first_step,
        "validation_scores": learner.validation_scores,
        "score_name": context.task.score_name,
        "time_budget": budget,
        "wall_seconds": sum(budget.values()),
        "data_wait_fraction": data_wait,
        "hosts": (socket.gethostname(),),
        "devices": (" ".join([spec.plan.device_name, *spec.devices[spec.local_rank :][:1]]),),
    }
