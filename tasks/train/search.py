"""A short measured search for the execution to train with, among those that `auto` leaves open.

Runs in the ranks, before the training, on copies of its network: first every setting that could be another is changed
alone, then what won is taken together, then compiling is tried on the best. It is not begun where it would take more
than a twentieth of the planned training time, and ends when that is spent. What it found is kept for the next training
alike (`searches`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from conf.schema import Speedup
from tasks.errors import one_line
from tasks.host import has_compiler
from tasks.records import Arm, Plan, ProbeResult, Search, Validity
from tasks.speedup.choice import best_role, combined, roles_of, step_seconds, winning_roles
from tasks.speedup.probe import ArmRunner, run_probe
from tasks.train import group
from tasks.train.measure import NUM_WARM_UP, Bench
from tasks.train.passes import too_many
from tasks.train.plan import arm_of, can_capture

SHARE = 0.05
"""Of the planned training time."""
MAX_SECONDS = 120.0
STEPS_OF_AN_ARM = 40
"""Steps of the candidate that an arm costs: its first ones, its warm-up, the fewest blocks that tell anything."""
HOPELESS = 2.0
"""Times the candidate's step: an arm whose second step takes longer is left out."""
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


def alternatives(plan: Plan) -> dict[str, Arm]:
    """What could be better than the rules' arm, by the setting that is changed alone.

    Args:
        plan: by the rules; a setting without a reason was asked for, and stays.
    """
    changes: dict[str, object] = {
        "memory_format": "contiguous" if plan.memory_format == "channels_last" else "channels_last",
    }
    if plan.accelerator == "cpu" and plan.num_threads > 1:
        changes["num_threads"] = plan.num_threads // 2
    if can_capture(plan):
        changes["compile"] = "graph"
    if plan.precision != "32-true":
        changes["precision"] = "32-true"
    if plan.loading == "resident":
        changes["loading"] = "streaming"
    return {
        name: arm_of(plan).model_copy(update={name: value}) for name, value in changes.items() if name in plan.reasons
    }


def search(bench: Bench, plan: Plan, num_steps: int, known: Search | None) -> Search | None:
    """Time the alternatives, if the training is long enough for that; the same on every rank.

    Args:
        bench: of this rank.
        plan: by the rules.
        num_steps: that are to be trained.
        known: what an earlier search has found.

    Returns:
        What was found; None if there was nothing to search, or no time to find more than is known.
    """
    others = alternatives(plan)
    num_affordable = int(SHARE * num_steps / STEPS_OF_AN_ARM) - 1  # the rules' own arm is the first
    if plan.strategy == "fsdp" or num_affordable < 1 or not (others or "compile" in plan.reasons):
        return None
    started, watch = time.monotonic(), bench.watch()
    with ExitStack() as stack:
        rules = bench.runner(stack, arm_of(plan))
        rules.run(NUM_WARM_UP)
        step = group.agreed(statistics.median(rules.run(NUM_WARM_UP)))
        budget = min(MAX_SECONDS, SHARE * num_steps * step)
        if known is not None and budget < AGAIN_FACTOR * known.budget_seconds:
            return None
        hunt = _Hunt(bench, num_steps, step, budget, started)
        best = hunt.against(rules, dict(list(others.items())[:num_affordable]))
    if hunt.probes and len(winners := winning_roles(hunt.probes[0], 0.0, num_steps)) > 1:
        best = hunt.again(best, {"together": combined(hunt.probes[0], winners)})
    if "compile" in plan.reasons and hunt.can_compile():
        hunt.again(best, {"compile": best.model_copy(update={"compile": "step"})}, compiles=True)
    return hunt.found(watch.stop())


@dataclass
class _Hunt:
    """A search under way; every decision is rank 0's."""

    bench: Bench
    num_steps: int
    step: float
    """Seconds of the rules' arm."""
    budget: float
    """Seconds; becomes less as better arms are found."""
    started: float
    probes: list[ProbeResult] = field(default_factory=list)
    slower: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    compile_seconds: float = 0.0

    def again(self, best: Arm, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """As `against`, with the best arm so far made anew."""
        with ExitStack() as stack:
            return self.against(self.bench.runner(stack, best), others, compiles=compiles)

    def against(self, best: ArmRunner, others: Mapping[str, Arm], *, compiles: bool = False) -> Arm:
        """Measure arms against the best one so far; the best one after that."""
        with ExitStack() as stack:
            ready: dict[str, ArmRunner] = {}
            for name, arm in others.items():
                runner = self._begun(stack, arm, compiles=compiles) if self._left() > 0 else None
                if runner is not None:
                    ready[name if ready else "baseline"] = runner
            if not ready or self._left() <= 0:
                return best.arm
            settings = Speedup(
                max_seconds=PROBE_SHARE * self._left(), num_blocks=MAX_ROUNDS, target_half_width=HALF_WIDTH
            )
            probe = run_probe({"candidate": best} | ready, settings, group.agreed)
        self.probes.append(probe)
        winner = best_role(probe, self.compile_seconds, self.num_steps)
        if winner is None:
            return best.arm
        self.budget = min(self.budget, SHARE * self.num_steps * step_seconds(probe, winner))
        return roles_of(probe)[winner]

    def _begun(self, stack: ExitStack, arm: Arm, *, compiles: bool) -> ArmRunner | None:
        """An arm whose first steps are done; None if they failed, or took too long for the others to be hopeful."""
        begun = self._tried(stack, arm)
        if begun is None:
            return None
        runner, first = begun
        if compiles:
            self.compile_seconds = first
        times = group.agreed(sum(runner.run(1))) / self.step
        if times <= HOPELESS:
            return runner
        self.slower[arm.label] = times
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
            if arm.compile == "off" or too_many(error) is not None:
                raise
            reason = one_line(error)[:MAX_REASON]
        if min(group.gathered(float(begun is not None))) == 0:
            self.failed[arm.label] = reason or "another rank's compiler refused it"
            return None
        assert begun is not None
        return begun[0], group.agreed(begun[1])

    def can_compile(self) -> bool:
        """Whether there is a compiler everywhere, and time enough for it."""
        return min(group.gathered(float(has_compiler()))) > 0 and self._left() > COLD_COMPILE_SECONDS

    def found(self, validity: Validity) -> Search:
        """What came out; contaminated on all ranks if it is on rank 0's host."""
        contaminated = bool(group.agreed(float(validity.contaminated or False)))
        return Search(
            probes=tuple(self.probes),
            slower=self.slower,
            failed=self.failed,
            compile_seconds=self.compile_seconds,
            budget_seconds=self.budget,
            seconds=group.agreed(time.monotonic() - self.started),
            validity=validity.model_copy(update={"contaminated": contaminated}),
        )

    def _left(self) -> float:
        """Seconds of the budget."""
        return group.agreed(self.budget - (time.monotonic() - self.started))
