"""Factor card: by how much each factor between the naive baseline and a run multiplies its throughput.

The game is the log of the throughput of an arm with some of the run's factors. A factor's share is its Shapley value
(Shapley, "A value for n-person games", 1953): the mean, over the orders in which factors can be added, of the log-ratio
of the arms after and before it. On logs the shares multiply to the ratio exactly (Shorrocks, "Decomposition procedures
for distributional analysis", 2013, section 3; Owen, "Sobol' indices and Shapley value", 2014). Threads, compilation and
devices follow in one order: it is the Shapley value under precedence constraints (Faigle and Kern 1992). Every share is
computed round by round, so that the machine's drift cancels, and gets the interval of the ratio (`paired_ratio`).

Without a ladder one factor at a time is shown, as far as it was measured: added to the baseline alone, added
to the run's other factors, or in `auto`'s search. Such ratios need not multiply to that of the run.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from paceline.tasks.measure.paired_ratio import Estimate, Floats, Interval, arm_ratio, estimate_ratio
from paceline.tasks.records.execution import (
    EXCHANGEABLE,
    FACTORS,
    Arm,
    comparable_arm,
    differing_factors,
    factor_orders,
    with_factors,
)
from paceline.tasks.records.measurement import AutotuneResult, ProbeResult
from paceline.tasks.speedup.records import Basis, Factor, FactorCard

ONE_AT_A_TIME = "one at a time"  # method of a card without a ladder
SINGLY = ("precision", "memory_format", "num_threads", "loading", "compile")  # settings that a search can time alone


def factor_card(probe: ProbeResult, search: AutotuneResult | None = None) -> FactorCard:
    """Build the card of a probe; a factor that was not measured singly has no value."""
    differing = differing_factors(probe.baseline, probe.candidate)
    roles, seconds = _roles(probe), _log_seconds(probe)
    orders = list(factor_orders(differing))
    combinations = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    is_ladder = len(differing) > 1 and combinations <= roles.keys()
    gains = single_gains(search, probe.baseline, probe.candidate) if search else {}
    factors = []
    for factor in FACTORS:
        estimate: Estimate | None = None
        basis: Basis = "unchanged" if factor not in differing else "not measured"
        alone, last = frozenset[str](), frozenset(differing) - {factor}
        if factor not in differing:
            pass
        elif is_ladder:
            steps = [_log_gain(seconds, roles, order[: order.index(factor)], factor) for order in orders]
            estimate, basis = estimate_ratio(np.mean(steps, axis=0)), "mean over the orders"
        elif {alone, alone | {factor}} <= roles.keys():
            estimate, basis = estimate_ratio(_log_gain(seconds, roles, alone, factor)), "added alone"
        elif {last, last | {factor}} <= roles.keys():
            estimate, basis = estimate_ratio(_log_gain(seconds, roles, last, factor)), "added last"
        elif (name := FACTORS[factor][0]) in gains:
            estimate, basis = gains[name], "in the search"
        factors.append(_factor(factor, probe, estimate, basis))
    return FactorCard(
        method=f"Shapley value over {len(orders)} order{'s' * (len(orders) > 1)}" if is_ladder else ONE_AT_A_TIME,
        factors=tuple(factors),
        interaction=_interaction(seconds, roles, differing),
    )


def _factor(factor: str, probe: ProbeResult, estimate: Estimate | None, basis: Basis) -> Factor:
    name = FACTORS[factor][0]
    before, after = (getattr(arm, name) for arm in (probe.baseline, probe.candidate))
    ends = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return Factor(factor=factor, before=before, after=after, basis=basis, ratio=ends[0], low=ends[1], high=ends[2])


def _roles(probe: ProbeResult) -> dict[frozenset[str], str]:
    """The role of the arm that has each combination of the candidate's factors, as far as it was measured."""
    arms = probe.others | {"baseline": probe.baseline, "candidate": probe.candidate}
    measured = {block.arm for block in probe.rounds[0]} if probe.rounds else set()
    role_of = {comparable_arm(arm): role for role, arm in arms.items() if role in measured - set(probe.diverged)}
    differing = differing_factors(probe.baseline, probe.candidate)
    return {
        frozenset(factors): role_of[arm]
        for count in range(len(differing) + 1)
        for factors in itertools.combinations(differing, count)
        if (arm := with_factors(probe.baseline, probe.candidate, factors)) in role_of
    }


def _log_seconds(probe: ProbeResult) -> dict[str, Floats]:
    """Logs of the seconds per sample of each arm, one for each round."""
    by_round = [{block.arm: block.seconds_per_sample for block in blocks} for blocks in probe.rounds]
    return {role: np.log([seconds[role] for seconds in by_round]) for role in (by_round[0] if by_round else ())}


def _log_gain(
    seconds: dict[str, Floats], roles: dict[frozenset[str], str], before: Iterable[str], factor: str
) -> Floats:
    """Log-ratio of the throughputs with and without a factor, in each round, next to those added before it."""
    first = frozenset(before)
    return seconds[roles[first]] - seconds[roles[first | {factor}]]


def _interaction(
    seconds: dict[str, Floats], roles: dict[frozenset[str], str], differing: tuple[str, ...]
) -> Interval | None:
    """What the exchangeable factors give together over the product of what each gives alone; None if not measured."""
    free = frozenset(EXCHANGEABLE).intersection(differing)
    alone = [frozenset({factor}) for factor in free]
    if len(free) < 2 or not {frozenset[str](), free, *alone} <= roles.keys():  # noqa: PLR2004
        return None
    start = seconds[roles[frozenset()]]
    logs = start - seconds[roles[free]] - sum(start - seconds[roles[factor]] for factor in alone)
    found = estimate_ratio(np.asarray(logs, dtype=np.float64))
    return None if found is None else Interval(value=found.value, low=found.low, high=found.high)


def single_gains(search: AutotuneResult, baseline: Arm, candidate: Arm) -> dict[str, Estimate]:
    """Gain of each setting alone, as far as a search has timed it in arms that differ in nothing else.

    Returns:
        By setting: throughput with the candidate's value over throughput with the baseline's.
    """
    gains: dict[str, Estimate] = {}
    for probe in search.probes if not search.validity.contaminated else ():
        for role, arm in ({"baseline": probe.baseline} | probe.others).items():
            differing = [name for name in SINGLY if getattr(arm, name) != getattr(probe.candidate, name)]
            if len(differing) != 1:
                continue
            (name,) = differing
            for (slow, before), (fast, after) in itertools.permutations([("candidate", probe.candidate), (role, arm)]):
                gain = arm_ratio(probe.rounds, slow, fast)
                ends = getattr(before, name), getattr(after, name)
                if gain is not None and ends == (getattr(baseline, name), getattr(candidate, name)):
                    gains[name] = gain
    return gains
