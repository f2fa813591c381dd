"""From rounds of processes to KEEP, DISCARD or RETEST, with a bound on the chance of a false KEEP.

The unit is a round of four fresh processes, old new new old or the reverse, as a coin decides. What differs between
starts is therefore part of the noise. If it makes no difference to a process which side it belongs to, the reverse
order would only have changed the sign of the round's log-ratio. So all signs are equally likely, independent of each
other and of the absolute values, however the machine behaves meanwhile: the signed-rank test is exact, with drift,
bursts and neighbouring rounds that are alike (a randomization test: Fisher 1935). Rounds are repeated because of other
work on the machine, and planned by the time that they take, neither of which depends on the coin.

A KEEP needs two things: the ratio is above 1, and the metric is not worse by more than a margin (non-inferiority, one
of the two one-sided tests of Schuirmann 1987; with both of them it is on par). Each is shown at the level of the
candidate, so their conjunction has at most this level too (an intersection-union test: Berger 1982). The looks are
planned, and the level is divided by their number: by Bonferroni's inequality they spend no more together, whichever of
them decides. In the same way the printed intervals of all looks together hold the truth in 95 %, and a DISCARD needs no
more than that.

Looks lie further and further apart, so that a clear case ends after some ten rounds, and a long judgement does not
spend much on looking often. The first one is where the level can be reached at all.
"""

import math
from collections.abc import Sequence

import numpy as np

from paceline.tasks.judge.records import Decision, JudgedParity, Outcome, Round, SideName
from paceline.tasks.measure.paired_ratio import (
    MIN_ROUNDS_TO_STOP,
    Floats,
    Interval,
    estimate_ratio,
    location_interval,
)
from paceline.tasks.records.record import Record

MARGIN_SHARE = 0.01  # of the old side's metric, where no margin is given
ERROR = 0.05  # of the printed intervals
MAX_ROUNDS = 300  # beyond, programs of a few milliseconds would be planned for thousands
GROWTH, MOST_LOOKS = 1.5, 10  # from 8 to 300 rounds


class Plan(Record):
    """Numbers of rounds at which the outcome may be decided, and the level that they share."""

    looks: tuple[int, ...]
    level: float

    @property
    def look_level(self) -> float:
        """Level of a look."""
        return self.level / len(self.looks)

    @property
    def confidence(self) -> float:
        """Confidence of the printed interval at a look."""
        return 1 - ERROR / len(self.looks)


def first_look(level: float) -> int:
    """Fewest rounds that can be worth a look: n rounds with equal signs have a probability of 2^-n."""
    return max(MIN_ROUNDS_TO_STOP, math.ceil(-math.log2(level / MOST_LOOKS)))


def plan_looks(level: float, max_rounds: int) -> Plan:
    """Plan a judgement of at most so many rounds, which are at least those of the first look."""
    looks, last = [first_look(level)], min(MAX_ROUNDS, max_rounds)
    while looks[-1] < last:
        looks.append(min(last, math.ceil(GROWTH * looks[-1])))
    return Plan(looks=tuple(looks), level=level)


def log_ratios(rounds: Sequence[Round], names: tuple[SideName, SideName] = ("old", "new")) -> Floats:
    """Logarithm of the throughput of the second side over that of the first one, by total times."""
    seconds = [[sum(run.seconds for run in each.of(name)) for name in names] for each in rounds]
    old, new = np.array(seconds, dtype=np.float64).T
    logs: Floats = np.log(old / new)
    return logs


def differences(rounds: Sequence[Round], *, lower_is_better: bool) -> Floats | None:
    """Difference of the metric, new less old, positive where new is better; None without a metric."""
    metrics = [[[run.metric for run in each.of(name)] for name in ("old", "new")] for each in rounds]
    if any(None in side for each in metrics for side in each):
        return None
    old, new = np.mean(np.array(metrics, dtype=np.float64), axis=2).T
    difference: Floats = new - old
    return -difference if lower_is_better else difference


def decide(logs: Floats, quality: Floats | None, margin: float, plan: Plan) -> Decision:
    """Decide at a planned look, from log-ratios and differences of the metric."""
    if len(logs) < plan.looks[0]:
        reason = f"{len(logs)} rounds are too few"
        return Decision(
            outcome="RETEST",
            reason=reason,
            num_rounds=len(logs),
            ratio=estimate_ratio(logs),
            needed_rounds=plan.looks[0],
        )
    centre, low, high = np.exp(location_interval(logs, plan.confidence))
    ratio = Interval(value=centre, low=low, high=high)
    difference, parity = _parity(quality, margin, plan)
    outcome: Outcome = "RETEST"
    is_faster = min(low, np.exp(location_interval(logs, 1 - 2 * plan.look_level)[1])) > 1
    is_as_good = quality is None or parity in ("on par", "better", "not worse")
    needed = None
    if high < 1 or parity == "worse":
        outcome, reason = "DISCARD", f"the new side is {'slower' if high < 1 else 'worse by its metric'}"
    elif is_faster and is_as_good:
        outcome = "KEEP"
        reason = f"the new side is faster, and its metric is {'not compared' if quality is None else parity}"
    else:
        reason = " and ".join([*([] if is_faster else ["speed"]), *([] if is_as_good else ["quality"])]) + " undecided"
        needed = _needed(logs, quality, margin, plan)
    return Decision(
        outcome=outcome,
        reason=reason,
        num_rounds=len(logs),
        ratio=ratio,
        parity=parity,
        difference=difference,
        margin=None if quality is None else margin,
        needed_rounds=needed,
    )


def _parity(quality: Floats | None, margin: float, plan: Plan) -> tuple[Interval | None, JudgedParity]:
    """Difference of the metric with its interval, and what to make of it."""
    if quality is None:
        return None, "unknown"
    value, low, high = (float(end) for end in location_interval(quality, plan.confidence))
    difference = Interval(value=value, low=low, high=high)
    _, sure_low, sure_high = location_interval(quality, 1 - 2 * plan.look_level)
    if -margin <= sure_low and sure_high <= margin:  # equal where programs are deterministic and the margin is 0
        return difference, "on par"
    if sure_low > 0:
        return difference, "better"
    if sure_low >= -margin:
        return difference, "not worse"
    return difference, "worse" if high < 0 and value < -margin else "undecided"


def _needed(logs: Floats, quality: Floats | None, margin: float, plan: Plan) -> int | None:
    """About how many rounds would decide: a half-width shrinks with the square root of their number."""

    def scale(values: Floats, distance: float) -> float:
        _, low, high = location_interval(values, 1 - 2 * plan.look_level)
        reach = float(high - low) / 2
        return 0.0 if reach == 0 else len(values) * (reach / distance) ** 2 if distance > 0 else math.inf

    centre = float(location_interval(logs, plan.confidence)[0])
    needed = [float(plan.looks[0]), scale(logs, abs(centre))]
    if quality is not None and centre > 0:
        value = float(location_interval(quality, plan.confidence)[0])
        needed.append(scale(quality, value + margin if value > -margin else -value))
    return math.ceil(max(needed)) if max(needed) <= MAX_ROUNDS else None
