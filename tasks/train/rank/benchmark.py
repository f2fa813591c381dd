"""Benchmarks of a rank: the arms of a probe built from their descriptions, and the time of an all-reduce."""

import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from torch import distributed

from paceline.conf.execution import CAPTURED, Compression
from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.data.loading.resident import free_bytes
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.train_loader import TrainLoader
from paceline.tasks.errors import MeasureMemoryError
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.measure.probe import COMPETENT, ArmLostError, ArmRunner, StepRunner, run_probe
from paceline.tasks.measure.step_times import StepTimes
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.batch import Batch, BatchSource
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.model.threads import threads
from paceline.tasks.records.execution import COMPILE_LABELS, Arm, Variant, arithmetic_of, baseline_of, ladder_arms
from paceline.tasks.records.measurement import AllReduceTime, MeasureResult, ProbeResult
from paceline.tasks.train.autotune.choice import faster_plan, plan_of_probe
from paceline.tasks.train.competent.arm import CompetentLoop
from paceline.tasks.train.competent.process import is_wanted
from paceline.tasks.train.launch.layout import PROBE_FILE, STEPS_FILE
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.callbacks import write_atomically
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.benchmark_step import BareStep, StepInputs

NUM_WARM_UP = 3
MAX_SWITCHES = 2  # times that a probe may switch the execution: to another arithmetic, then to another loading
GRADIENT_BYTES: dict[Compression, int] = {"off": 4, "bf16": 2}  # bytes per parameter in an exchange of gradients
LOAD_SECONDS, MIN_LOAD_STEPS = 1.0, 5  # least of a measurement of a rank's speed
NUM_LOAD_ROUNDS = 2
"""The part of a step that does not grow with its samples makes a rank's speed depend on its share: even shares first,
then those that the speeds found on even shares lead to."""
MAX_LOAD_DIFFERENCE = 0.05
"""Ranks whose speeds differ by less get even shares: noise must not make the steps of equal devices unequal."""
MIN_ALL_REDUCES, MAX_ALL_REDUCES = 10, 60
BYTES_PER_WEIGHT = 16  # of a copy of the network with gradients and the state of Adam
LADDER_MEMORY_SHARE = 0.1  # largest share of the free memory for the copies of a ladder that nobody asked for
ALL_REDUCE_SHARE = 0.5  # largest part of the probe's time limit for all messages together


class OneBatch(list[Batch]):
    """Input without cost: the same batch, already on the device, in every step."""

    def __init__(self, loader: BatchSource) -> None:
        loader.seek(0)
        batches = iter(loader)
        super().__init__([next(batches)] * len(loader))
        batches.close()  # type: ignore[attr-defined]

    def seek(self, step: int) -> None:
        """Do nothing: all steps are the same."""

    def pause(self) -> None:
        """Do nothing: no batch is read."""


class ArmBenchmark:
    """Builds arms and measures them against each other."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._guest: Arm | None = None  # whose process shares the device: it is left out first where memory is wanting
        recipe = context.config.recipe
        self._inputs = StepInputs(context.network, context.task, recipe, recipe.learning_rate, context.device)
        reads_energy = context.writes and context.device.type == "cpu" and context.spec.num_nodes == 1
        self._joules = EnergyMeter().joules if reads_energy else lambda: None

    @property
    def samples_per_device(self) -> int:
        """Mean number of samples per device in a batch of the training."""
        batches = self._context.batches
        return max(1, min(batches.global_batch_size, batches.num_samples) // batches.world_size)

    def probe(self, arms: Mapping[str, Arm], ready: Mapping[str, TrainLoader]) -> ProbeResult:
        """Measure arms in alternating blocks, without those that cannot be executed; the same result on every rank."""
        settings, steps = self._context.config.speedup, StepTimes()
        left_out = self.left_out(arms)
        loop = None
        with ExitStack() as stack:
            if COMPETENT in arms and COMPETENT not in left_out:
                try:
                    loop = CompetentLoop(self._context, arms[COMPETENT], stack)
                    self._guest = arms[COMPETENT]
                except ArmLostError as error:
                    left_out[COMPETENT] = str(error)
            runners = {} if loop is None else {COMPETENT: loop.runner}
            own = {role: arm for role, arm in arms.items() if role not in (*left_out, COMPETENT)}
            runners |= {role: self.runner(stack, arm, ready.get(role)) for role, arm in own.items()}
            probe = run_probe(runners, settings, group.broadcast, self.watch, steps=steps)
        digest = steps.write(self._context.directory / STEPS_FILE) if self._context.writes else None
        costs = loop and loop.costs
        return probe.model_copy(update={"left_out": left_out | probe.left_out, "competent": costs, "steps": digest})

    def left_out(self, arms: Mapping[str, Arm]) -> dict[str, str]:
        """Arms that cannot be executed, as an earlier attempt has found, by role, and why."""
        spec, found = self._context.spec, dict[str, str]()
        for role, arm in arms.items():
            no_graph = spec.plan.failed_capture if arm.compile in CAPTURED else None
            if (reason := spec.left_out.get(arm.label, no_graph)) is not None:
                found[role] = reason
        return found

    def has_room_for_graphs(self) -> bool:
        """False after an earlier attempt lacked memory for an arm with a CUDA graph, which keeps what it needs."""
        return not any(COMPILE_LABELS["graph"] in label for label in self._context.spec.left_out)

    def all_reduces(self, arm: Arm, sizes: Sequence[int]) -> tuple[AllReduceTime, ...]:
        """Time all-reduces between training steps, as training has them: with cold caches and busy neighbours."""
        if not sizes:
            return ()
        with ExitStack() as stack:
            steps = self.runner(stack, arm.model_copy(update={"variant": "no_sync"})).run
            return time_all_reduces(steps, sizes, self._context.spec, self._context.device)

    def speed(self, arm: Arm) -> float:
        """This rank's samples per second on its own share, while all compute and none waits for another."""
        context = self._context
        size = context.cut(arm.num_devices, arm.batch_size, arm.loads).sizes(0)[context.spec.rank]
        with ExitStack() as stack:
            steps = self.runner(stack, arm.model_copy(update={"variant": "no_sync"})).run
            steps(NUM_WARM_UP)
            group.broadcast(0.0)  # all begin together
            times: list[float] = []
            started = time.perf_counter()
            while time.perf_counter() - started < LOAD_SECONDS or len(times) < MIN_LOAD_STEPS:
                times += steps(1)
        return size / statistics.median(times)

    def watch(self) -> ValidityWatch:
        """Watch this host for contamination from now on."""
        context = self._context
        shards = sorted((Path(context.prepared.path) / "train").glob("*.npy"))  # that the training reads
        return ValidityWatch(context.own_processes(), gpu_uuids=context.gpu_uuids(), data_files=shards)

    def runner(self, stack: ExitStack, arm: Arm, ready: TrainLoader | None = None) -> ArmRunner:
        """An arm that can be measured."""
        context = self._context
        loads = arm.loads if arm.num_devices > 1 else None
        plan = context.batches if ready is not None else context.cut(arm.num_devices, arm.batch_size, loads)
        # Without a full batch there is one batch, of all samples.
        samples = plan.global_batch_size if plan.num_full_steps else plan.num_samples
        if arm.num_devices == 1 and not context.writes:
            return ArmRunner(arm, lambda num_steps: [], samples)  # this rank takes no part in the arm
        with name_oom((self._guest or arm).label):
            source = ready if ready is not None else self._source(stack, arm, plan)
            step = BareStep(self._inputs, arm, source, max(1, plan.num_full_steps))
        stack.enter_context(closing(step))

        def run(number: int) -> Sequence[float]:
            in_use = threads(arm.num_threads or context.num_threads, then=context.spec.plan.num_threads)
            with in_use, name_oom((self._guest or arm).label):
                try:
                    return step.run(number)
                finally:
                    source.pause()

        arithmetic = arithmetic_of(arm.precision, context.spec.plan.accelerator)
        gather = group.all_gather if arm.variant == "no_sync" and arm.num_devices > 1 else None
        return ArmRunner(arm, run, samples, step.has_diverged, arithmetic, gather, self._joules)

    def _source(self, stack: ExitStack, arm: Arm, plan: BatchPlan) -> BatchSource:
        loader = self._context.loader(arm, plan, self._context.spec.rank if arm.num_devices > 1 else 0)
        if arm.variant != "synthetic_input":
            return stack.enter_context(closing(loader))
        with closing(loader):
            return OneBatch(loader)


@contextmanager
def name_oom(what: str, stage: str | None = None) -> Iterator[None]:
    """Raise an out-of-memory error as MeasureMemoryError, so that the next attempt leaves out what did not fit.

    Without a stage, `what` is the label of an arm.
    """
    try:
        yield
    except Exception as error:
        known = error if isinstance(error, MeasureMemoryError) else None
        if not is_out_of_memory(error) or (known is not None and known.stage is not None):
            raise
        label = what if stage is None else None
        raise MeasureMemoryError(f"{what}: {error}", stage, (known and known.arm) or label) from error


def arms_of_one_rank(arm: Arm, num_threads: int, num_nodes: int, device: torch.device) -> dict[str, Arm]:
    """Arms of one rank for an arm of several, the same on all ranks; `num_threads` are those of each rank.

    `single` keeps them. `all_cores`, on one host's CPU with enough cores, has the threads of all ranks.
    """
    single = arm.model_copy(update={"num_devices": 1})
    num_all = num_threads * arm.num_devices
    fits = device.type == "cpu" and num_nodes == 1 and num_all <= usable_cores()
    if not group.broadcast(float(fits)):  # ranks may be bound to nodes of different size
        return {"single": single}
    return {"single": single, "all_cores": single.model_copy(update={"num_threads": num_all})}


def diagnostic_arms(candidate: Arm, batch_size: int) -> dict[str, Arm]:
    """The further arms that show what limits a candidate: one of its devices, too, with its own batch."""
    change = candidate.model_copy
    arms = {name: change(update={"variant": name}) for name in ("synthetic_input", "no_update")}
    apart: Variant = "full"
    if candidate.num_devices > 1:
        apart = "no_sync"
        arms["no_sync"] = change(update={"variant": apart})
        arms["alone"] = change(update={"num_devices": 1, "batch_size": batch_size})
    if batch_size > 1:  # a rank that waits for a slower one would show the slower one's
        arms["half_batch"] = change(update={"batch_size": batch_size // 2, "variant": apart})
    return arms


def measure_rank_loads(context: RankContext) -> tuple[float, ...] | None:
    """Measure the ranks' samples per second, to share batches by; the same on every rank. None for equal ranks."""
    bench, arm = ArmBenchmark(context), context.candidate_arm()
    loads: tuple[float, ...] | None = None
    for _ in range(NUM_LOAD_ROUNDS):
        loads = group.all_gather(bench.speed(arm.model_copy(update={"loads": loads})))
        if max(loads) <= (1 + MAX_LOAD_DIFFERENCE) * min(loads):
            return None
    return loads


def probe_execution(context: RankContext) -> tuple[TrainLoader, ProbeResult | None]:
    """Probe the plan's execution against the baseline; switch to another where the probe finds that one faster.

    Returns the training's loader, and the probe; None where the configuration asks for none.
    """
    spec = context.spec
    if spec.probe is not None:
        context.execute(plan_of_probe(spec.plan, context.candidate_arm(), spec.probe))
        return _training_loader(context), spec.probe
    for num_switches_left in range(MAX_SWITCHES, -1, -1):
        arm = context.candidate_arm()
        with ExitStack() as stack:
            loader = stack.enter_context(closing(_training_loader(context)))
            probe = _probe_candidate(context, arm, loader) if context.config.speedup.baseline == "probe" else None
            better = faster_plan(context.spec.plan, probe) if probe is not None and num_switches_left else None
            if better is None:
                stack.pop_all()
                return loader, probe
        context.execute(better)
    raise AssertionError("the last round returns")


def _training_loader(context: RankContext) -> TrainLoader:
    arm = context.candidate_arm()
    with name_oom(f"{arm.loading} loading", "loading"):
        return context.loader(arm, context.batches, context.spec.rank)


def _probe_candidate(context: RankContext, arm: Arm, loader: TrainLoader) -> ProbeResult | None:
    """Probe an arm against the baseline, without arms that do not fit into memory; None where one of the two is."""
    arms = {"baseline": baseline_of(arm), "candidate": arm}
    if arm.num_devices > 1:
        arms |= arms_of_one_rank(arm, context.num_threads, context.spec.num_nodes, context.device)
    if is_wanted(context.config.speedup):
        arms[COMPETENT] = arm.model_copy(update={"variant": "competent", "num_threads": None})
    if arm.compile != "off":
        arms["uncompiled"] = arm.model_copy(update={"compile": "off"})  # whether compiling pays
    if context.config.speedup.diagnose:
        batch_size = max(1, context.batches.global_batch_size // arm.num_devices)
        arms |= diagnostic_arms(arm, batch_size)
        if batch_size == context.config.batch_size_over(1):  # weak scaling: the same as the arm `single`
            arms.pop("alone", None)
    there = set(arms.values())
    ladder = {role: one for role, one in ladder_arms(arms["baseline"], arm).items() if one not in there}
    if _wants_ladder(context, len(ladder)):
        arms |= ladder
    bench = ArmBenchmark(context)
    left_out = bench.left_out(arms)
    context.no_probe = left_out.get("baseline", left_out.get("candidate"))
    if context.no_probe is not None:
        return None
    probe = bench.probe(arms, {"candidate": loader})
    if context.writes:
        write_atomically(context.directory / PROBE_FILE, probe.model_dump_json())
    return probe


def _wants_ladder(context: RankContext, num_arms: int) -> bool:
    """Whether to measure each combination of factors: with `auto` in a diagnosis, where the networks are small."""
    settings = context.config.speedup
    if settings.factors != "auto":
        return settings.factors == "ladder"
    num_bytes = num_arms * BYTES_PER_WEIGHT * sum(weights.numel() for weights in context.network.parameters())
    fits = num_bytes <= LADDER_MEMORY_SHARE * free_bytes(context.device)
    return settings.diagnose and bool(group.broadcast(float(fits)))


def measure(context: RankContext) -> MeasureResult:
    """Measure what the spec asks for, without training."""
    spec = context.spec
    assert spec.measurement is not None
    bench = ArmBenchmark(context)
    num_trained = sum(weights.numel() for weights in context.network.parameters() if weights.requires_grad)
    return MeasureResult(
        probe=bench.probe(spec.measurement.arms, {}),
        all_reduces=bench.all_reduces(spec.measurement.arms["candidate"], spec.measurement.all_reduce_bytes),
        gradient_bytes=num_trained * GRADIENT_BYTES[spec.plan.gradient_compression],
        host=socket.gethostname(),
    )


def time_all_reduces(
    steps: StepRunner, sizes: Sequence[int], spec: RankSpec, device: torch.device
) -> tuple[AllReduceTime, ...]:
    """Time all-reduces of these sizes, in bytes, between steps in which no rank waits for another; collective."""
    steps(NUM_WARM_UP)
    affordable = ALL_REDUCE_SHARE * spec.config.speedup.max_seconds / len(sizes)
    num_affordable = int(group.broadcast(affordable / max(steps(1))))
    number = min(MAX_ALL_REDUCES, max(MIN_ALL_REDUCES, num_affordable))
    return tuple(_all_reduce(size, steps, number, spec.world_size, device) for size in sizes)


def _all_reduce(
    num_bytes: int, between: StepRunner, number: int, world_size: int, device: torch.device
) -> AllReduceTime:
    tensor = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    times = []
    for position in range(NUM_WARM_UP + number):
        between(1)
        distributed.barrier()  # waiting for the slowest is not the link's cost
        started = time.perf_counter()
        distributed.all_reduce(tensor)
        tensor /= world_size
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if position >= NUM_WARM_UP:
            times.append(time.perf_counter() - started)
    first_quartile, _, third_quartile = statistics.quantiles(times, n=4)
    return AllReduceTime(
        num_bytes=tensor.numel() * 4,
        num_devices=world_size,
        seconds=statistics.median(times),
        spread=third_quartile - first_quartile,
    )
