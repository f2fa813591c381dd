"""From the times of a search to the execution that is trained, and why. Pure; knows nothing of torch or devices.

An execution replaces the best one known before it only when it is faster beyond doubt and by more than a trifle:
a search among several arms would else choose the luckiest. One that is compiled must win back, over the steps that are
to be trained, what its compiling takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from tasks.records import Arm, Choice, Plan, ProbeResult, Search
from tasks.speedup.statistics import Estimate, arm_ratio

MIN_GAIN = 0.01
"""Of the throughput. Below it an execution is not worth departing from the rules, which hold from run to run."""
SEARCHED = ("precision", "memory_format", "loading", "num_threads", "compile")
"""Settings that can be searched for."""


def choose(plan: Plan, search: Search, rules: Arm, num_steps: int) -> Plan:
    """The plan with the best execution that a search has found, each changed or confirmed setting with its reason.

    What was timed on a contaminated machine changes nothing.

    Args:
        plan: by the rules.
        search: for the same work on the same hardware.
        rules: the plan's arm.
        num_steps: to be trained.
    """
    if search.validity.contaminated:
        return plan
    best = rules
    for probe in search.probes:
        if probe.candidate == best:
            winner = best_role(probe, search.compile_seconds, num_steps)
            best = roles_of(probe)[winner] if winner else best
    changes = _changes(rules, best)
    reasons = dict(plan.reasons)
    for name in SEARCHED:
        timed = [*_timed(search, name, getattr(plan, name))][-1:]  # against the best of the others
        if name in changes:
            reason = f"timed before training: {''.join(timed) or 'with other settings, ' + best.label}"
            reasons[name] = Choice(value=changes[name], reason=reason)
        elif timed and name in reasons:
            reasons[name] = Choice(value=reasons[name].value, reason=f"{reasons[name].reason}; timed: {timed[0]}")
    return plan.model_copy(update=changes | {"reasons": reasons})


def best_role(probe: ProbeResult, compile_seconds: float, num_steps: int) -> str | None:
    """The role that is to replace the candidate; None if none is."""
    winners = winning_roles(probe, compile_seconds, num_steps)
    return max(winners, key=lambda role: winners[role].value) if winners else None


def winning_roles(probe: ProbeResult, compile_seconds: float, num_steps: int) -> dict[str, Estimate]:
    """Roles whose arms are certainly faster than the candidate and pay back what they cost, with how much faster."""
    gains = {role: arm_ratio(probe.rounds, "candidate", role) for role in roles_of(probe)}
    return {
        role: gain
        for role, gain in gains.items()
        if gain is not None
        and gain.low is not None
        and gain.low > 1
        and gain.value >= 1 + MIN_GAIN
        and _pays(probe, role, compile_seconds, num_steps)
    }


def _pays(probe: ProbeResult, role: str, compile_seconds: float, num_steps: int) -> bool:
    """Whether an arm wins back what its compiling takes."""
    if roles_of(probe)[role].compile in ("off", probe.candidate.compile):
        return True
    saved = step_seconds(probe, "candidate") - step_seconds(probe, role)
    return num_steps * saved > compile_seconds


def roles_of(probe: ProbeResult) -> dict[str, Arm]:
    """The arms that a search's probe holds against its candidate."""
    return {"baseline": probe.baseline} | probe.others


def combined(probe: ProbeResult, roles: Iterable[str]) -> Arm:
    """The candidate with what each of these roles has otherwise."""
    arms = roles_of(probe)
    changes: dict[str, Any] = {}
    for role in roles:
        changes |= _changes(probe.candidate, arms[role])
    return probe.candidate.model_copy(update=changes)


def _changes(before: Arm, after: Arm) -> dict[str, Any]:
    return {name: getattr(after, name) for name in SEARCHED if getattr(after, name) != getattr(before, name)}


def step_seconds(probe: ProbeResult, role: str) -> float:
    """Median seconds of a step of an arm."""
    per_sample = [block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == role]
    return statistics.median(per_sample) * probe.samples_per_step[role]


def _timed(search: Search, name: str, planned: object) -> Iterator[str]:
    """How the arms did that differ from their candidate in this setting alone."""
    for probe in search.probes:
        for role, arm in roles_of(probe).items():
            value, before = getattr(arm, name), getattr(probe.candidate, name)
            alone = _changes(probe.candidate, arm).keys() == {name}
            gain = arm_ratio(probe.rounds, "candidate", role) if alone else None
            if gain is not None and gain.low is not None:
                cost = f", compiled in {search.compile_seconds:.0f} s" if name == "compile" else ""
                interval = f"[{gain.low:.2f}, {gain.high:.2f}]"
                yield f"{value} {gain.value:.2f} x {interval} the speed of {before or planned}{cost}"
