"""One rank: `python -m paceline.tasks.train.rank.main spec.json`.

Joins the group, probes, trains, predicts, and writes result.json.

With `place` and `measure` the composition root of a rank's process: the only modules of a stage that bring other
stages' parts together. Knows nothing of Dask, Prefect or how it was started, so any engineer can replay it by hand.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import logging
import os
import resource
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

LOADED_AT = time.monotonic()
if __name__ == "__main__":
    gc.disable()  # until `main`: looking for garbage among what is imported takes a quarter of the time

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from paceline.conf.execution import Precision
from paceline.tasks.data.loading.loader import TrainLoader
from paceline.tasks.data.loading.step_schedule import StepSchedule
from paceline.tasks.data.split import open_split
from paceline.tasks.errors import MeasureMemoryError, PacelineError, RunError
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.measure.records import MeasureResult
from paceline.tasks.measure.system_metrics import log_system_metrics
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.metrics_file import FILE as METRICS_FILE
from paceline.tasks.metrics_file import MetricsFile
from paceline.tasks.model.fuse_batch_norm import fold_batch_norm
from paceline.tasks.model.lightning_module import STATE_KEY, Learner
from paceline.tasks.model.objectives import PixelTask
from paceline.tasks.records import BASELINE, STEP_ITEMS, Arm, AutotuneResult, CompileStats, ProbeResult, TrainResult
from paceline.tasks.redact import redact, redact_logs
from paceline.tasks.train.autotune.choice import choose, faster_plan, plan_of_probe
from paceline.tasks.train.autotune.search import autotune, time_layers
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.launch.layout import EXAMPLES_FILE, PROBE_FILE, SEARCH_FILE
from paceline.tasks.train.launch.standby import die_with_supervisor
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import ArmBenchmark, diagnostic_arms, measure, measured_loads
from paceline.tasks.train.rank.callbacks import (
    BudgetCallback,
    CheckpointCallback,
    LogMetrics,
    ProgressCallback,
    StepLoader,
    ValidationCallback,
    write_atomically,
)
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO, load
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank.predictions import (
    choose_examples,
    count,
    predict,
    save_examples,
    save_predictions,
    warm_up,
)
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.compile import CompileWatch, compile_network
from paceline.tasks.train.step.distributed import (
    ExchangeStrategy,
    ShardedLearner,
    gather_full_weights,
    sharding_strategy,
)
from paceline.tasks.train.step.epoch_loop import StepLoop
from paceline.tasks.train.step.micro_batches import oom_sample_count
from paceline.tasks.train.step.precision import forward_context, prepare_network

MAX_SWITCHES = 2
"""Times that the execution is switched after a probe: to another arithmetic, then to another loading."""


@contextmanager
def _measuring(stage: str) -> Iterator[None]:
    """Tells what is timed before a training, and has no memory beside it, from a training that has none."""
    try:
        yield
    except Exception as error:
        if oom_sample_count(error) is None:
            raise
        raise MeasureMemoryError(f"{stage}: {error}", stage) from error


class Rank:
    """One rank's training.

    Args:
        place: joined.
        stopwatch: of the process, running.
        pulse: of the process; learns here how to count steps.
    """

    def __init__(self, place: RankContext, stopwatch: Stopwatch, pulse: Heartbeat) -> None:
        self.place = place
        self.config = place.config
        self.stopwatch = stopwatch
        self.pulse = pulse
        self._compiled = CompileWatch()

    @property
    def spec(self) -> RankSpec:
        """This rank's place and its work."""
        return self.place.spec

    def run(self) -> TrainResult:
        """Search, probe, train, predict the test split."""
        place = self.place
        if self.config.execution.worker_load == "measured" and self.spec.world_size > 1:
            with self.stopwatch.during("setup"):
                place.set_rank_loads(measured_loads(place, self._candidate()))
        course = self._course()
        with self.stopwatch.during("search"), _measuring("search"):
            found = self._search(course)
        with ExitStack() as stack:
            with self.stopwatch.during("probe"), _measuring("probe"):
                loader, probe = self._probed()
            stack.callback(loader.close)
            log = stack.enter_context(self._metrics()) if place.writes else None
            learner, fit_facts = self._fit(loader, course, log)
            learner.network.to(place.device)  # Lightning has moved it to the CPU, where NCCL cannot average
            group.average_buffers(learner.network)
            with self.stopwatch.during("prediction"):
                network = self._whole(learner.network)
                predictions_path, rate = self._predict(self._folded(network))
                weights = self._save_weights(network)
                plain_score = self._plain_score(network) if self.config.track.register else None
            self.stopwatch.switch("teardown")
        facts = self._result(learner, course) | fit_facts
        examples = place.directory / EXAMPLES_FILE
        facts |= {
            "probe": probe,
            "predictions": (predictions_path,),
            "examples": str(examples) if examples.exists() else None,
            "prediction_samples_per_second": rate,
            "plain_score": plain_score,
            "weights": weights,
            "worker_load": place.loads,
            "search": found,
        }
        return TrainResult.model_validate(facts)

    # Setting up

    def _course(self) -> StepSchedule:
        """From what the checkpoint says is done, on batches of this group's size."""
        if self.spec.resume_from is None:
            return StepSchedule(self.place.batches)
        state = load(Path(self.spec.resume_from))[STATE_KEY]
        if "first_sample" not in state:
            raise RunError(
                f"{self.spec.resume_from} was written by an older version, which counted steps alone; start a new run"
            )
        return StepSchedule(self.place.batches, state["step"], state["epoch"], state["first_sample"])

    def _search(self, course: StepSchedule) -> AutotuneResult | None:
        """Take what is known, or found now, of the executions that `auto` can choose from."""
        spec, place = self.spec, self.place
        rules, num_steps = arm_of(spec.plan), course.num_steps(self.config.recipe.num_epochs) - course.first_step
        new = autotune(ArmBenchmark(place), spec.plan, num_steps, spec.search) if spec.may_search else None
        found = new or spec.search
        if found is not None:
            place.execute(choose(spec.plan, found, rules, num_steps))
        if new is not None and place.writes:
            write_atomically(place.directory / SEARCH_FILE, new.model_dump_json())
        return found

    def _candidate(self) -> Arm:
        plan, place = self.spec.plan, self.place
        own_threads = plan.num_threads if plan.num_threads != place.num_threads else None
        return arm_of(plan, place.loads).model_copy(update={"num_threads": own_threads})

    def _probed(self) -> tuple[TrainLoader, ProbeResult | None]:
        """The training's loader and its probe; an execution that the probe finds slower than another is switched."""
        place, known = self.place, self.spec.probe
        if known is not None:
            place.execute(plan_of_probe(self.spec.plan, self._candidate(), known))
            return place.loader(self._candidate(), place.batches, self.spec.rank), known
        for num_left in range(MAX_SWITCHES, -1, -1):
            arm = self._candidate()
            with ExitStack() as stack:
                loader = stack.enter_context(closing(place.loader(arm, place.batches, self.spec.rank)))
                probe = self._probe(arm, loader)
                better = faster_plan(self.spec.plan, probe) if probe is not None and num_left else None
                if better is None:
                    stack.pop_all()
                    return loader, probe
            place.execute(better)
        raise AssertionError("the last round returns")

    def _probe(self, arm: Arm, loader: TrainLoader) -> ProbeResult | None:
        if self.config.speedup.baseline != "probe":
            return None
        # A baseline that takes more samples at once than the candidate may not fit where the candidate does.
        arms = {"baseline": BASELINE.model_copy(update={"micro_batch": arm.micro_batch}), "candidate": arm}
        if arm.num_devices > 1:
            arms["single"] = arm.model_copy(update={"num_devices": 1})
        if arm.compile != "off":
            arms["uncompiled"] = arm.model_copy(update={"compile": "off"})  # whether compiling pays
        if self.config.speedup.diagnose:
            own_batch = max(1, self.place.batches.global_batch_size // arm.num_devices)
            arms |= diagnostic_arms(arm, own_batch)
            if own_batch == self.config.batch_size_over(1):  # weak scaling: that is the single device's already
                arms.pop("alone", None)
        probe = ArmBenchmark(self.place).probe(arms, {"candidate": loader})
        if self.place.writes:
            write_atomically(self.place.directory / PROBE_FILE, probe.model_dump_json())
        return probe

    # Training

    def _fit(self, loader: TrainLoader, course: StepSchedule, log: LogMetrics | None) -> tuple[Learner, dict[str, Any]]:
        spec, place, watch = self.spec, self.place, self.stopwatch
        watch.switch("setup")
        kind = ShardedLearner if spec.plan.strategy == "fsdp" else Learner
        rate = self.config.learning_rate_over(spec.world_size)
        learner = kind(self._prepared_network(), place.task, self.config.recipe, rate, course)
        budget = BudgetCallback(watch)
        progress_path = place.directory / "progress.json" if place.writes else None
        progress = ProgressCallback(watch, log, progress_path, self.spec.plan.reasons)
        checkpoints = CheckpointCallback(
            watch, Path(spec.checkpoint_directory), self.config.execution.checkpoint_steps, progress
        )
        validation = ValidationCallback(watch, lambda: self._validate(learner.network), place.task, log)
        trainer = self._trainer([budget, progress, validation, checkpoints])
        # Networks of the user's may have dropout and the like; those that are here draw nothing in a step.
        draws = (self.config.seed, spec.rank) if self.config.model.plugin is not None else None
        loop = StepLoop.install(trainer, spec.plan, watch, draws)
        energy = EnergyMeter(place.gpu_uuids()) if spec.local_rank == 0 else None
        validity = ValidityWatch(place.own_processes(), gpu_uuids=place.gpu_uuids()) if place.writes else None
        steps_compiled = CompileWatch()
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place.device)  # arms of a probe took theirs
        cpu_seconds = time.process_time()
        loader.follow(course)
        steps = StepLoader(loader, watch, course.first_step)
        self.pulse.count_steps = lambda: steps.next_step
        trainer.fit(learner, steps, ckpt_path=spec.resume_from)
        cpu_seconds = time.process_time() - cpu_seconds
        return learner, {
            "compile": loop.capture_stats() or self._compile_stats(steps_compiled, loop.num_passes),
            "seconds": budget.fit_seconds,
            "startup_seconds": budget.startup_seconds,
            "epoch_ends": checkpoints.epoch_ends,
            "windows": progress.windows,
            "checkpoint": str(checkpoints.last or spec.resume_from),
            "plan": self.spec.plan.model_copy(update={"reasons": progress.choices}),
            "validity": validity.stop() if validity else None,
            "energy_joules": energy.joules() if energy else None,
            "communication_fraction": budget.communication_fraction,
            "idle_fraction": self._idle_fraction(cpu_seconds, budget.fit_seconds),
            "peak_memory_bytes": self._peak_memory(),
        }

    def _compile_stats(self, steps: CompileWatch, num_calls: int) -> CompileStats | None:
        """Of the training's steps; what they cost is in part in the probe before them, whose code they find cached."""
        stats, whole = steps.stats(num_calls), self._compiled.stats(num_calls)
        if self.spec.plan.compile == "off" or stats is None or whole is None:
            return None
        return stats.model_copy(update={"seconds": whole.seconds, "is_warm": whole.is_warm})

    def _idle_fraction(self, cpu_seconds: float, seconds: float) -> float | None:
        """Of the CPU threads; waiting in a spin counts as work. Unknown on a GPU, which runs on its own."""
        if self.place.device.type == "cuda" or not seconds:
            return None
        return max(0.0, 1.0 - cpu_seconds / (seconds * self.spec.plan.num_threads))

    def _peak_memory(self) -> int:
        """Of the training; on a CPU of the whole process."""
        if self.place.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.place.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _prepared_network(self) -> nn.Module:
        plan = self.spec.plan
        if plan.strategy == "fsdp":
            return copy.deepcopy(self.place.network)  # on the CPU until it is sharded, which takes contiguous weights
        # Lightning's own plugin converts to float64; here only the layout is set.
        network = prepare_network(
            self.place.network, "32-true", plan.memory_format == "channels_last", self.place.device
        )
        if plan.compile == "step":
            compile_network(network)
        return network

    def _trainer(self, callbacks: list[Any]) -> Trainer:
        spec, plan = self.spec, self.spec.plan
        plugins: list[Any] = [AtomicCheckpointIO()]
        strategy: Any = "auto"
        if plan.strategy == "ddp":
            plugins.append(group.RankEnvironment(spec))
            strategy = ExchangeStrategy(plan.gradient_compression)
        elif plan.strategy == "fsdp":
            plugins.append(group.RankEnvironment(spec))
            strategy = sharding_strategy(spec.world_size)
        return Trainer(
            accelerator=plan.accelerator,
            devices=spec.num_devices,
            num_nodes=spec.num_nodes,
            strategy=strategy,
            precision=plan.precision,
            plugins=plugins,
            max_epochs=self.config.recipe.num_epochs,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=str(self.place.directory),
        )

    @contextmanager
    def _metrics(self) -> Iterator[LogMetrics]:
        """Takes metrics and their step; the machine's load is among them."""
        path = self.place.directory / METRICS_FILE
        with closing(MetricsFile(path)) as metrics, log_system_metrics(metrics.log_durably, self.place.gpu_uuids()):
            yield metrics.log

    # Evaluating

    def _whole(self, network: nn.Module) -> nn.Module:
        """A sharded network's weights gathered, for each rank evaluates other batches, and not as many as the next."""
        if self.spec.plan.strategy != "fsdp":
            return network
        channels_last = self.spec.plan.memory_format == "channels_last"
        return gather_full_weights(
            network, prepare_network(self.place.network, "32-true", channels_last, self.place.device)
        )

    def _folded(self, network: nn.Module) -> nn.Module:
        """For evaluation; eager, so that a compiled network has the one graph of its training steps."""
        plan, place = self.spec.plan, self.place
        return prepare_network(fold_batch_norm(network), plan.precision, place.evaluates_channels_last, place.device)

    def _validate(self, network: nn.Module) -> list[float]:
        """[samples, sums of the task's statistics] of the validation split, over all ranks; empty without one."""
        if not self.spec.prepared.num_validation:
            return []
        group.average_buffers(network)
        return self._counts(self._folded(self._whole(network)), "validation", self.spec.plan.precision)

    def _counts(self, network: nn.Module, split: Literal["validation", "test"], precision: Precision) -> list[float]:
        """[samples, sums of the task's statistics] of a split, over all ranks."""
        place = self.place
        batches = place.evaluation(open_split(self.spec.prepared, split))
        counts = count(network, batches, forward_context(precision, place.device), place.task, place.device)
        totals: list[float] = group.reduced(counts, "sum").tolist()
        return totals

    def _predict(self, network: nn.Module) -> tuple[str, float]:
        """Predict this rank's share of the test split; the file's path and the group's samples per second."""
        place, prepared = self.place, self.spec.prepared
        split = open_split(prepared, "test")
        context = forward_context(self.spec.plan.precision, place.device)
        warm_up(network, place.evaluation(split), context, place.task)
        started = time.perf_counter()
        arrays = predict(network, place.evaluation(split), context, place.task)
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=place.device)
        path = place.directory / "predictions.npz"
        save_predictions(path, arrays, place.task, len(prepared.target_names))
        if place.writes and arrays and isinstance(place.task, PixelTask):
            batch = place.samples(split, choose_examples(arrays))
            save_examples(path.with_name(EXAMPLES_FILE), network, batch, context, place.task)
        return str(path), split.num_samples / float(group.reduced(seconds, "max").item())

    def _plain_score(self, network: nn.Module) -> float:
        """On the test split, without anything that makes prediction faster."""
        num_samples, *totals = self._counts(network, "test", "32-true")
        return self.place.task.score(totals, num_samples)

    def _save_weights(self, network: nn.Module) -> str | None:
        if not self.place.writes:
            return None
        path = self.place.directory / "weights.pt"
        torch.save({name: tensor.cpu() for name, tensor in network.state_dict().items()}, path)
        return str(path)

    def _result(self, learner: Learner, course: StepSchedule) -> dict[str, Any]:
        plan, items = self.spec.plan, self.stopwatch.budget()
        steps = sum(items.get(name, 0.0) for name in STEP_ITEMS)
        waiting = items.get("data_wait", 0.0)
        num_steps = len(learner.losses)
        samples = course.samples(num_steps) - course.samples(course.first_step)
        begun = learner.epoch_ends[-2] if len(learner.epoch_ends) > 1 else 0
        return {
            "world_size": self.spec.world_size,
            "num_epochs": self.config.recipe.num_epochs,
            "num_steps": num_steps,
            "samples_per_epoch": self.place.train_split.num_samples,
            "samples_per_second": samples / (steps + waiting) if samples else None,
            "steps_per_epoch": course.steps_per_epoch,
            "final_loss": float(np.mean(learner.losses[begun:])),
            "resumed_from": self.spec.resume_from,
            "losses": learner.losses,
            "first_step": course.first_step,
            "validation_scores": learner.validation_scores,
            "score_name": self.place.task.score_name,
            "time_budget": items,
            "wall_seconds": sum(items.values()),
            "data_wait_fraction": waiting / (steps + waiting) if samples else None,
            "hosts": (socket.gethostname(),),
            "devices": (" ".join([plan.device_name, *self.spec.devices[self.spec.local_rank :][:1]]),),
        }


def _work(spec: RankSpec, stopwatch: Stopwatch, pulse: Heartbeat) -> TrainResult | MeasureResult | AutotuneResult:
    place = RankContext(spec)
    if spec.measurement is None:
        return Rank(place, stopwatch, pulse).run()
    return measure(place) if spec.measurement.arms else time_layers(ArmBenchmark(place), spec.plan)


def main(spec_path: str) -> int:
    """Run the rank of a spec; 0 when it has written its result."""
    gc.freeze()  # nor will later looks go through it again
    gc.enable()
    redact_logs()
    faulthandler.enable()  # a crash in a library's native code leaves the Python stack in the log
    die_with_supervisor()
    pulse = Heartbeat()
    stopwatch = Stopwatch("startup", float(os.environ.get("PACELINE_SPAWNED_AT", LOADED_AT)))
    spec = RankSpec.model_validate_json(Path(spec_path).read_text(encoding="utf-8"))
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    for engine in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(engine).setLevel(logging.WARNING)  # their greetings and advertisements
    warnings.filterwarnings("ignore", module="lightning")  # advice on DataLoader workers that we do not use
    try:
        result = _work(spec, stopwatch, pulse)
        write_atomically(directory / "result.json", result.model_dump_json())
    except BaseException as error:  # noqa: BLE001  whatever ends a rank is reported, with its traceback
        facts = {
            "rank": spec.rank,
            "message": redact(f"{type(error).__name__}: {error}"),
            "traceback": redact(traceback.format_exc()),
            "time": time.time(),
            "final": isinstance(error, PacelineError),
            "too_many": oom_sample_count(error),
            "oom_stage": error.stage if isinstance(error, MeasureMemoryError) else None,
        }
        pulse.final_error(facts)
        with suppress(OSError):  # the log's disk may be what is full
            print(facts["traceback"], file=sys.stderr)  # noqa: T201  the log of the rank
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    # Leave at once: the interpreter's own exit takes half a second with torch loaded, and after an error
    # a group's destructor may wait for peers that are gone.
    os._exit(status)
