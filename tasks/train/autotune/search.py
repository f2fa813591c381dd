"""Time executions in the ranks before a training, among those that `auto` leaves open.

Runs on copies of the training's network, in two parts:

1. The layers. Every combination of precision and memory format that is open, and half the threads, on one batch that is
   on the device already. It takes about two seconds and is done before every training, unless an earlier training has
   done it (`searches`): what a CPU says of itself decides nothing, as some have bf16 instructions that are slower than
   fp32.
2. The settings, in a training long enough to pay for it: each open setting changed alone, then the winners together,
   then compiling, in the training's own steps. At most a twentieth of the planned training time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from paceline.conf.config import Speedup
from paceline.tasks.errors import one_line
from paceline.tasks.host import has_compiler
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.records import Arm, AutotuneResult, Plan, ProbeResult, SlowArm, Validity
from paceline.tasks.train.autotune.choice import (
    LAYER_SETTINGS,
    best_role,
    chosen_arm,
    combined,
    roles_of,
    step_seconds,
    winning_roles,
)
from paceline.tasks.train.plan import arm_of, can_capture
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import NUM_WARM_UP, ArmBenchmark
from paceline.tasks.train.step.micro_batches import oom_sample_count

LAYER_SECONDS = 2.0
"""Least time for the layers; a training that is longer affords them `LAYER_SHARE` of its planned time."""
LAYER_SHARE = 0.01
MAX_LAYER_SECONDS = 20.0
LAYER_STEPS = 14
"""Steps that an arm of the layers costs: its first ones, its warm-up and the fewest rounds for an interval."""
FIRST_PART = 32
"""The layers' batch starts at this part of the training's, and grows to what the time affords."""
MIN_LAYER_BATCH = 4
SHARE = 0.05
"""Largest part of the planned training time for the settings."""
MAX_SECONDS = 120.0
STEPS_OF_AN_ARM = 40
"""Steps of the candidate that an arm costs: its first ones, its warm-up, the fewest blocks that tell anything."""
HOPELESS = 2.0
"""Times the candidate's step: an arm whose early steps take longer is left out."""
PROBE_SHARE = 0.6
"""Of the time that is left, for one probe; the next one has as much of the rest."""
COLD_COMPILE_SECONDS = 60.0
"""Assumed before compiling is tried; 14 to 46 s were measured on CPUs."""
AGAIN_FACTOR = 4.0
"""A search that may take so many times as long as the one before may find what that one could not."""
MAX_ROUNDS = 40
MAX_REASON = 300
"""Characters of a compiler's error."""
HALF_WIDTH = 0.01
"""Relative half-width of an interval at which a probe of a search stops."""


def alternatives(plan: Plan) -> dict[str, Arm]:
    """What could be better than the rules' arm, by the setting that is changed alone."""
    changes: dict[str, object] = {}
    if can_capture(plan):
        changes["compile"] = "graph"
    if plan.loading == "resident":
        changes["loading"] = "streaming"
    changes["memory_format"] = "contiguous" if plan.memory_format == "channels_last" else "channels_last"
    if plan.accelerator == "cpu" and plan.num_threads > 1:
        changes["num_threads"] = plan.num_threads // 2
    if plan.precision != "32-true":
        changes["precision"] = "32-true"
    return {
        name: arm_of(plan).model_copy(update={name: value}) for name, value in changes.items() if name in plan.reasons
    }


def layer_arms(plan: Plan) -> list[Arm]:
    """The combinations of precision and memory format that are open, the rules' own first; one where none is open.

    They run eagerly on one batch that is on the device: what compiling and loading cost is not theirs.
    """
    others = alternatives(plan)
    rules = arm_of(plan).model_copy(
        update={"variant": "synthetic_input", "loading": "foreground", "compile": "off"},
    )
    choices = [
        [getattr(arm, name) for arm in (rules, others.get(name)) if arm is not None]
        for name in ("precision", "memory_format")
    ]
    return [
        rules.model_copy(update={"precision": precision, "memory_format": memory_format})
        for precision, memory_format in itertools.product(*choices)
    ]


def autotune(bench: ArmBenchmark, plan: Plan, num_steps: int, known: AutotuneResult | None) -> AutotuneResult | None:
    """Time the layers, and the settings if the training is long enough for that; the same on every rank.

    Returns:
        What was found; None if nothing is open, or there is no time to find more than is known.
    """
    num_affordable = int(SHARE * num_steps / STEPS_OF_AN_ARM) - 1  # the rules' own arm is the first
    is_open = bool(alternatives(plan)) or "compile" in plan.reasons
    if plan.strategy == "fsdp" or not is_open or (known is not None and num_affordable < 1):
        return None
    hunt, watch = _AutotuneSession(bench, num_steps), bench.watch()
    if known is not None and hunt.budget_for_settings(arm_of(plan)) < AGAIN_FACTOR * known.budget_seconds:
        return None
    hunt.time_layers(plan)
    if num_affordable >= 1:
        hunt.time_settings(plan, num_affordable)
    return hunt.found(watch.stop())


def time_layers(bench: ArmBenchmark, plan: Plan) -> AutotuneResult:
    """Time the layers alone; the same on every rank."""
    hunt, watch = _AutotuneSession(bench, 0), bench.watch()
    hunt.time_layers(plan)
    return hunt.found(watch.stop())


@dataclass
class _AutotuneSession:
    """A search under way; every decision is rank 0's."""

    bench: ArmBenchmark
    num_steps: int
    started: float = field(default_factory=time.monotonic)
    step: float = 0.0
    """Seconds of a step of the arm that the others are compared with."""
    budget: float = 0.0
    """Seconds that the part under way may take; becomes less as better arms are found."""
    part_started: float = 0.0
    probes: list[ProbeResult] = field(default_factory=list)
    slower: list[SlowArm] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    compile_seconds: float = 0.0

    def time_layers(self, plan: Plan) -> None:
        """Compare the arms of the layers with each other, then the best of them with half its threads."""
        arms = layer_arms(plan)
        threads = alternatives(plan).get("num_threads")
        if len(arms) == 1 and threads is None:
            return
        arms = self._on_affordable_batch(arms)
        with ExitStack() as stack:
            rules = self.bench.runner(stack, arms[0])
            rules.run(NUM_WARM_UP)
            self.step = group.broadcast(min(rules.run(NUM_WARM_UP)))
            best = self.against(rules, {arm.label: arm for arm in arms[1:]})
        if threads is not None:
            self.again(best, {"num_threads": best.model_copy(update={"num_threads": threads.num_threads})})

    def _on_affordable_batch(self, arms: list[Arm]) -> list[Arm]:
        """The arms with the largest batch that the time for the layers affords; sets that time."""
        whole = self.bench.samples_per_device
        size = min(whole, max(MIN_LAYER_BATCH, whole // FIRST_PART))
        with ExitStack() as stack:
            first = self.bench.runner(stack, arms[0].model_copy(update={"batch_size": size}))
            first.run(1)
            per_sample = group.broadcast(min(first.run(2))) / size
        planned = per_sample * whole * self.num_steps
        seconds = min(MAX_LAYER_SECONDS, max(LAYER_SECONDS, LAYER_SHARE * planned))
        self._start_part(seconds)
        affordable = int(seconds / (LAYER_STEPS * max(2, len(arms))) / per_sample)
        if affordable >= whole:
            return arms
        return [arm.model_copy(update={"batch_size": max(size, affordable)}) for arm in arms]

    def budget_for_settings(self, best: Arm) -> float:
        """Seconds that the settings may take, counted in steps of the best arm that is known."""
        with ExitStack() as stack:
            runner = self.bench.runner(stack, best)
            runner.run(NUM_WARM_UP)
            self.step = group.broadcast(statistics.median(runner.run(NUM_WARM_UP)))
        return min(MAX_SECONDS, SHARE * self.num_steps * self.step)

    def time_settings(self, plan: Plan, num_affordable: int) -> None:
        """Compare the best arm that is known with each other setting, all that won, and the compiled step."""
        best = chosen_arm(tuple(self.probes), arm_of(plan), self.num_steps, self.compile_seconds)
        layers = {name: getattr(best, name) or getattr(plan, name) for name in LAYER_SETTINGS}
        others = {
            name: best.model_copy(update={name: getattr(arm, name)})
            for name, arm in alternatives(plan.model_copy(update=layers)).items()
        }
        self._start_part(self.budget_for_settings(best))
        num_before = len(self.probes)
        best = self.again(best, dict(list(others.items())[:num_affordable]))
        singly = self.probes[num_before:]
        if singly and len(winners := winning_roles(singly[0], 0.0, self.num_steps)) > 1:
            best = self.again(best, {"together": combined(singly[0], winners)})
        if "compile" in plan.reasons and self.can_compile():
            self.again(best, {"compile": best.model_copy(update={"compile": "step"})}, compiles=True)

    def again(self, best: Arm, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """As `against`, for a best arm that has no runner."""
        with ExitStack() as stack:
            return self.against(self.bench.runner(stack, best), others, compiles=compiles)

    def against(self, best: ArmRunner, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """Measure arms against the best one so far; the best one after that."""
        with ExitStack() as stack:
            ready: dict[str, ArmRunner] = {}
            for name, arm in others.items():
                runner = self._begun(stack, arm, best.arm, compiles=compiles) if self._left() > 0 else None
                if runner is not None:
                    ready[name if ready else "baseline"] = runner
            if not ready or self._left() <= 0:
                return best.arm
            settings = Speedup(
                max_seconds=PROBE_SHARE * self._left(), num_blocks=MAX_ROUNDS, target_half_width=HALF_WIDTH
            )
            probe = run_probe({"candidate": best} | ready, settings, group.broadcast)
        self.probes.append(probe)
        winner = best_role(probe, self.compile_seconds, self.num_steps)
        if winner is None:
            return best.arm
        if best.arm.variant == "full":
            self.budget = min(self.budget, SHARE * self.num_steps * step_seconds(probe, winner))
        return roles_of(probe)[winner]

    def _begun(self, stack: ExitStack, arm: Arm, candidate: Arm, *, compiles: bool) -> ArmRunner | None:
        """An arm whose first steps are done; None if they failed, or took too long for the others to be hopeful."""
        begun = self._tried(stack, arm)
        if begun is None:
            return None
        runner, first = begun
        if compiles:
            self.compile_seconds = first
        times = group.broadcast(min(runner.run(2), default=0.0)) / self.step
        if times <= HOPELESS:
            return runner
        self.slower.append(SlowArm(arm=arm, candidate=candidate, times=times))
        return None

    def _tried(self, stack: ExitStack, arm: Arm) -> tuple[ArmRunner, float] | None:
        """An arm after its first step, and that one's seconds; None where some rank's compiler refuses the network.

        Raises:
            Exception: what an arm raises that is not compiled.
        """
        begun, reason = None, ""
        try:
            runner = self.bench.runner(stack, arm)
            begun = runner, sum(runner.run(1))
        except Exception as error:
            if arm.compile == "off" or oom_sample_count(error) is not None:
                raise
            reason = one_line(error)[:MAX_REASON]
        if min(group.all_gather(float(begun is not None))) == 0:
            self.failed[arm.label] = reason or "another rank's compiler refused it"
            return None
        assert begun is not None
        return begun[0], group.broadcast(begun[1])

    def can_compile(self) -> bool:
        """Whether there is a compiler everywhere, and time enough for it."""
        return min(group.all_gather(float(has_compiler()))) > 0 and self._left() > COLD_COMPILE_SECONDS

    def found(self, validity: Validity) -> AutotuneResult:
        """What came out; contaminated on all ranks if it is on rank 0's host."""
        contaminated = bool(group.broadcast(float(validity.contaminated or False)))
        return AutotuneResult(
            probes=tuple(self.probes),
            slower=tuple(self.slower),
            failed=self.failed,
            compile_seconds=self.compile_seconds,
            budget_seconds=self.budget,
            seconds=group.broadcast(time.monotonic() - self.started),
            validity=validity.model_copy(update={"contaminated": contaminated}),
        )

    def _start_part(self, budget: float) -> None:
        self.budget, self.part_started = budget, time.monotonic()

    def _left(self) -> float:
        """Seconds of the budget."""
        return group.broadcast(self.budget - (time.monotonic() - self.part_started))
