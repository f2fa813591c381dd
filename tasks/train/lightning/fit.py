"""A rank's training of the user's module: Lightning's Trainer with Paceline's placement, logger and callbacks."""

import math
import pickle
import resource
import socket
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import Strategy

from paceline.tasks.errors import InputError, RunError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.measure.paired_ratio import input_share
from paceline.tasks.measure.system_metrics import log_system_metrics
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.metrics_file import FILE as METRICS_FILE
from paceline.tasks.metrics_file import MetricsFile
from paceline.tasks.model.threads import use_threads
from paceline.tasks.model_bundle import WEIGHTS
from paceline.tasks.records.measurement import AutotuneResult
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.train.autotune.choice import choose_for_module
from paceline.tasks.train.autotune.search import MODULE_SETTINGS, autotune_module
from paceline.tasks.train.checkpoint_interval import FailureHistory, read_failures
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.launch.layout import SEARCH_FILE
from paceline.tasks.train.lightning import code
from paceline.tasks.train.lightning.after_fit import finish, leave_out_preparation
from paceline.tasks.train.lightning.callbacks import SaveCheckpoint, StepAccount
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.feed import FedDevice, FedGroup, FedShards, FeedState, Wrap, feed
from paceline.tasks.train.lightning.probe import ModuleProbe, leave_no_trace
from paceline.tasks.train.lightning.step_parts import RequireFolders, RequireOneScaler, RequireSpace, final_refusals
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import name_oom
from paceline.tasks.train.rank.callbacks import write_atomically
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO
from paceline.tasks.train.rank.context import bind, own_processes
from paceline.tasks.train.rank.device_limit import known_limit
from paceline.tasks.train.rank.file_logger import FileLogger
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank.user_callbacks import best_models
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.compile import CompileWatch, compile_callbacks
from paceline.tasks.train.step.precision import lightning_precision


def fit_module(spec: RankSpec, stopwatch: Stopwatch, heartbeat: Heartbeat) -> ModuleResult:
    """Train the module of a specification, and return the rank's result.

    Raises:
        InputError: the module or its loader cannot be trained, or this host has other user code than the run.
        RunError: this host has another Paceline than the run.
    """
    stopwatch.switch("setup")
    module, device, directory = spec.config.lightning, join(spec), Path(spec.directory)
    with final_refusals(), ExitStack() as stack:
        log = None
        if spec.rank == 0:
            metrics = stack.enter_context(closing(MetricsFile(directory / METRICS_FILE)))
            stack.enter_context(log_system_metrics(metrics.log_durably, spec.devices))
            log = metrics.log
        shared, strategy_of, compile_watch = options_of(spec), partial(strategy, spec, device), CompileWatch()
        probe, no_probe = spec.probe, None
        facts: dict[str, Any] = {"uncounted": "operations are counted with a new probe only"}
        space = RequireSpace(spec)
        bench = ModuleProbe(spec, device, shared, strategy_of, [space])
        spec, search = _autotune(spec, bench, stopwatch)
        plan = spec.plan
        if probe is None and spec.config.speedup.baseline == "probe":
            with stopwatch.during("probe"), name_oom("probe", "probe"), group.wait_for_rank_0(), leave_no_trace():
                probe, no_probe = bench.measure()
                facts["cost"], facts["uncounted"] = bench.cost
        bench.close()
        stack.enter_context(group.wait_for_rank_0())
        state, progress = FeedState(stopwatch), directory / "progress.json" if spec.rank == 0 else None
        account = StepAccount(stopwatch, state, log, progress, dict(plan.reasons), space.reports)
        failures = partial(read_failures, Path(spec.home)) if spec.rank == 0 else FailureHistory
        checkpoints = SaveCheckpoint(
            account,
            state,
            Path(spec.checkpoint_directory),
            spec.config.execution.checkpoint_steps,
            spec.rank,
            failures,
            spec.world_size,
            is_restart=spec.resume_from is not None,
        )
        placed = strategy_of(partial(feed, state), plan.strategy)
        options: dict[str, Any] = {
            **shared,
            **placed,
            "plugins": [
                AtomicCheckpointIO(
                    directory.parent,
                    Path(spec.checkpoint_directory),
                    partial(stopwatch.during, "checkpoint"),
                    module.ckpt_path,
                ),
                *placed["plugins"],
            ],
            "precision": lightning_precision(plan.precision),
            "callbacks": [
                *compile_callbacks(plan.compile),
                RequireOneScaler(),
                RequireFolders(),
                space,
                account,
                checkpoints,
            ],
            "logger": FileLogger(log, Path(shared["default_root_dir"]), spec.run_id, account.note, _save_dir(spec)),
            **{"enable_checkpointing": True, "enable_progress_bar": False},
        }
        cli = _instantiate(spec, options)
        trainer = cli.trainer
        heartbeat.count_steps = lambda: trainer.fit_loop.total_batch_idx + 1
        watch = ValidityWatch(own_processes(spec), gpu_uuids=spec.devices) if spec.rank == 0 else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # without the arms of the probe
        given = Path(spec.home) / "runs" / spec.run_id / code.START_CHECKPOINT
        start = spec.resume_from or (str(given) if module.ckpt_path is not None else None)
        trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=start, weights_only=True)
        validity = watch.stop() if watch else None
        # Before the test, whose `setup` may build the network again, and which makes new callbacks of the module.
        facts["weights"] = _save_weights(spec, trainer.strategy.lightning_module_state_dict())
        facts |= {"best_models": best_models(trainer)} | finish(cli, stopwatch, account.note)
    if facts.get("cost"):
        with stopwatch.during("limit"):
            facts |= known_limit(spec, device, lambda: ValidityWatch(own_processes(spec), gpu_uuids=spec.devices))
    budget = stopwatch.budget()
    seconds = sum(duration for _, _, duration in account.windows)
    samples = sum(account.window_samples) if account.knows_samples else 0
    per_epoch = trainer.num_training_batches
    on_gpu = device.type == "cuda"
    data_wait = min(1.0, budget.get("data_wait", 0.0) / seconds) if seconds else None
    probed_wait = input_share(probe) if probe is not None else None
    return ModuleResult(
        world_size=spec.world_size,
        num_epochs=trainer.current_epoch,
        num_batches=trainer.fit_loop.total_batch_idx + 1,
        num_steps=trainer.global_step,
        first_step=account.windows[0][0] if account.windows else 0,
        seconds=account.fit_seconds,
        samples_per_second=samples / seconds if samples and seconds else None,
        losses=tuple(loss if loss == loss else None for loss in account.losses),  # noqa: PLR0124  NaN: none returned
        checkpoint=str(checkpoints.last or start or "") or None,
        resumed_from=start,
        time_budget=budget,
        wall_seconds=sum(budget.values()),
        data_wait_fraction=probed_wait if on_gpu else data_wait,  # the host's waits are not a GPU's
        windows=tuple(account.windows),
        window_samples=tuple(account.window_samples),
        units_per_second={unit: number / seconds for unit, number in account.num_units.items() if seconds},
        steps_per_epoch=int(per_epoch) if math.isfinite(per_epoch) else None,
        samples_per_epoch=round(samples / sum(number for _, number, _ in account.windows) * per_epoch)
        if samples and math.isfinite(per_epoch)
        else None,
        probe=probe,
        no_probe=no_probe,
        search=search,
        plan=plan.model_copy(update={"reasons": account.choices}),
        directory=spec.directory,
        notes=tuple(account.notes),
        compile=compile_watch.stats(trainer.fit_loop.total_batch_idx + 1) if plan.compile != "off" else None,
        validity=validity,
        partitions=spec.partitions,
        **facts,
        epoch_ends=tuple(account.epoch_ends),
        startup_seconds=account.startup_seconds,
        peak_memory_bytes=int(torch.cuda.max_memory_allocated(device))
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        hosts=(socket.gethostname(),),
        devices=(" ".join([plan.device_name, *spec.devices[spec.local_rank :][:1]]),),
    )


def _autotune(spec: RankSpec, bench: ModuleProbe, stopwatch: Stopwatch) -> tuple[RankSpec, AutotuneResult | None]:
    """The specification with the fastest execution of a search, and the search: an earlier one, or one made now."""
    search = spec.search
    is_open = spec.plan.strategy != "fsdp" and not spec.plan.reasons.keys().isdisjoint(MODULE_SETTINGS)
    if search is None and spec.may_search and is_open:
        with stopwatch.during("search"), name_oom("search", "search"), group.wait_for_rank_0(), leave_no_trace():
            search = autotune_module(bench, spec.plan, bench.planned_steps)
        if search is not None and spec.rank == 0:
            write_atomically(Path(spec.directory) / SEARCH_FILE, search.model_dump_json())
    if search is None:
        return spec, None
    plan = choose_for_module(spec.plan, search)
    bench.execute(plan)
    return spec.model_copy(update={"plan": plan}), search


def _instantiate(spec: RankSpec, options: dict[str, Any]) -> ModuleCLI:
    """The module, its data and its trainer after `before_fit`, without `prepare_data` where that has run."""
    cli = ModuleCLI(spec.config.lightning.settings, options, spec.partitions)
    cli.run_hook("before_fit")
    if spec.resume_from is not None:
        _leave_out_finders(cli.trainer)
    if spec.is_prepared:
        leave_out_preparation(cli)
    return cli


def _leave_out_finders(trainer: Any) -> None:
    """Leave out the search of a learning rate, which a checkpoint has, and in which Lightning 2.6 would lose it.

    Raises InputError: the batch size was searched, which a checkpoint does not have.
    """
    if any(isinstance(each, BatchSizeFinder) for each in trainer.callbacks):
        fault = "a training with BatchSizeFinder cannot resume: its checkpoints do not have the batch size"
        hint = "give the batch size that it has found, and remove it from trainer.callbacks"
        raise InputError(fault, hint=hint, setting="trainer.callbacks")
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, LearningRateFinder)]


def _save_weights(spec: RankSpec, weights: dict[str, Any]) -> str | None:
    """Write a state dict on rank 0; return its path. A directory of code has none: only packages are registered."""
    if spec.rank != 0 or spec.config.lightning.code is not None:
        return None
    path = Path(spec.directory) / WEIGHTS
    torch.save(move_data_to_device(weights, torch.device("cpu")), path)
    try:
        torch.load(path, mmap=True, weights_only=True)
    except pickle.UnpicklingError:  # by `get_extra_state`
        return None
    return str(path)


def join(spec: RankSpec) -> torch.device:
    """Check the code, bind the rank to its cores, and join the group; returns the device."""
    module = spec.config.lightning
    if spec.code_fingerprint != code_fingerprint():
        fault = f"this rank's code is {code_fingerprint()}, the coordinator's {spec.code_fingerprint}"
        raise RunError(fault, hint="install the same version on every host")
    directory = Path(spec.home) / "runs" / spec.run_id / code.FOLDER if module.code else None
    code.import_from(directory)
    code.require(module.packages, module.settings, directory)
    gpu = spec.devices[spec.local_rank] if spec.plan.accelerator == "gpu" else None
    bind(spec.local_rank, spec.num_devices, gpu)
    use_threads(spec.plan.num_threads)
    device = group.pick_device(spec)
    group.join(spec, device)
    group.set_launcher_variables(spec)
    facts = {"code": module.packages, "device": gpu or spec.rank}
    group.check_agreement(spec, facts, same=("code",), unique=("device",))
    return device


def _save_dir(spec: RankSpec) -> Path:
    """Absolute directory above that of ModelCheckpoint's files: the user's, or that of the run for all attempts."""
    given = spec.config.lightning.settings.get("trainer", {}).get("default_root_dir")
    return Path(given or Path(spec.checkpoint_directory).parent).expanduser().absolute()


def options_of(spec: RankSpec) -> dict[str, Any]:
    """Options that all trainers of a rank have."""
    given = spec.config.lightning.settings.get("trainer", {}).get("default_root_dir")
    devices = {"devices": spec.num_devices, "num_nodes": spec.num_nodes}
    return {"accelerator": spec.plan.accelerator, **devices, "default_root_dir": given or spec.directory}


def strategy(
    spec: RankSpec, device: torch.device, wrap: Wrap, kind: Literal["single", "ddp", "fsdp"]
) -> dict[str, Any]:
    """Strategy and plugins of a trainer whose loaders are wrapped: on this rank's device, or on all of the group."""
    given = spec.config.lightning.settings.get("trainer", {}).get("strategy")
    finds_unused = {"find_unused_parameters": True} if given == "ddp_find_unused_parameters_true" else {}
    fed: Strategy = FedDevice(wrap, device=device)
    if kind == "ddp":
        fed = FedGroup(wrap, **finds_unused)
    options: dict[str, Any] = {}
    if kind == "fsdp":  # keeps tensors of the first validation for the training, which inference mode does not allow
        fed, options = FedShards(wrap, spec.world_size), {"inference_mode": False}
    return {"strategy": fed, "plugins": [group.lightning_environment(spec, kind != "single")], **options}
