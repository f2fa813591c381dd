"""A rank's part of a measurement: arms of a probe built from their descriptions, and the cost of an all-reduce.

Knows what an arm's steps are made of; when which arm runs is the probe's business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import torch
from torch import distributed

from paceline.conf.execution import Compression
from paceline.tasks.data.loading.loader import TrainLoader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.measure.probe import ArmRunner, StepRunner, Watch, run_probe
from paceline.tasks.measure.records import AllReduceTime, MeasureResult
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.batch import BatchSource, LabelledBatch
from paceline.tasks.records import Arm, ProbeResult
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.step.benchmark_step import BareStep, StepInputs

NUM_WARM_UP = 3
GRADIENT_BYTES: dict[Compression, int] = {"off": 4, "bf16": 2}
"""Of one parameter, in an exchange."""
LOAD_SECONDS = 1.0
MIN_LOAD_STEPS = 5
NUM_LOAD_ROUNDS = 2
"""The part of a step that does not grow with its samples makes a rank's speed depend on its share: even shares first,
then those that the speeds found on even shares lead to."""
ALIKE = 0.05
"""Ranks that differ by less share evenly: noise must not make the steps of like devices unlike."""
MIN_ALL_REDUCES = 10
MAX_ALL_REDUCES = 60
ALL_REDUCE_SHARE = 0.5
"""All messages together may take so much of the probe's time limit."""


class OneBatch:
    """Input that costs nothing: the same batch, already on the device, again and again.

    Args:
        loader: its first batch is taken.
    """

    def __init__(self, loader: BatchSource) -> None:
        self._num_steps = len(loader)
        loader.seek(0)
        batches = iter(loader)
        self._batch = next(batches)
        batches.close()  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Steps per epoch."""
        return self._num_steps

    def __iter__(self) -> Iterator[LabelledBatch]:
        """The one batch for an epoch."""
        for _ in range(self._num_steps):
            yield self._batch

    def seek(self, step: int) -> None:
        """Every step is alike."""


class ArmBenchmark:
    """Builds arms and measures them against each other.

    Args:
        place: of this rank; its network is copied by every arm, never changed.
    """

    def __init__(self, place: RankContext) -> None:
        self._place = place
        recipe = place.config.recipe
        self._inputs = StepInputs(place.network, place.task, recipe, recipe.learning_rate, place.device)

    @property
    def samples_per_device(self) -> int:
        """Of a batch of the training, their mean."""
        batches = self._place.batches
        return max(1, min(batches.global_batch_size, batches.num_samples) // batches.world_size)

    def probe(self, arms: Mapping[str, Arm], ready: Mapping[str, TrainLoader]) -> ProbeResult:
        """Measure arms in alternating blocks; the same result on every rank.

        Args:
            arms: by role; `baseline` and `candidate` among them.
            ready: loaders that exist already, by role; others are made and closed here.
        """
        settings = self._place.config.speedup
        with ExitStack() as stack:
            runners = {role: self.runner(stack, arm, ready.get(role)) for role, arm in arms.items()}
            return run_probe(runners, settings, group.agreed, self.watch)

    def all_reduces(self, arm: Arm, sizes: Sequence[int]) -> tuple[AllReduceTime, ...]:
        """Time all-reduces between training steps, as training has them: with cold caches and busy neighbours.

        Args:
            arm: over all ranks; its steps, without their exchange, fill the time between.
            sizes: of the messages, bytes.
        """
        if not sizes:
            return ()
        with ExitStack() as stack:
            steps = self.runner(stack, arm.model_copy(update={"variant": "no_sync"})).run
            steps(NUM_WARM_UP)
            affordable = ALL_REDUCE_SHARE * self._place.config.speedup.max_seconds / len(sizes)
            wanted = int(group.agreed(affordable / max(steps(1))))
            number = min(MAX_ALL_REDUCES, max(MIN_ALL_REDUCES, wanted))
            return tuple(_all_reduce(self._place, size, steps, number) for size in sizes)

    def speed(self, arm: Arm) -> float:
        """This rank's samples per second on its own share, while all compute and none waits for another.

        Args:
            arm: over all ranks.
        """
        place = self._place
        size = place.cut(arm.num_devices, arm.batch_size, arm.loads).sizes(0)[place.spec.rank]
        with ExitStack() as stack:
            steps = self.runner(stack, arm.model_copy(update={"variant": "no_sync"})).run
            steps(NUM_WARM_UP)
            group.agreed(0.0)  # all begin together
            times: list[float] = []
            started = time.perf_counter()
            while time.perf_counter() - started < LOAD_SECONDS or len(times) < MIN_LOAD_STEPS:
                times += steps(1)
        return size / statistics.median(times)

    def watch(self) -> Watch:
        """What looks at this host from now on."""
        place = self._place
        return ValidityWatch(place.own_processes(), gpu_uuids=place.gpu_uuids(), data_files=place.data_files())

    def runner(self, stack: ExitStack, arm: Arm, ready: TrainLoader | None = None) -> ArmRunner:
        """An arm that can be measured.

        Args:
            stack: lets go of it.
            arm: how to execute.
            ready: its loader, if there is one already.
        """
        place = self._place
        loads = arm.loads if arm.num_devices > 1 else None
        plan = place.batches if ready is not None else place.cut(arm.num_devices, arm.batch_size, loads)
        # Without a full batch there is one batch, of all samples.
        samples = plan.global_batch_size if plan.num_full_steps else plan.num_samples
        if arm.num_devices == 1 and not place.writes:
            return ArmRunner(arm, _no_part, samples)
        source = ready if ready is not None else self._source(stack, arm, plan)
        step = BareStep(self._inputs, arm, source, max(1, plan.num_full_steps))
        return ArmRunner(arm, self._on_threads(arm, stack.enter_context(closing(step)).run), samples)

    def _on_threads(self, arm: Arm, run: StepRunner) -> StepRunner:
        def steps(number: int) -> Sequence[float]:
            torch.set_num_threads(arm.num_threads or self._place.num_threads)
            try:
                return run(number)
            finally:
                torch.set_num_threads(self._place.spec.plan.num_threads)

        return steps

    def _source(self, stack: ExitStack, arm: Arm, plan: BatchPlan) -> BatchSource:
        rank = self._place.spec.rank if arm.num_devices > 1 else 0
        if arm.variant == "synthetic_input":
            with closing(self._place.loader(arm, plan, rank)) as loader:
                return OneBatch(loader)
        return stack.enter_context(closing(self._place.loader(arm, plan, rank)))


def diagnostic_arms(candidate: Arm, batch_size: int) -> dict[str, Arm]:
    """The further arms that show what limits a candidate: one of its devices, too, with its own batch.

    Args:
        candidate: the execution in question.
        batch_size: its samples per device and step.
    """
    change = candidate.model_copy
    arms = {"synthetic_input": change(update={"variant": "synthetic_input"})}
    if candidate.num_devices > 1:
        arms["no_sync"] = change(update={"variant": "no_sync"})
        arms["alone"] = change(update={"num_devices": 1, "batch_size": batch_size})
    if batch_size > 1:
        arms["half_batch"] = change(update={"batch_size": batch_size // 2})
    return arms


def measured_loads(place: RankContext, arm: Arm) -> tuple[float, ...] | None:
    """Speeds of the ranks in samples per second, to share batches by; the same on every rank. None for like ranks.

    Args:
        place: of this rank.
        arm: the execution to be trained.
    """
    bench = ArmBenchmark(place)
    loads: tuple[float, ...] | None = None
    for _ in range(NUM_LOAD_ROUNDS):
        loads = group.gathered(bench.speed(arm.model_copy(update={"loads": loads})))
        if max(loads) <= (1 + ALIKE) * min(loads):
            return None
    return loads


def measure(place: RankContext) -> MeasureResult:
    """Measure what the spec asks for, and train nothing."""
    spec = place.spec
    assert spec.measurement is not None
    bench = ArmBenchmark(place)
    probe = bench.probe(spec.measurement.arms, {})
    compression = spec.plan.gradient_compression
    parameters = [parameter for parameter in place.network.parameters() if parameter.requires_grad]
    return MeasureResult(
        probe=probe,
        all_reduces=bench.all_reduces(spec.measurement.arms["candidate"], spec.measurement.all_reduce_bytes),
        gradient_bytes=sum(parameter.numel() for parameter in parameters) * GRADIENT_BYTES[compression],
    )


def _all_reduce(place: RankContext, num_bytes: int, between: StepRunner, number: int) -> AllReduceTime:
    tensor = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=place.device)
    times = []
    for position in range(NUM_WARM_UP + number):
        between(1)
        distributed.barrier()  # waiting for the slowest is not the link's cost
        started = time.perf_counter()
        distributed.all_reduce(tensor)
        tensor /= place.spec.world_size
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        if position >= NUM_WARM_UP:
            times.append(time.perf_counter() - started)
    return AllReduceTime(
        num_bytes=tensor.numel() * 4,
        num_devices=place.spec.world_size,
        seconds=statistics.median(times),
        spread=_quartile_distance(times),
    )


def _quartile_distance(times: list[float]) -> float:
    first, _, third = statistics.quantiles(times, n=4)
    return third - first


def _no_part(num_steps: int) -> list[float]:
    """The part of a rank that sits an arm out."""
    return []
