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
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import cast

import numpy as np

from paceline.tasks.measure.paired_ratio import Interval, arm_ratio, estimate_ratio
from paceline.tasks.records.execution import EXCHANGEABLE, FACTORS, Arm, differing_factors, factor_orders, with_factors
from paceline.tasks.records.measurement import AutotuneResult, ProbeResult
from paceline.tasks.speedup.records import Basis, Factor, FactorCard

INTERACTION = "interaction"
ONE_AT_A_TIME = "one at a time"  # method of a card without a ladder
SINGLY = ("precision", "memory_format", "num_threads", "loading", "compile")  # settings that a search can time alone
Terms = dict[str, float]  # weights by role; a log-ratio is their sum over the logs of the arms' seconds per sample


def factor_card(probe: ProbeResult, search: AutotuneResult | None = None) -> FactorCard:
    """Build the card of a probe; a factor that was not measured singly has no value."""
    terms, num_orders = factor_terms(probe), len(factor_orders(differing_factors(probe.baseline, probe.candidate)))
    gains = single_gains(search, probe.baseline, probe.candidate) if search else {}
    factors = []
    for factor, name in FACTORS.items():
        is_same = getattr(probe.baseline, name) == getattr(probe.candidate, name)
        basis: Basis = "unchanged" if is_same else "not measured"
        value, low, high = _estimate(probe, terms[factor][1]) if factor in terms else (None, None, None)
        if factor in terms:
            basis = terms[factor][0]
        elif not is_same and name in gains:
            value, low, high, basis = gains[name].value, gains[name].low, gains[name].high, "in the search"
        factors.append(Factor(factor=factor, ratio=value, low=low, high=high, basis=basis))
    value, low, high = _estimate(probe, terms[INTERACTION][1]) if INTERACTION in terms else (None, None, None)
    is_ladder = any(one.basis == "mean over the orders" for one in factors)
    return FactorCard(
        method=f"Shapley value over {num_orders} order{'s' * (num_orders > 1)}" if is_ladder else ONE_AT_A_TIME,
        factors=tuple(factors),
        interaction=value,
        interaction_low=low,
        interaction_high=high,
    )


def factor_terms(probe: ProbeResult) -> dict[str, tuple[Basis, Terms]]:
    """How each factor that differs is measured in a probe, and the interaction, as far as its arms allow."""
    differing = differing_factors(probe.baseline, probe.candidate)
    roles, orders = _roles(probe, differing), factor_orders(differing)
    none, free = frozenset[str](), frozenset(EXCHANGEABLE).intersection(differing)
    needed = {frozenset(order[:count]) for order in orders for count in range(len(order) + 1)}
    is_ladder = len(differing) > 1 and needed <= roles.keys()
    terms: dict[str, tuple[Basis, Terms]] = {}
    for factor in differing:
        starts = {"added last": [frozenset(differing) - {factor}], "added alone": [none]}
        if is_ladder:
            starts["mean over the orders"] = [frozenset(order[: order.index(factor)]) for order in orders]
        for basis, befores in starts.items():  # the last one that was measured counts
            steps = [(before, before | {factor}, 1 / len(befores)) for before in befores]
            if all({before, after} <= roles.keys() for before, after, _ in steps):
                terms[factor] = cast("Basis", basis), _weights(roles, steps)
    alone = [(frozenset({factor}), none, 1.0) for factor in free]
    if len(alone) > 1 and {none, free, *(single for single, _, _ in alone)} <= roles.keys():
        terms[INTERACTION] = "mean over the orders", _weights(roles, [(none, free, 1.0), *alone])
    return terms


def _roles(probe: ProbeResult, differing: Collection[str]) -> dict[frozenset[str], str]:
    """The role of the arm that has each combination of the candidate's factors, as far as it was measured."""
    role_of = {arm: role for role, arm in (probe.others | {"candidate": probe.candidate}).items()}
    role_of[with_factors(probe.baseline, probe.candidate, ())] = "baseline"
    measured = {block.arm for block in probe.rounds[0]} - set(probe.diverged)
    return {
        frozenset(factors): role
        for count in range(len(differing) + 1)
        for factors in itertools.combinations(differing, count)
        if (role := role_of.get(with_factors(probe.baseline, probe.candidate, factors))) in measured
    }


def _weights(roles: dict[frozenset[str], str], steps: Iterable[tuple[frozenset[str], frozenset[str], float]]) -> Terms:
    """Weighted log-ratios of the throughputs after and before steps between combinations of factors."""
    terms: Terms = defaultdict(float)
    for before, after, weight in steps:
        terms[roles[before]] += weight
        terms[roles[after]] -= weight
    return dict(terms)


def _estimate(probe: ProbeResult, terms: Terms) -> tuple[float | None, float | None, float | None]:
    by_round = [{block.arm: math.log(block.seconds_per_sample) for block in blocks} for blocks in probe.rounds]
    ratio = estimate_ratio(np.array([sum(weight * logs[role] for role, weight in terms.items()) for logs in by_round]))
    return (None, None, None) if ratio is None else (ratio.value, ratio.low, ratio.high)


def single_gains(search: AutotuneResult, baseline: Arm, candidate: Arm) -> dict[str, Interval]:
    """Throughput with the candidate's value of each setting over that with the baseline's.

    As far as a search has timed it in arms that differ in nothing else.
    """
    gains: dict[str, Interval] = {}
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
