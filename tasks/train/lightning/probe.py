"""The probe of a user's module: each arm is Lightning's Trainer on a module, data and optimizers of its own.

An arm instantiates the classes of the configuration again, with the same seed, so its module begins as the training's
does. Nothing that it changes is an object of the training, and the generators of random numbers are restored.
"""

import copy
import ctypes
import gc
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import distributed

from paceline.conf.lightning import ends_by_time
from paceline.tasks.errors import InputError, MeasureMemoryError, RunError, one_line
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.measure.probe import ArmLostError, ArmRunner, run_probe
from paceline.tasks.measure.step_times import StepTimes
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.threads import threads
from paceline.tasks.records.cost import Cost
from paceline.tasks.records.execution import BASELINE, Arm, Plan, ladder_arms
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.train.launch.layout import PROBE_FILE, STEPS_FILE
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.feed import Wrap
from paceline.tasks.train.lightning.random_state import random_state, set_random_state
from paceline.tasks.train.lightning.step_parts import RequireOneScaler, require_end
from paceline.tasks.train.lightning.trainer_steps import (
    TokenSync,
    TrainerSteps,
    do_nothing,
    restore_on_exception,
    without_workers,
)
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import arms_of_one_rank, diagnostic_arms, name_oom
from paceline.tasks.train.rank.callbacks import write_atomically
from paceline.tasks.train.rank.context import own_processes
from paceline.tasks.train.rank.file_logger import FileLogger
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.compile import compile_callbacks
from paceline.tasks.train.step.precision import lightning_precision

M_ARENA_MAX = -8  # of glibc's mallopt
KEPT = (
    *("accumulate_grad_batches", "benchmark", "deterministic", "gradient_clip_algorithm", "gradient_clip_val"),
    *("inference_mode", "log_every_n_steps", "max_epochs", "sync_batchnorm", "use_distributed_sampler"),
)
"""Settings of the trainer that an arm has too: those that change a step or the schedule of the learning rate."""

ENDS = frozenset({"max_steps", "max_time", "limit_train_batches"})
"""Those that end a training on a loader without length."""
DEFAULT_EPOCHS = 1000
"""Of Lightning's trainer, where no setting ends a training."""
StrategyOf = Callable[[Wrap, Literal["single", "ddp", "fsdp"]], dict[str, Any]]
"""Strategy and plugins of a trainer that wraps its loaders: of this device alone, or of the group."""


class ModuleProbe:
    """The arms of a rank. `options` are those of a trainer on any arm, `checks` further callbacks of it."""

    def __init__(
        self,
        spec: RankSpec,
        device: torch.device,
        options: dict[str, Any],
        strategy_of: StrategyOf,
        checks: Sequence[Callback] = (),
    ) -> None:
        self._spec, self._device, self._options, self._strategy_of = spec, device, options, strategy_of
        self._checks, self._num_threads = checks, torch.get_num_threads()
        settings = spec.config.lightning.settings
        given = settings.get("trainer", {})
        kept = {key: value for key, value in given.items() if key in KEPT}
        if kept.get("max_epochs") == -1:
            del kept["max_epochs"]  # an arm has no max_steps: a schedule over the training's steps would have no end
        self._settings = settings | {"trainer": kept}
        self._has_end = not ENDS.isdisjoint(given) or ends_by_time(given)
        self._num_batches = self._settings["trainer"].get("accumulate_grad_batches") or 1
        self._length: int | None = None
        """Batches of an epoch; None until the first arm has read the loader, and for one without length."""
        self.num_trained = 0
        """Weights that get gradients, after the first arm."""
        self._has_arms = False
        self._data: Any = None
        """The DataModule of the first arm, after its `setup`."""
        self.cost: tuple[Cost | None, str] = None, "the module cannot be counted"
        """Operations of a sample on rank 0, or why they are not known."""
        reads_energy = spec.rank == 0 and device.type == "cpu" and spec.num_nodes == 1
        self._joules = EnergyMeter().joules if reads_energy else lambda: None

    def measure(self) -> tuple[ProbeResult | None, str | None]:
        """The probe, the same on all ranks, or why there is none. Raises InputError: the module cannot be trained."""
        spec, settings, steps = self._spec, self._spec.config.speedup, StepTimes()
        runners: dict[str, ArmRunner] = {}
        left_out: dict[str, str] = {}
        with ExitStack() as stack:
            arm = arm_of(spec.plan).model_copy(update={"loading": "foreground", "memory_format": "contiguous"})
            try:
                counted = BASELINE if arm.strategy == "fsdp" else arm  # torch does not count what sharding does
                candidate = self._counted_runner(stack, arm, is_candidate=True, counts=counted is arm)
                runners["candidate"] = candidate
                runners["baseline"] = self._counted_runner(stack, BASELINE, counts=counted is BASELINE)
            except ArmLostError as error:
                return None, f"the module does not run as {BASELINE.label if runners else arm.label}: {error}"
            for role, other in self._others(candidate).items():
                try:
                    runners[role] = self._runner(stack, other)
                except ArmLostError as error:
                    left_out[role] = str(error)
            try:
                probe = run_probe(runners, settings, group.broadcast, self.watch, steps=steps)
            except ArmLostError as error:
                return None, f"the module does not run as {error}"
        digest = steps.write(Path(spec.directory) / STEPS_FILE) if spec.rank == 0 else None
        probe = probe.model_copy(update={"left_out": left_out | probe.left_out, "steps": digest})
        if spec.rank == 0:
            write_atomically(Path(spec.directory) / PROBE_FILE, probe.model_dump_json())
        return probe, None

    def _others(self, candidate: ArmRunner) -> dict[str, Arm]:
        """The further arms, by role."""
        settings, arm, others = self._spec.config.speedup, candidate.arm, dict[str, Arm]()
        if arm.num_devices > 1:
            others |= arms_of_one_rank(arm, self._spec.plan.num_threads, self._spec.num_nodes, self._device)
        if settings.diagnose:
            others |= diagnostic_arms(arm, candidate.samples_per_step // arm.num_devices)
            others.pop("alone", None)  # each rank reads a batch of the loader's own size: it is `single`
        if settings.factors == "ladder":
            there = {arm, BASELINE, *others.values()}
            others |= {role: one for role, one in ladder_arms(BASELINE, arm).items() if one not in there}
        return others

    def execute(self, plan: Plan) -> None:
        """Use another execution from now on, on the same devices."""
        self._spec = self._spec.model_copy(update={"plan": plan})

    def runner(self, stack: ExitStack, arm: Arm) -> ArmRunner:
        """An arm of a search, after its first step. Raises ArmLostError, on all ranks: the module cannot run it."""
        return replace(self._runner(stack, arm, is_candidate=True), arm=arm)

    def left_out(self, arms: Mapping[str, Arm]) -> dict[str, str]:
        """Arms for which an earlier attempt had no memory, by role, and why."""
        known = self._spec.left_out
        return {role: known[arm.label] for role, arm in arms.items() if arm.label in known}

    def planned_steps(self) -> int:
        """Steps of the training, which rank 0 knows after the first arm; 0 where a time limit may end it."""
        trainer = self._spec.config.lightning.settings.get("trainer", {})
        if ends_by_time(trainer):
            return 0
        num_batches, num_epochs, max_steps = (
            self.epoch_batches(),
            trainer.get("max_epochs"),
            trainer.get("max_steps", -1),
        )
        if num_epochs is None and max_steps < 0:
            num_epochs = DEFAULT_EPOCHS
        planned = math.inf if num_epochs in (None, -1) else num_epochs * num_batches / self._num_batches
        planned = min(planned, max_steps if max_steps >= 0 else math.inf)
        return int(planned) if math.isfinite(planned) else 0

    def epoch_batches(self) -> float:
        """Batches of an epoch of the training, infinite for a loader without length."""
        num_batches: float = math.inf if self._length is None else self._length
        limit = self._spec.config.lightning.settings.get("trainer", {}).get("limit_train_batches")
        if isinstance(limit, float):
            return num_batches * limit
        return min(num_batches, limit) if isinstance(limit, int) else num_batches

    @property
    def has_fixed_steps(self) -> bool:
        """Whether the training takes as many steps on several devices as on one."""
        max_steps = self._spec.config.lightning.settings.get("trainer", {}).get("max_steps", -1)
        return bool(self.planned_steps() == max_steps)

    @property
    def num_batches(self) -> int:
        """Batches of a step, over which gradients are added up."""
        return int(self._num_batches)

    def watch(self) -> ValidityWatch:
        """Watch this host for contamination from now on."""
        return ValidityWatch(own_processes(self._spec), gpu_uuids=self._spec.devices)

    def _counted_runner(self, stack: ExitStack, arm: Arm, *, counts: bool, is_candidate: bool = False) -> ArmRunner:
        try:
            return self._runner(stack, arm, is_candidate=is_candidate, counts=counts)
        except ArmLostError:
            if not counts:
                raise
            return self._runner(stack, arm, is_candidate=is_candidate)  # perhaps lost by the count

    def _runner(self, stack: ExitStack, arm: Arm, *, is_candidate: bool = False, counts: bool = False) -> ArmRunner:
        """An arm after its first step. Raises ArmLostError, on all ranks: the module cannot run it."""
        if (reason := self._spec.left_out.get(arm.label)) is not None:
            raise ArmLostError(reason)
        self._has_arms = True
        steps = self._steps(arm)
        stack.callback(_close, arm, steps)
        if arm.loading == "foreground" and not is_candidate:
            steps.change_loader = without_workers
        run = partial(self._run, arm, steps)
        steps.counts = counts  # on all ranks: counting may fail
        run(1)
        steps.counts, self.cost = False, steps.cost if counts and self._spec.rank == 0 else self.cost
        if arm.num_devices > 1 or self._spec.rank == 0:  # others have read nothing
            self._length, self.num_trained = steps.length, steps.num_trained
            if steps.length is None:
                require_end(has_end=self._has_end)  # before the time of a probe is spent
        if is_candidate and any(steps.num_workers):
            arm = arm.model_copy(update={"loading": "streaming"})
        size = group.broadcast(steps.batch_size)
        samples = max(1, int(0 if math.isnan(size) else size)) * self._num_batches * arm.num_devices
        gather = group.all_gather if arm.variant == "no_sync" else None

        def has_diverged() -> bool:
            return steps.loss is not None and not bool(torch.isfinite(steps.loss))

        in_turn = math.lcm(*(max(1, number) for number in steps.num_workers)) * (2 if steps.splits else 1)
        period = math.lcm(in_turn, self._num_batches) // self._num_batches
        return ArmRunner(arm, run, samples, has_diverged, gather=gather, joules=self._joules, period=period)

    def _run(self, arm: Arm, steps: TrainerSteps, num_steps: int) -> Sequence[float]:
        """Take steps of one or several batches each; collective, since an arm that one rank cannot run is lost.

        Raises RunError: the others wait in the arm for this rank, which cannot run it.
        """
        number, lost, times = self._num_batches, "", list[float]()
        # For the arm's own thread too, which starts in its first call, and takes the number that is in use then.
        in_use = threads(arm.num_threads or self._num_threads, then=self._num_threads)
        try:
            if arm.num_devices > 1 or self._spec.rank == 0:
                with name_oom(arm.label), _group_of(arm), in_use:
                    times = steps.run(num_steps * number)
        except (InputError, MeasureMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  whatever the module raises
            lost = f"{type(error).__name__}: {one_line(error)}"
        # Without exchange, the others wait for nobody, and may take as long as rank 0 alone.
        patience = group.ALONE_SECONDS if arm.variant == "no_sync" else group.GROUP_SECONDS
        if not group.arrive(patience if lost else None):
            raise RunError(f"rank {self._spec.rank} alone cannot run {arm.label}: {lost}")
        if max(group.all_gather(float(bool(lost)))):
            raise ArmLostError(lost or "another rank could not run it")
        return [sum(times[first : first + number]) for first in range(0, len(times), number)]

    def close(self) -> None:
        """Remove what the module has written in the arms, and free their memory before the training has its own."""
        shutil.rmtree(self._logs, ignore_errors=True)
        self._data = None
        for check in self._checks:  # Lightning has bound methods of the last arm's module to them
            vars(check).pop("log", None)
            vars(check).pop("log_dict", None)
        if self._has_arms:
            _free_memory()

    @property
    def _logs(self) -> Path:
        return Path(self._spec.directory) / "probe"

    def _steps(self, arm: Arm) -> TrainerSteps:
        is_group = _is_of_group(arm)
        hooks = [TokenSync()] if is_group and arm.variant == "token_sync" else []

        def fit(steps: TrainerSteps) -> None:
            options = {
                **self._options,
                **self._strategy_of(steps.wrap, arm.strategy if is_group else "single"),
                **({} if is_group else {"devices": 1, "num_nodes": 1}),
                "precision": lightning_precision(arm.precision),
                "callbacks": [*compile_callbacks(arm.compile), *hooks, RequireOneScaler(), *self._checks, steps],
                "max_steps": -1,
                "limit_val_batches": 0,
                "num_sanity_val_steps": 0,
                "logger": FileLogger(None, self._logs, self._spec.run_id),
                **{"enable_checkpointing": False, "enable_progress_bar": False},
                "enable_model_summary": False,
            }
            cli = ModuleCLI(self._settings, options, self._spec.partitions)
            # The data are prepared, and all ranks would meet around an overridden one.
            cli.model.prepare_data = MethodType(LightningModule.prepare_data, cli.model)
            if arm.variant == "no_update":
                _leave_out_update(cli.model)
            cli.trainer.fit(cli.model, datamodule=self._share(cli.datamodule))

        steps = TrainerSteps(fit, self._device)
        steps.replays = arm.variant == "synthetic_input"
        steps.splits = arm.batch_size is not None
        return steps

    def _share(self, data: Any) -> Any:
        """The DataModule of an arm: what the first one has set up serves all, and the data are prepared already."""
        if data is None:
            return None
        if self._data is None:
            self._data = data
            data.prepare_data = MethodType(LightningDataModule.prepare_data, data)  # not overridden: see `_steps`
            return data
        shared = copy.copy(self._data)
        shared.setup = do_nothing
        return shared


def _is_of_group(arm: Arm) -> bool:
    """Whether the ranks of an arm exchange gradients; else each trains alone."""
    return arm.num_devices > 1 and arm.variant != "no_sync"


def _group_of(arm: Arm) -> AbstractContextManager[None]:
    """The process group of an arm: that of the training, or this rank alone."""
    return nullcontext() if _is_of_group(arm) else group.alone()


def _close(arm: Arm, steps: TrainerSteps) -> None:
    with _group_of(arm):
        steps.close()


def _leave_out_update(module: Any) -> None:
    if not module.automatic_optimization:
        raise RuntimeError("with manual optimization the module updates its weights itself")

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()

    module.optimizer_step = MethodType(optimizer_step, module)


def _free_memory() -> None:
    gc.collect()  # a trainer, its module and its data refer to each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def leave_no_trace() -> Iterator[None]:
    """Restore the generators of random numbers, hooks and the memory after what runs next to a training.

    The threads in it share one arena of memory, which keeps what is freed, as the training's does.
    """
    state = random_state(None)
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    try:
        yield
    finally:
        restore_on_exception()
        _free_memory()
        set_random_state(state, None)
        if distributed.is_initialized() and "torch._dynamo" in sys.modules:
            torch._dynamo.reset_code_caches()  # compiled by the user, they may have the number of ranks of an arm
