"""Chooses the execution of a training from the times of an autotuning, with reasons. Pure functions.

An execution replaces the best one before it only when it is faster by more than chance: a choice among several arms
would otherwise prefer the luckiest. Chance is the noise of the rounds and what copies of one arm differ by for as long
as they live, with Bonferroni's correction for the arms of a probe. A compiled one must win back its compile time.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy

from paceline.conf.execution import CAPTURED
from paceline.tasks.measure.paired_ratio import Interval, arm_ratio
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.measurement import AutotuneResult, ProbeResult
from paceline.tasks.records.record import Choice
from paceline.tasks.train.plan import arm_of, with_changes, without_graph

COPY_SD = 0.02  # relative time that a copy of an arm has as its own: assumed, as in simulate_intervals.py (equal_arms)
FALSE_DEPARTURES = 0.015  # of a probe: a search has several
ARITHMETIC = ("precision", "memory_format")
LAYER_SETTINGS = (*ARITHMETIC, "num_threads")  # settings that decide how fast the layers compute
SEARCHED = (*LAYER_SETTINGS, "loading", "compile")  # settings that autotuning can change


def choose(plan: Plan, search: AutotuneResult, rules: Arm, num_steps: int) -> Plan:
    """The plan with the fastest execution of a search, and a reason for each changed or confirmed setting."""
    contaminated = bool(search.validity.contaminated)
    best = chosen_arm(search.probes, rules, num_steps, search.compile_seconds)
    # A contaminated search decides on precision and memory format only: their arms run on the same threads in turn, so
    # that the load of other programs affects all of them equally.
    names = ARITHMETIC if contaminated else SEARCHED
    changes = {name: value for name, value in changes_between(rules, best).items() if name in names}
    note = " (while other programs used the machine)" if contaminated else ""
    reasons = dict(plan.reasons)
    for name in SEARCHED:
        notes = list(_timing_notes(search, name, getattr(plan, name)))
        figures = "; ".join(note for candidate, note in notes if candidate == notes[-1][0])  # the last one is the best
        if name in changes:
            figures = "; ".join(filter(None, [figures, _combined_note(search, name, best)]))
            reason = f"timed before training{note}: {figures or 'with other settings, ' + best.label}"
            reasons[name] = Choice(value=changes[name], reason=reason)
        elif figures and name in reasons:
            reason = f"{reasons[name].reason}; timed{note}: {figures}"
            reasons[name] = Choice(value=reasons[name].value, reason=reason)
    return plan.model_copy(update=changes | {"reasons": reasons})


def without_failed_graph(plan: Plan, search: AutotuneResult | None) -> Plan:
    """The plan without the CUDA graph that an earlier search could not record: trying costs a restart of the group."""
    reason = search.failed_capture if search is not None else None
    if reason is None or "compile" not in plan.reasons or plan.compile not in CAPTURED:
        return plan
    return without_graph(plan, reason)


def choose_for_module(plan: Plan, search: AutotuneResult) -> Plan:
    """The plan of a user's module with the fastest execution of a search, see `choose`."""
    plan = without_failed_precision(plan, search.failed)
    return choose(plan, search, arm_of(plan), search.num_steps)


def without_failed_precision(plan: Plan, failed: Mapping[str, str]) -> Plan:
    """The plan in 32-true where the precision is open and the module does not run in that of the rules."""
    reason = failed.get(arm_of(plan).label)
    if reason is None or "precision" not in plan.reasons:
        return plan
    return with_changes(plan, {"precision": "32-true"}, f"the module does not run in {plan.precision}: {reason}")


def chosen_arm(probes: Iterable[ProbeResult], rules: Arm, num_steps: int, compile_seconds: float) -> Arm:
    """The best arm after all probes of a search."""
    best = rules
    for probe in probes:
        names = LAYER_SETTINGS if probe.candidate.variant == "synthetic_input" else tuple(Arm.model_fields)
        if any(getattr(probe.candidate, name) != getattr(best, name) for name in (*names, "num_devices")):
            continue
        winner = best_role(probe, compile_seconds, num_steps)
        if winner is not None:
            best = best.model_copy(update=changes_between(probe.candidate, roles_of(probe)[winner]))
    return best


def faster_plan(plan: Plan, probe: ProbeResult) -> Plan | None:
    """The plan of an arm that the probe timed as faster than the plan's execution; None without one."""
    planned = "single" if "single" in probe.others else "candidate"  # compares arms of one device
    if planned == "candidate" and probe.candidate.num_devices > 1:
        return None
    arms = {"candidate": probe.candidate} | roles_of(probe)
    for role in ("uncompiled", "baseline"):
        if role in probe.diverged or role not in arms or arms[role].num_devices != arms[planned].num_devices:
            continue
        gain = arm_ratio(probe.rounds, planned, role)
        if gain is None or not _beats_chance(gain, 1):
            continue
        changes = changes_between(arms[planned], arms[role])
        changes.pop("num_threads", None)  # the baseline has those of the training
        # Only settings that are `auto` change. The arithmetic changes first: the loading of the probe's baseline is
        # used only if the baseline is faster with the same arithmetic.
        changes = {name: value for name, value in changes.items() if name != "loading"} or changes
        if changes and changes.keys() <= plan.reasons.keys():
            speed = _speed(gain, arms[planned].label)
            reason = f"switched before the first step: the probe timed {arms[role].label} at {speed}"
            return with_changes(plan, changes, reason)
    return None


def plan_of_probe(plan: Plan, arm: Arm, probe: ProbeResult) -> Plan:
    """The plan with the execution of an earlier attempt's probe, for a restart; `arm` is the plan's."""
    changes = changes_between(arm, probe.candidate)
    changes = {name: value for name, value in changes.items() if name in plan.reasons and value is not None}
    return with_changes(plan, changes, "measured by the attempt before the restart")


def best_role(probe: ProbeResult, compile_seconds: float, num_steps: int) -> str | None:
    """The role of the arm to replace the candidate; None without one."""
    winners = winning_roles(probe, compile_seconds, num_steps)
    return max(winners, key=lambda role: winners[role].value) if winners else None


def winning_roles(probe: ProbeResult, compile_seconds: float, num_steps: int) -> dict[str, Interval]:
    """Roles of arms that are faster than the candidate with confidence and win back their compile time, with gains."""
    arms = roles_of(probe)
    winners: dict[str, Interval] = {}
    for role, arm in arms.items():
        gain = arm_ratio(probe.rounds, "candidate", role)
        if gain is None or role in probe.diverged or not _beats_chance(gain, len(arms)):
            continue
        saved = num_steps * (step_seconds(probe, "candidate") - step_seconds(probe, role))
        if arm.compile in ("off", probe.candidate.compile) or saved > compile_seconds:
            winners[role] = gain
    return winners


def _beats_chance(gain: Interval, num_arms: int) -> bool:
    """Whether a gain is more than noise of rounds and copies gives the best of so many equal arms."""
    copies = scipy.special.ndtri(1 - FALSE_DEPARTURES / num_arms) * np.sqrt(2) * COPY_SD
    return gain.low is not None and bool(np.log(gain.value) > np.hypot(copies, np.log(gain.value / gain.low)))


def roles_of(probe: ProbeResult) -> dict[str, Arm]:
    """The arms that a search's probe compares with its candidate."""
    return {"baseline": probe.baseline} | probe.others


def combine_roles(probe: ProbeResult, roles: Iterable[str]) -> Arm:
    """The candidate with the changes of all these roles."""
    changes: dict[str, Any] = {}
    for role in roles:
        changes |= changes_between(probe.candidate, roles_of(probe)[role])
    return probe.candidate.model_copy(update=changes)


def changes_between(before: Arm, after: Arm) -> dict[str, Any]:
    """Settings that autotuning can change in which an arm differs from another, with its values."""
    return {name: getattr(after, name) for name in SEARCHED if getattr(after, name) != getattr(before, name)}


def step_seconds(probe: ProbeResult, role: str) -> float:
    """Median seconds of a step of an arm."""
    return probe.seconds_per_sample(role) * probe.samples_per_step[role]


def _speed(gain: Interval, other: object) -> str:
    return f"{gain.value:.2f} x [{gain.low:.2f}, {gain.high:.2f}] the speed of {other}"


def _combined_note(search: AutotuneResult, name: str, best: Arm) -> str:
    """The speed of an arm that changed this setting with others and gave the best one its values; empty without one."""
    for probe in search.probes:
        for role, arm in roles_of(probe).items():
            changes = changes_between(probe.candidate, arm)
            gain = arm_ratio(probe.rounds, "candidate", role)
            is_source = all(getattr(best, one) == value for one, value in changes.items())
            if len(changes) > 1 and name in changes and is_source and gain is not None and gain.low is not None:
                return f"{' and '.join(map(str, changes.values()))} together {_speed(gain, probe.candidate.label)}"
    return ""


def _timing_notes(search: AutotuneResult, name: str, planned: object) -> Iterator[tuple[Arm, str]]:
    """Candidates, with the speeds of the arms that differ from them in this setting only."""
    for slow in search.slower:
        if changes_between(slow.candidate, slow.arm).keys() == {name}:
            value, before = getattr(slow.arm, name), getattr(slow.candidate, name)
            times = f"{value} {1 / slow.times:.2f} x the speed of {before or planned} in its first steps"
            yield slow.candidate, times
    for probe in search.probes:
        for role, arm in roles_of(probe).items():
            value, before = getattr(arm, name), getattr(probe.candidate, name)
            alone = changes_between(probe.candidate, arm).keys() == {name}
            gain = arm_ratio(probe.rounds, "candidate", role) if alone else None
            if gain is not None and gain.low is not None:
                cost = f", compiled in {search.compile_seconds:.0f} s" if name == "compile" else ""
                times = f"{value} {_speed(gain, before or planned)}{cost}"
                if gain.low > 1 and not _beats_chance(gain, len(roles_of(probe))):
                    times += ", no more than copies of one arm differ by"
                yield probe.candidate, times
