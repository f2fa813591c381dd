"""Scaling over the number of devices: efficiency, serial fraction, and the two laws, each with its interval.

Laws, with S the speedup over one device on N devices:

    Amdahl (1967)                          N / S = 1 + s (N - 1)                    s: serial fraction
    Universal Scalability (Gunther 1993)   N / S = 1 + a (N - 1) + b N (N - 1)      a: contention, b: coherence
    Karp and Flatt (1990)                  e = (1 / S - 1 / N) / (1 - 1 / N)        e: Amdahl's s, from one point

Both laws are linear in their parameters, so each repeat is fitted by weighted least squares, with relative errors of
equal size, and the interval is that of the parameters over the repeats. All speedups of one repeat are divided by the
same baseline run, whose error they share; a fit over all points at once would take them for independent.

Amdahl's law and Karp and Flatt's fraction are about a fixed amount of work: they are for strong scaling only. Under
weak scaling the work grows with the devices, S is the ratio of samples per second, and the second law alone is fitted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from paceline.tasks.measure import paired_ratio
from paceline.tasks.measure.paired_ratio import Floats, Interval
from paceline.tasks.speedup.study.inference import ratio_of_means
from paceline.tasks.speedup.study.pairs import ratio_of
from paceline.tasks.speedup.study.records import Fit, Scaling, ScalingPoint

MIN_POINTS = 4
"""Numbers of devices, one included, below which no law is fitted: the larger law has two parameters, and a fit that
cannot fail says nothing."""

Kind = Literal["strong", "weak"]


def karp_flatt(speedup: float, num_devices: int) -> float:
    """Experimentally determined serial fraction. Raises ValueError: for one device, where it is not defined."""
    if num_devices <= 1:
        raise ValueError(f"num_devices={num_devices}: the serial fraction needs at least 2 devices")
    return (1 / speedup - 1 / num_devices) / (1 - 1 / num_devices)


def scaling(kind: Kind, group: str, speedups: Mapping[int, Sequence[float]]) -> Scaling:
    """Compute speedups, efficiencies and fits.

    Args:
        kind: Of the batch over the devices; the caller never mixes them.
        group: Values of the axes that change the work.
        speedups: Number of devices -> speedup over one device in each repeat, in the order of the repeats and equally
            many for all; one device, which is 1 by definition, may be left out.
    """
    numbers = sorted({1, *speedups})
    points = tuple(_point(kind, number, speedups.get(number, ())) for number in numbers)
    fits: tuple[Fit, ...] = ()
    refused = None
    if len(numbers) < MIN_POINTS:
        refused = (
            f"no law is fitted to {len(numbers)} numbers of devices ({', '.join(map(str, numbers))}): "
            f"it would pass through them whatever they are; measure at least {MIN_POINTS}"
        )
    elif len({len(speedups[number]) for number in numbers if number > 1}) > 1:
        refused = "no law is fitted: some numbers of devices have fewer clean repeats than others"
    else:
        counts = np.array([number for number in numbers if number > 1], dtype=np.float64)
        measured = np.array([speedups[int(number)] for number in counts])  # devices x repeats
        if kind == "strong":
            parameters_PR, residual = _fit((counts - 1)[:, None], counts, measured)
            fits = (Fit(law="Amdahl", parameters={"serial_fraction": _interval(parameters_PR[0])}, residual=residual),)
        fits += (_universal(counts, measured),)
    return Scaling(kind=kind, group=group, points=points, fits=fits, refused=refused)


def law(fit: Fit, num_devices: float) -> float:
    """Speedup by a fitted law."""
    values = {name: interval.value for name, interval in fit.parameters.items()}
    excess = values.get("serial_fraction", 0.0) + values.get("contention", 0.0)
    return num_devices / (1 + (num_devices - 1) * (excess + values.get("coherence", 0.0) * num_devices))


def _point(kind: Kind, num_devices: int, speedups: Sequence[float]) -> ScalingPoint:
    if num_devices == 1:
        unity = Interval(value=1.0, low=1.0, high=1.0)
        return ScalingPoint(num_devices=1, speedup=unity, efficiency=unity, karp_flatt=None)
    speedup = ratio_of(np.log(np.asarray(speedups, dtype=np.float64)))
    assert speedup is not None, "a point has at least one repeat"
    serial = None
    if kind == "strong":  # the fraction falls as the speedup rises, so the ends change places
        falling = _transform(speedup, lambda value: karp_flatt(value, num_devices))
        serial = falling.model_copy(update={"low": falling.high, "high": falling.low})
    efficiency = _transform(speedup, lambda value: value / num_devices)
    return ScalingPoint(num_devices=num_devices, speedup=speedup, efficiency=efficiency, karp_flatt=serial)


def _transform(interval: Interval, function: Callable[[float], float]) -> Interval:
    low, high = (None if end is None else function(end) for end in (interval.low, interval.high))
    return Interval(value=function(interval.value), low=low, high=high)


def _universal(counts_D: Floats, measured_DR: Floats) -> Fit:
    design_DP = np.stack([counts_D - 1, counts_D * (counts_D - 1)], axis=1)
    parameters_PR, residual = _fit(design_DP, counts_D, measured_DR)
    # The maximum lies at sqrt((1 - contention) / coherence), a ratio of means over the repeats.
    square = ratio_of_means(1 - parameters_PR[0], parameters_PR[1])
    identified = square is not None and parameters_PR[1].mean() > 0
    # Whose contention is above 1 is slowest with a second device: the maximum lies below 1.
    ends = [math.sqrt(max(1.0, end or 0.0)) for end in (square.value, square.low, square.high)] if square else []
    peak, low, high = ends if identified else (None, None, None)
    return Fit(
        law="Universal Scalability",
        parameters={"contention": _interval(parameters_PR[0]), "coherence": _interval(parameters_PR[1])},
        residual=residual,
        peak_devices=peak,
        peak_low=low,
        peak_high=high,
    )


def _fit(design_DP: Floats, counts_D: Floats, measured_DR: Floats) -> tuple[Floats, float]:
    """Parameters of each repeat (P x R), and the root mean square of the relative residuals."""
    excess_DR = counts_D[:, None] / measured_DR - 1
    weights_DR = measured_DR / counts_D[:, None]  # the error of N / S is proportional to it
    estimates, squares = [], []
    for excess_D, weight_D in zip(excess_DR.T, weights_DR.T, strict=True):
        solution, *_ = np.linalg.lstsq(design_DP * weight_D[:, None], excess_D * weight_D, rcond=None)
        estimates.append(solution)
        squares.append(((design_DP @ solution - excess_D) * weight_D) ** 2)
    return np.array(estimates).T, float(np.sqrt(np.mean(squares)))


def _interval(values_R: Floats) -> Interval:
    """A parameter over the repeats. Below 0 it has no meaning: such ends are noise and are cut."""
    if len(values_R) < paired_ratio.MIN_INTERVAL_ROUNDS:
        return Interval(value=max(0.0, float(np.median(values_R))))
    value, low, high = (
        max(0.0, float(end)) for end in paired_ratio.location_interval(values_R, paired_ratio.FIXED_CONFIDENCE)
    )
    return Interval(value=value, low=low, high=high)
