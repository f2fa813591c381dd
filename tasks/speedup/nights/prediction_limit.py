"""Prediction limit of a series of runs whose hosts are a random effect.

A run's value is a level, plus the effect of its host, plus noise. Both spreads are robust: Qn (Rousseeuw and Croux,
"Alternatives to the Median Absolute Deviation", 1993) over the pairs of runs of one host gives the noise s, over the
pairs of different hosts noise and hosts together, so that the hosts' spread t follows. The location of values is the
one-step estimate of Huber ("Robust Estimation of a Location Parameter", 1964) from their median: the mean, with values
further than 1.5 s from the median drawn in. It has nearly the mean's variance at the normal, v_m for m values. The
effect of a host is the location of its runs, drawn to the common level by w = t^2 / (t^2 + s^2 v(n_host)) (Robinson,
"That BLUP Is a Good Thing: The Estimation of Random Effects", 1991). The limit for the location of m new runs is

    t(df, 1 - LEVEL) * sqrt(s^2 (v_m + w^2 v(n_host) + (1 - w)^2 v(n)) + t^2 (1 - w)^2 (1 + pi / (2 k)))

with n runs on k hosts, and the degrees of freedom of Satterthwaite ("An Approximate Distribution of Estimates of
Variance Components", 1946). On one host it is the prediction limit of a normal sample. Several spans at once are the
window-limited scheme of Lai ("Sequential Changepoint Detection in Quality Control", 1995).

The average run length is explicit. A series is compared `len(SPANS)` times a night, and `LEVEL` is one in as many
comparisons as there are in `RUN_LENGTH_YEARS`: so long it takes on average until ordinary noise is called a change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

RUN_LENGTH_YEARS = 100
"""Average time until a false alarm of one measure of a nightly series, if its noise is normal. Heavier tails are held
off by the least change that matters (`tests/benchmarks/simulate_nights.py`)."""
SPANS = {1: 1.0, 2: 0.5, 3: 0.351, 7: 0.151}
"""Newest runs whose location is compared, and the variance of that of as many standard normal values."""
LEVEL = 1 / (365 * RUN_LENGTH_YEARS * len(SPANS))  # one-sided, of a single comparison
QN_EFFICIENCY = 0.82
CLIP = 1.5  # standard deviations
VARIANCE = 1.055  # of the location of n normal values, times n
_SMALL_QN = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
_QN = 2.2219
MIN_DEGREES = 3  # fewest runs beyond one for each host, to tell noise and hosts apart; else all spread is noise

Value = tuple[str, float]  # (host, value) of a run


@dataclass(frozen=True)
class Level:
    """Level of a series: what to expect on each host."""

    common: float
    hosts: dict[str, tuple[float, int]]  # location and number of runs
    noise: float
    host_spread: float
    num_runs: int

    def expect(self, host: str) -> float:
        """Value to expect on a host, which may be unknown."""
        location, _ = self.hosts.get(host, (self.common, 0))
        return self.common + self._weight(host) * (location - self.common)

    def reach(self, hosts: Sequence[str]) -> float:
        """Distance from the expectation at which the location of new runs on these hosts is called a change."""
        weights = [(self._weight(host), self.hosts.get(host, (0.0, 1))[1]) for host in hosts]
        of_levels = [(weight**2 / number + (1 - weight) ** 2 / self.num_runs) * VARIANCE for weight, number in weights]
        noise = SPANS[len(hosts)] + float(np.mean(of_levels))
        spread = float(np.mean([(1 - weight) ** 2 for weight, _ in weights]))
        parts = (noise * self.noise**2, spread * (1 + math.pi / (2 * len(self.hosts))) * self.host_spread**2)
        if (variance := sum(parts)) == 0:
            return 0.0
        degrees = (QN_EFFICIENCY * (self.num_runs - len(self.hosts)), max(1, len(self.hosts) - 1))
        if self.host_spread == 0:
            degrees = (QN_EFFICIENCY * (self.num_runs - 1), 1)
        shares = sum(part**2 / number for part, number in zip(parts, degrees, strict=True) if part)
        return -float(scipy.special.stdtrit(variance**2 / shares, LEVEL)) * math.sqrt(variance)

    def _weight(self, host: str) -> float:
        _, number = self.hosts.get(host, (0.0, 0))
        if not number or self.host_spread == 0:
            return 0.0
        return self.host_spread**2 / (self.host_spread**2 + self.noise**2 * VARIANCE / number)


def level_of(runs: Sequence[Value]) -> Level:
    """Estimate level, noise and spread of the hosts from at least two runs."""
    by_host: dict[str, list[float]] = {}
    for host, value in runs:
        by_host.setdefault(host, []).append(value)
    values = [value for _, value in runs]
    noise, total = scale_qn(values), 0.0
    if len(by_host) > 1 and len(values) - len(by_host) >= MIN_DEGREES:
        names = np.array([host for host, _ in runs])
        noise, total = scale_qn(values, names, same=True), scale_qn(values, names, same=False)
    return Level(
        common=location(values, max(noise, total)),
        hosts={host: (location(some, noise), len(some)) for host, some in by_host.items()},
        noise=noise,
        host_spread=math.sqrt(max(0.0, total**2 - noise**2)),
        num_runs=len(values),
    )


def location(values: Sequence[float], noise: float) -> float:
    """Huber's one-step location: the mean, with values far from the median drawn in."""
    centre = float(np.median(values))
    return centre + float(np.mean(np.clip(np.asarray(values) - centre, -CLIP * noise, CLIP * noise)))


def scale_qn(values: Sequence[float], hosts: np.ndarray | None = None, same: bool = True) -> float:
    """Qn, a robust standard deviation of two values or more: an order statistic of the distances of all pairs.

    Consistent at the normal.

    With `hosts` only pairs of the same host count, or only pairs of different hosts.
    """
    array, num = np.asarray(values, dtype=np.float64), len(values)
    first, second = np.triu_indices(num, 1)
    distances = np.abs(array[first] - array[second])
    half = num // 2 + 1
    rank = half * (half - 1) // 2
    if hosts is not None:
        chosen = (hosts[first] == hosts[second]) == same
        rank = max(1, round(rank * chosen.sum() / len(distances)))
        distances = distances[chosen]
    correction = _SMALL_QN.get(num) or num / (num + (1.4 if num % 2 else 3.8))
    return _QN * correction * float(np.sort(distances)[rank - 1])
