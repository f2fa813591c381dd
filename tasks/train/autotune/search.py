"""Autotuning: times the executions that `auto` leaves open, in the ranks, before a training.

Runs on copies of the training's network, in two parts:

1. The layers: every open combination of precision and memory format, and half the threads, on one batch that is on the
   device already. About two seconds before every training without a cached result. A CPU's feature flags do not
   decide: on some CPUs, bf16 instructions are slower than fp32. Where the training's step is a CUDA graph, so is that
   of the layers: launched one by one, the kernels of small networks show the host's pace and not the device's.
2. The settings, in a training long enough to pay for it: each open setting changed alone, then the winners together,
   then precisions again in a CUDA graph, then compiling, in the training's own steps. At most a twentieth of the
   planned training time.

Of a user's module only precision and compilation are timed, in trainers made for this, for 5 % of the training, at
least 2 s and at most 120 s; starting an arm does not count, except compiling.

On GPUs the start of an arm holds the runs in which cuDNN's benchmark mode chooses its algorithms, and the recording of
a graph. Of the layers it counts for no limit but `MAX_LAYER_SECONDS` over all arms.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from torch import distributed

from paceline.conf.config import Speedup
from paceline.conf.execution import CAPTURED, Precision
from paceline.tasks.errors import one_line
from paceline.tasks.host import has_compiler
from paceline.tasks.measure.probe import ArmLostError, ArmRunner, run_probe
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.measurement import AutotuneResult, ProbeResult, SlowArm, Validity
from paceline.tasks.train.autotune import choice
from paceline.tasks.train.autotune.choice import ARITHMETIC, LAYER_SETTINGS, changes_between
from paceline.tasks.train.plan import arm_of, can_capture
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import NUM_WARM_UP, ArmBenchmark
from paceline.tasks.train.step.cuda_graph import capture_error

LAYER_SECONDS = 2.0  # least time for the layers; in a longer training, `LAYER_SHARE` of its planned time
LAYER_SHARE = 0.01
MAX_LAYER_SECONDS = 20.0
LAYER_STEPS = 14  # steps per arm of the layers: first steps, warm-up and the fewest rounds for an interval
FIRST_PART = 32  # the layers' batch starts at this part of the training's, and grows as the time allows
MIN_LAYER_BATCH = 4
SHARE = 0.05  # largest part of the planned training time for the settings
MAX_SECONDS = 120.0
STEPS_OF_AN_ARM = 40  # steps of the candidate per arm: first steps, warm-up and the fewest blocks for an interval
MAX_STEP_RATIO = 2.0  # an arm whose first steps take more than this times the candidate's step is not measured
PROBE_SHARE = 0.6  # part of the remaining time for one probe
COLD_COMPILE_SECONDS = 60.0  # assumed before the first compilation; 14 to 46 s were measured on CPUs
AGAIN_FACTOR = 4.0  # a search with this many times the budget of the earlier one is worth repeating
MAX_ROUNDS = 24
MAX_REASON = 300  # characters of a compiler's error
HALF_WIDTH = 0.01  # relative half-width of an interval at which a probe of a search stops


MODULE_SETTINGS = ("precision", "compile")  # that a search can choose for a user's module


class Benchmark(Protocol):
    """Builds the arms of a search; of a preset's network or of a user's module."""

    def runner(self, stack: ExitStack, arm: Arm) -> ArmRunner:
        """An arm that can be measured."""

    def left_out(self, arms: Mapping[str, Arm]) -> dict[str, str]:
        """Arms that cannot be executed, as an earlier attempt has found, by role, and why."""

    def watch(self) -> ValidityWatch:
        """Watch this host for contamination from now on."""


def other_precisions(plan: Plan) -> tuple[Precision, ...]:
    """Precisions that could be faster than the plan's where it is open, the likeliest first."""
    # fp16 is none of them: its scaler skips steps and so changes what is learned, and a GPU that has bf16 computes it
    # as fast. Older GPUs, which lack bf16 and TF32, have fp16 by their rule. TF32 loses less than either.
    if "precision" not in plan.reasons or plan.precision == "32-true":
        return ()
    has_tf32 = plan.accelerator == "gpu" and plan.precision == "bf16-mixed"
    return ("tf32", "32-true") if has_tf32 else ("32-true",)


def alternatives(plan: Plan) -> dict[str, Arm]:
    """Arms that could be faster than the rules' arm, each by one setting that differs."""
    changes: dict[str, object] = {}
    if can_capture(plan) and plan.compile not in CAPTURED and plan.world_size == 1:  # as in `resolve`
        changes["compile"] = "graph"
    if plan.loading == "resident":
        changes["loading"] = "streaming"
    changes["memory_format"] = "contiguous" if plan.memory_format == "channels_last" else "channels_last"
    if plan.accelerator == "cpu" and plan.num_threads > 1:
        changes["num_threads"] = plan.num_threads // 2
    change = arm_of(plan).model_copy
    arms = {name: change(update={name: value}) for name, value in changes.items() if name in plan.reasons}
    return arms | {f"precision {value}": change(update={"precision": value}) for value in other_precisions(plan)}


def layer_arms(plan: Plan) -> list[Arm]:
    """The open combinations of precision and memory format, the rules' first; not compiled, one batch on the device."""
    changes = {"compile": "graph" if plan.compile in CAPTURED else "off"}
    rules = arm_of(plan).model_copy(update={"variant": "synthetic_input", "loading": "foreground"} | changes)
    formats = [plan.memory_format]
    if "memory_format" in plan.reasons:
        formats.append(alternatives(plan)["memory_format"].memory_format)
    precisions = (plan.precision, *other_precisions(plan))
    pairs = itertools.product(precisions, formats)
    return [rules.model_copy(update={"precision": precision, "memory_format": form}) for precision, form in pairs]


def autotune(bench: ArmBenchmark, plan: Plan, num_steps: int, earlier: AutotuneResult | None) -> AutotuneResult | None:
    """Time the layers, and the settings if the training is long enough for that; the same on every rank.

    Returns None if no setting is open, or the time does not allow more than the `earlier` search.
    """
    num_affordable = int(SHARE * num_steps / STEPS_OF_AN_ARM) - 1  # one is for the rules' arm
    is_open = bool(alternatives(plan)) or "compile" in plan.reasons
    if plan.strategy == "fsdp" or not is_open or (earlier is not None and num_affordable < 1):
        return None
    session = _AutotuneSession(bench, num_steps, failed_capture=plan.failed_capture)
    watch = bench.watch()
    if earlier is not None and session.budget_for_settings(arm_of(plan)) < AGAIN_FACTOR * earlier.budget_seconds:
        return None
    session.time_layers(bench, plan)
    if num_affordable >= 1:
        session.time_settings(plan, num_affordable)
    return session.result(watch.stop())


def time_layers(bench: ArmBenchmark, plan: Plan) -> AutotuneResult:
    """Time the layers alone; the same on every rank."""
    session, watch = _AutotuneSession(bench, 0, failed_capture=plan.failed_capture), bench.watch()
    session.time_layers(bench, plan)
    return session.result(watch.stop())


def autotune_module(bench: Benchmark, plan: Plan, planned_steps: Callable[[], int]) -> AutotuneResult | None:
    """Time the open precisions, and the compiled step, in the steps of a user's module; the same on every rank.

    `planned_steps` is the length of the training, known once an arm has read the loader. Returns None if the module
    does not run at all: its training says why.
    """
    session, watch = _AutotuneSession(bench, 0), bench.watch()
    try:
        session.time_module(plan, planned_steps)
    except ArmLostError:
        watch.stop()
        return None
    return session.result(watch.stop())


@dataclass
class _AutotuneSession:
    """The state of a search; rank 0 makes every decision."""

    bench: Benchmark
    num_steps: int
    started: float = field(default_factory=time.monotonic)
    step: float = 0.0  # seconds per step of the arm with which the others are compared
    budget: float = 0.0  # seconds for the current part; shrinks with faster arms
    part_started: float = 0.0
    probes: list[ProbeResult] = field(default_factory=list)
    slower: list[SlowArm] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failed_capture: str | None = None  # why an earlier attempt could record no CUDA graph
    compile_seconds: float = 0.0
    uncounted: float = 0.0  # seconds of starts of layers on a GPU
    counts_starts: bool = True  # whether the budget counts the starts of arms; of a user's module it does not

    def time_layers(self, bench: ArmBenchmark, plan: Plan) -> None:
        """Compare the arms of the layers with each other, then the best of them with half its threads."""
        arms = layer_arms(plan)
        threads = alternatives(plan).get("num_threads")
        if len(arms) == 1 and threads is None:
            return
        arms = self._on_affordable_batch(bench, arms)
        if not bench.has_room_for_graphs():
            arms = [arm.model_copy(update={"compile": "off"}) for arm in arms]
        with ExitStack() as stack:
            rules, _ = self._start(stack, arms[0])
            rules.run(NUM_WARM_UP)
            self.step = group.broadcast(min(rules.run(NUM_WARM_UP)))
            best = self.against(rules, {arm.label: arm for arm in arms[1:]})
        if threads is not None:
            self.again(best, {"num_threads": best.model_copy(update={"num_threads": threads.num_threads})})

    def _on_affordable_batch(self, bench: ArmBenchmark, arms: list[Arm]) -> list[Arm]:
        """Start the part of the layers; return the arms with the largest batch that its time allows."""
        full_size = bench.samples_per_device
        size = min(full_size, max(MIN_LAYER_BATCH, full_size // FIRST_PART))
        with ExitStack() as stack:
            first = bench.runner(stack, arms[0].model_copy(update={"batch_size": size}))
            first.run(1)
            per_sample = group.broadcast(min(first.run(2))) / size
        planned = per_sample * full_size * self.num_steps
        seconds = min(MAX_LAYER_SECONDS, max(LAYER_SECONDS, LAYER_SHARE * planned))
        self.budget, self.part_started = seconds, time.monotonic()
        affordable = int(seconds / (LAYER_STEPS * max(2, len(arms))) / per_sample)
        if affordable >= full_size:
            return arms
        return [arm.model_copy(update={"batch_size": max(size, affordable)}) for arm in arms]

    def budget_for_settings(self, best: Arm) -> float:
        """Seconds for the settings, by the step time of the best arm so far."""
        self._time_step(best)
        return min(MAX_SECONDS, SHARE * self.num_steps * self.step)

    def _time_step(self, arm: Arm) -> None:
        with ExitStack() as stack:
            runner = self.bench.runner(stack, arm)
            runner.run(NUM_WARM_UP)
            self.step = group.broadcast(statistics.median(runner.run(NUM_WARM_UP)))

    def time_settings(self, plan: Plan, num_affordable: int) -> None:
        """Compare the best arm so far with each open setting, then with all winners, then with the compiled step."""
        best = choice.chosen_arm(self.probes, arm_of(plan), self.num_steps, self.compile_seconds)
        layers = {name: getattr(best, name) or getattr(plan, name) for name in LAYER_SETTINGS}
        fastest = plan.model_copy(update=layers)
        changes = {name: changes_between(arm_of(fastest), arm) for name, arm in alternatives(fastest).items()}
        candidates = {name: best.model_copy(update=change) for name, change in changes.items()}
        self.budget, self.part_started = self.budget_for_settings(best), time.monotonic()
        num_before = len(self.probes)
        best = self.again(best, dict(list(candidates.items())[:num_affordable]))
        singly = self.probes[num_before:]
        if singly and len(winners := choice.winning_roles(singly[0], 0.0, self.num_steps)) > 1:
            best = self.again(best, {"together": choice.combine_roles(singly[0], winners)})
        if best.compile in CAPTURED and plan.compile not in CAPTURED:
            layers_again = [
                best.model_copy(update={name: getattr(arm, name) for name in ARITHMETIC})
                for arm in layer_arms(plan)
                if can_capture(plan.model_copy(update={"precision": arm.precision}))
            ]
            eager = {arm.label: arm for arm in layers_again if arm != best}
            best = self.again(best, dict(list(eager.items())[:num_affordable]))
        self._time_compiled(plan, best)

    def time_module(self, plan: Plan, planned_steps: Callable[[], int]) -> None:
        """Compare the arm of the rules with the other precisions, then the best of them with the compiled step.

        Raises ArmLostError: the module runs neither in the precision of the rules nor in 32-true.
        """
        best = arm_of(plan)
        if self.bench.left_out({"": best}):  # out of memory next to another arm; alone it may fit
            return
        self.counts_starts = False
        try:
            self._time_step(best)
        except ArmLostError as error:
            self.failed[best.label] = str(error)[:MAX_REASON]
            plan = choice.without_failed_precision(plan, self.failed)
            best = arm_of(plan)
            self._time_step(best)
        self.num_steps = int(group.broadcast(planned_steps()))
        planned = SHARE * self.num_steps * self.step
        self.budget, self.part_started = min(MAX_SECONDS, max(LAYER_SECONDS, planned)), time.monotonic()
        others = [value for value in other_precisions(plan) if value != "tf32"]  # a global flag that the module may set
        best = self.again(best, {value: best.model_copy(update={"precision": value}) for value in others})
        self._time_compiled(plan, best)

    def _time_compiled(self, plan: Plan, best: Arm) -> None:
        """Compare the best arm so far with its compiled step, where there is time to compile."""
        if "compile" not in plan.reasons or plan.activation_checkpointing:
            return
        all_have_compilers = min(group.all_gather(float(has_compiler()))) > 0
        if all_have_compilers and self._seconds_left() > COLD_COMPILE_SECONDS:
            mode = "step_graph" if best.compile in CAPTURED else "step"
            self.again(best, {"compile": best.model_copy(update={"compile": mode})}, compiles=True)

    def again(self, best: Arm, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """Do `against` with a new runner for the best arm."""
        if not others:
            return best
        with ExitStack() as stack:
            started = time.monotonic()
            runner = self.bench.runner(stack, best)
            if not self.counts_starts:
                self.part_started += time.monotonic() - started
            return self.against(runner, others, compiles=compiles)

    def against(self, best: ArmRunner, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """Measure arms against the best one so far, and return the best of all."""
        with ExitStack() as stack:
            ready: dict[str, ArmRunner] = {}
            for name, arm in others.items():
                runner = self._start_arm(stack, arm, best.arm, compiles=compiles) if self._seconds_left() > 0 else None
                if runner is not None:
                    ready[name if ready else "baseline"] = runner
            if not ready or self._seconds_left() <= 0:
                return best.arm
            seconds = PROBE_SHARE * self._seconds_left()
            settings = Speedup(max_seconds=seconds, num_blocks=MAX_ROUNDS, target_half_width=HALF_WIDTH)
            try:
                probe = run_probe({"candidate": best} | ready, settings, group.broadcast)
            except ArmLostError as error:
                self.failed |= {runner.arm.label: str(error)[:MAX_REASON] for runner in ready.values()}
                return best.arm
        self.probes.append(probe)
        winner = choice.best_role(probe, self.compile_seconds, self.num_steps)
        if winner is None:
            return best.arm
        if best.arm.variant == "full":
            self.budget = min(self.budget, SHARE * self.num_steps * choice.step_seconds(probe, winner))
        return choice.roles_of(probe)[winner]

    def _start_arm(self, stack: ExitStack, arm: Arm, candidate: Arm, *, compiles: bool) -> ArmRunner | None:
        """Run first steps of an arm; None if it does not fit, fails to compile, or is far slower than `candidate`."""
        if left_out := self.bench.left_out({"": arm}):
            self.failed[arm.label] = left_out[""][:MAX_REASON]
            return None
        runner, seconds, reason = None, 0.0, ""
        try:
            with ExitStack() as of_arm:
                built, seconds = self._start(of_arm, arm)
                stack.push(of_arm.pop_all())
                runner = built
        except Exception as error:
            # Want of memory is raised where other ranks wait for this one, or a CUDA graph was being recorded: then the
            # group must restart without the arm.
            is_alone = not distributed.is_initialized() and arm.compile not in CAPTURED
            may_go_on = is_alone if is_out_of_memory(error) else arm.compile != "off"
            may_go_on |= isinstance(error, ArmLostError)  # on all ranks
            if capture_error(error) is not None or not may_go_on:
                raise
            reason = one_line(error)[:MAX_REASON]
        if min(group.all_gather(float(runner is not None))) == 0:
            self.failed[arm.label] = reason or "the compiler of another rank failed"
            return None
        assert runner is not None
        seconds = group.broadcast(seconds)
        if compiles:
            self.compile_seconds = seconds
        elif not self.counts_starts:
            self.part_started += seconds
        try:
            steps = runner.run(2)
        except ArmLostError as error:
            self.failed[arm.label] = str(error)[:MAX_REASON]
            return None
        times = group.broadcast(min(steps, default=0.0)) / self.step
        if times <= MAX_STEP_RATIO:
            return runner
        self.slower.append(SlowArm(arm=arm, candidate=candidate, times=times))
        return None

    def _start(self, stack: ExitStack, arm: Arm) -> tuple[ArmRunner, float]:
        """Build an arm and run its first step; the seconds of both. Of layers on a GPU the budget does not count them.

        A graph is recorded while its arm is built.
        """
        started = time.monotonic()
        runner = self.bench.runner(stack, arm)
        seconds = time.monotonic() - started + sum(runner.run(1))
        if runner.arithmetic is not None and runner.arm.variant == "synthetic_input":
            uncounted = min(seconds, MAX_LAYER_SECONDS - self.uncounted)
            self.uncounted += uncounted
            self.part_started += uncounted
        return runner, seconds

    def result(self, validity: Validity) -> AutotuneResult:
        """The result; contaminated on all ranks if it is on rank 0's host."""
        contaminated = bool(group.broadcast(float(validity.contaminated or False)))
        return AutotuneResult(
            num_steps=self.num_steps,
            probes=tuple(self.probes),
            slower=tuple(self.slower),
            failed=self.failed,
            failed_capture=self.failed_capture,
            compile_seconds=self.compile_seconds,
            budget_seconds=self.budget,
            seconds=group.broadcast(time.monotonic() - self.started),
            validity=validity.model_copy(update={"contaminated": contaminated}),
        )

    def _seconds_left(self) -> float:
        return group.broadcast(self.budget - (time.monotonic() - self.part_started))
