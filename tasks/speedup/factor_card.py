"""Factor card: by how much each factor between the naive baseline and a run multiplies its throughput.

The game is the log of the throughput of an arm with some of the run's factors. A factor's share is its Shapley value
(Shapley, "A value for n-person games", 1953): the mean, over the orders in which factors can be added, of the log-ratio
of the arms after and before it. In each round the shares add up to the log-ratio (Shorrocks, "Decomposition procedures
for distributional analysis", 2013, section 3; Owen, "Sobol' indices and Shapley value", 2014). Threads, compilation and
devices follow in one order: it is the Shapley value under precedence constraints (Faigle and Kern 1992). Every share is
computed round by round, so that the machine's drift cancels, and gets the interval of the ratio (`paired_ratio`).

Without a ladder one factor at a time is shown, as far as it was measured: added to the baseline alone, added
to the run's other factors, or in `auto`'s search. Such ratios need not multiply to that of the run.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from paceline.tasks.measure.paired_ratio import Estimate, Floats, arm_ratio, estimate_ratio
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

INTERACTION = "interaction"
ONE_AT_A_TIME = "one at a time"  # method of a card without a ladder
SINGLY = ("precision", "memory_format", "num_threads", "loading", "compile")  # settings that a search can time alone


Terms = dict[str, float]
"""Weights by role; a log-ratio is their sum over the logs of the arms' seconds per sample."""


def factor_card(probe: ProbeResult, search: AutotuneResult | None = None) -> FactorCard:
    """Build the card of a probe; a factor that was not measured singly has no value."""
    differing = differing_factors(probe.baseline, probe.candidate)
    terms = factor_terms(probe)
    by_round = [{block.arm: block.seconds_per_sample for block in blocks} for blocks in probe.rounds]
    logs = {role: np.log([seconds[role] for seconds in by_round]) for role in by_round[0]}
    gains = single_gains(search, probe.baseline, probe.candidate) if search else {}
    factors, is_ladder = [], False
    for factor, (name, *_) in FACTORS.items():
        basis: Basis = "unchanged" if factor not in differing else "not measured"
        estimate: Estimate | None = None
        if factor in terms:
            basis, weights = terms[factor]
            estimate = estimate_ratio(_sum(weights, logs))
            is_ladder |= basis == "mean over the orders"
        elif factor in differing and name in gains:
            estimate, basis = gains[name], "in the search"
        value, low, high = _ends(estimate)
        before, after = (getattr(arm, name) for arm in (probe.baseline, probe.candidate))
        factors.append(Factor(factor=factor, before=before, after=after, ratio=value, low=low, high=high, basis=basis))
    num_orders = len(list(factor_orders(differing)))
    value, low, high = _ends(estimate_ratio(_sum(terms[INTERACTION][1], logs)) if INTERACTION in terms else None)
    return FactorCard(
        method=f"Shapley value over {num_orders} order{'s' * (num_orders > 1)}" if is_ladder else ONE_AT_A_TIME,
        factors=tuple(factors),
        interaction=value,
        interaction_low=low,
        interaction_high=high,
    )


def _ends(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)


def factor_terms(probe: ProbeResult) -> dict[str, tuple[Basis, Terms]]:
    """How each factor that differs is measured in a probe, and the interaction, as far as its arms allow."""
    differing = differing_factors(probe.baseline, probe.candidate)
    roles, orders = _roles(probe), list(factor_orders(differing))
    terms: dict[str, tuple[Basis, Terms]] = {}
    needed = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    is_ladder = len(differing) > 1 and needed <= roles.keys()
    alone = frozenset[str]()
    for factor in differing:
        last = frozenset(differing) - {factor}
        if is_ladder:
            terms[factor] = "mean over the orders", {}
            for order in orders:
                before = frozenset(order[: order.index(factor)])
                _add(terms[factor][1], roles, before, before | {factor}, 1 / len(orders))
        elif {alone, alone | {factor}} <= roles.keys():
            terms[factor] = "added alone", _add({}, roles, alone, alone | {factor})
        elif {last, last | {factor}} <= roles.keys():
            terms[factor] = "added last", _add({}, roles, last, last | {factor})
    free = frozenset(EXCHANGEABLE).intersection(differing)
    if len(free) > 1 and {alone, free, *(alone | {factor} for factor in free)} <= roles.keys():
        terms[INTERACTION] = "mean over the orders", _add({}, roles, alone, free)
        for factor in free:
            _add(terms[INTERACTION][1], roles, alone | {factor}, alone)
    return terms


def _roles(probe: ProbeResult) -> dict[frozenset[str], str]:
    """The role of the arm that has each combination of the candidate's factors, as far as it was measured."""
    arms = probe.others | {"baseline": probe.baseline, "candidate": probe.candidate}
    measured = {block.arm for block in probe.rounds[0]} - set(probe.diverged)
    role_of = {comparable_arm(arm): role for role, arm in arms.items() if role in measured}
    differing = differing_factors(probe.baseline, probe.candidate)
    return {
        frozenset(factors): role_of[arm]
        for count in range(len(differing) + 1)
        for factors in itertools.combinations(differing, count)
        if (arm := with_factors(probe.baseline, probe.candidate, factors)) in role_of
    }


def _add(
    terms: Terms, roles: dict[frozenset[str], str], before: frozenset[str], after: frozenset[str], weight: float = 1.0
) -> Terms:
    """Add the log-ratio of the throughputs of two combinations of factors."""
    for role, sign in ((roles[before], weight), (roles[after], -weight)):
        terms[role] = terms.get(role, 0.0) + sign
    return terms


def _sum(terms: Terms, logs: Mapping[str, Floats]) -> Floats:
    return np.asarray(np.sum([weight * logs[role] for role, weight in terms.items()], axis=0), dtype=np.float64)


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
