"""Forecast of N devices from one device's profile and a link: intervals, limits, the cheapest N.

A step on N devices takes contention times the step of one device at its share of the batch, plus what waiting for the
slowest costs, plus the all-reduce of the gradients. All three are measured on two devices in the training step itself,
at a small batch and a large one; between them they change as a straight line does.

A part of the waiting is the engine's own work, which neither grows with the step nor with N; a part is the scatter of
step times, which grows with the step and, as the expected largest of N normal values does, with N.

In the step an all-reduce takes longer than on the bare link: cold caches, sleeping threads. What it takes longer on two
devices is added to the link's time for N.

Up to 25 MB of gradients travel in DistributedDataParallel's one bucket, after the last gradient is known, so
that nothing overlaps; of more, all but the last bucket may hide behind the rest of the backward pass, which is about
two thirds of a step. How much really hides is not known beforehand: the prediction takes half of what could, and its
interval reaches from nothing to all.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from paceline.tasks.errors import InputError
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.speedup.forecast.links import all_reduce_seconds
from paceline.tasks.speedup.forecast.records import (
    Bound,
    CheapestChoice,
    DeviceProfile,
    Interference,
    Limits,
    Link,
    Prediction,
    ScalingKind,
)

NUM_DRAWS = 2000
BUCKET_BYTES = 25 * 2**20
BACKWARD_SHARE = 2 / 3
EXTRAPOLATION_ERROR = 0.03
"""Half-width that is added, relative, for each doubling beyond the measured batch sizes: caches and kernels change with
the size, which no line through other sizes can know."""
MODEL_ERROR = 0.02  # half-width of what the model itself leaves out on several devices
UNSEEN_ERROR = 0.1
"""The same where only one device was profiled: what several cost each other was 5 to 20 % of a step where it was seen
(infra/LOG.md)."""
MIN_EXCHANGE = 0.2
"""Smallest share of the link's time that an exchange takes in a step, even if the step's noise hides it."""
PAYING_FACTOR = 1.1  # doubling the devices pays while it gives at least this factor
MAX_DEVICES = 4096
MAX_LARGER = 1024  # times the batch of the profile, up to which batches are tried
TWO_SIGMA = 1.96
SECONDS_PER_HOUR = 3600.0

Floats = npt.NDArray[np.float64]


class _Draws:
    """Many profiles and links that the measurements leave possible; row 0 holds the measured values themselves."""

    def __init__(self, profile: DeviceProfile, link: Link) -> None:
        rng = np.random.default_rng(1)
        points = sorted(profile.points, key=lambda point: point.batch_size)
        self.sizes_P = np.array([point.batch_size for point in points], dtype=np.float64)
        self.seconds_DP = np.stack([_possible(rng, point.seconds) for point in points], axis=1)
        self.link_D = np.exp(_noise(rng) * np.log1p(link.relative_error) / TWO_SIGMA)
        model_error = MODEL_ERROR if profile.company else UNSEEN_ERROR
        self.model_D = np.exp(_noise(rng) * model_error / TWO_SIGMA)
        self.hidden_D = np.concatenate([[0.5], rng.uniform(0, 1, NUM_DRAWS)])
        self.zero_D = np.zeros(NUM_DRAWS + 1)
        self.beyond_D = _noise(rng) / TWO_SIGMA
        self.overhead_D, self.slope_D = self._line()
        company = profile.company or ()
        self.company_sizes = [interference.batch_size for interference in company]
        self.contention_CD = [np.maximum(_possible(rng, interference.contention), 1e-9) for interference in company]
        self.engine_D, self.slack_D, self.beyond_link_CD = self._company(rng, company, profile, link)

    def _company(
        self, rng: np.random.Generator, company: Sequence[Interference], profile: DeviceProfile, link: Link
    ) -> tuple[Floats, Floats, list[Floats]]:
        """Seconds per step of the engine, scatter per second of a step, and what an exchange takes beyond the link."""
        expected_D = all_reduce_seconds(link, 2, profile.gradient_bytes) * self.link_D
        free, lost, beyond = [], [], []
        for interference, contention_D in zip(company, self.contention_CD, strict=True):
            free.append(self.step(interference.batch_size) * contention_D)
            waited_D = free[-1] * _possible(rng, interference.waiting)
            exchanged_D = waited_D * (_possible(rng, interference.exchange) - 1) + interference.token_seconds
            lost.append(waited_D - free[-1] - interference.token_seconds)
            beyond.append(exchanged_D - expected_D)
        if not company:
            return self.zero_D, self.zero_D, []
        # Exact at both batches. A part that noise makes negative stays so, or the interval would be cut on one side.
        slack_D = (lost[-1] - lost[0]) / (free[-1] - free[0])
        return lost[-1] - slack_D * free[-1], slack_D, beyond

    def _line(self) -> tuple[Floats, Floats]:
        """Overhead and seconds per sample by least squares of the relative errors, neither below 0."""
        weights_DP = 1 / self.seconds_DP
        design_DPK = np.stack([weights_DP, self.sizes_P * weights_DP], axis=2)
        normal_DKK = np.einsum("dpk,dpl->dkl", design_DPK, design_DPK)
        solution_DK = np.linalg.solve(normal_DKK, design_DPK.sum(axis=1)[..., None])[..., 0]
        overhead_D, slope_D = solution_DK[:, 0], solution_DK[:, 1]
        through_zero_D = (self.seconds_DP / self.sizes_P).mean(axis=1)
        slope_D = np.where(overhead_D < 0, through_zero_D, slope_D)
        return np.maximum(overhead_D, 0.0), np.maximum(slope_D, 0.0)

    def step(self, batch_size: float) -> Floats:
        """Step seconds of one device: between measured sizes on the line between neighbours, beyond them on the fit."""
        smallest, largest = self.sizes_P[0], self.sizes_P[-1]
        if smallest <= batch_size <= largest:
            return self._between(batch_size)
        edge = smallest if batch_size < smallest else largest
        at_edge_D = self._between(edge)
        line_D = self.overhead_D + self.slope_D * batch_size
        shifted_D = line_D * at_edge_D / (self.overhead_D + self.slope_D * edge)  # no jump at the edge
        doublings = abs(np.log2(batch_size / edge))
        return np.asarray(shifted_D * np.exp(self.beyond_D * EXTRAPOLATION_ERROR * doublings))

    def waiting_for(self, num_devices: int, batch_size: int) -> Floats:
        """Seconds per step that `num_devices` devices lose by waiting for each other, the exchange itself apart."""
        growth = expected_largest(num_devices) / expected_largest(2)
        waiting_D = self.engine_D + self.slack_D * growth * self.step(batch_size) * self.contention(batch_size)
        return np.asarray(np.maximum(waiting_D, 0.0))

    def contention(self, batch_size: float) -> Floats:
        """Step time with other devices over the step time alone."""
        return self._in_company(self.contention_CD, batch_size) if self.company_sizes else self.zero_D + 1

    def exchange(self, all_reduce: float, batch_size: float) -> Floats:
        """Seconds that an all-reduce takes in a step, from the link's time."""
        link_D: Floats = all_reduce * self.link_D
        if not self.company_sizes:
            return link_D
        return np.asarray(np.maximum(link_D + self._in_company(self.beyond_link_CD, batch_size), MIN_EXCHANGE * link_D))

    def _in_company(self, values_CD: list[Floats], batch_size: float) -> Floats:
        """On the line between the two batch sizes of two devices, and beyond them as at the nearer one."""
        small, large = self.company_sizes
        share = float(np.clip((batch_size - small) / (large - small), 0, 1))
        return np.asarray((1 - share) * values_CD[0] + share * values_CD[1])

    def _between(self, batch_size: float) -> Floats:
        upper = int(np.clip(np.searchsorted(self.sizes_P, batch_size), 1, len(self.sizes_P) - 1))
        low, high = self.sizes_P[upper - 1], self.sizes_P[upper]
        share = (batch_size - low) / (high - low)
        return np.asarray((1 - share) * self.seconds_DP[:, upper - 1] + share * self.seconds_DP[:, upper])


def expected_largest(num: int) -> float:
    """Of `num` independent standard normal values, from 2 on (Blom 1958; within 5 % of the exact value)."""
    return float(stats.norm.ppf((num - 0.375) / (num + 0.25)))


def _noise(rng: np.random.Generator) -> Floats:
    return np.concatenate([[0.0], rng.standard_normal(NUM_DRAWS)])


def _possible(rng: np.random.Generator, interval: Interval) -> Floats:
    """Lognormal around the value, as wide as the interval; an unknown interval is taken as 10 %."""
    reach = 0.1
    if interval.low is not None and interval.high is not None and interval.low > 0:
        reach = float(np.log(interval.high / interval.low)) / 2
    return np.asarray(interval.value * np.exp(_noise(rng) * reach / TWO_SIGMA))


def _check(profile: DeviceProfile) -> None:
    if len({point.batch_size for point in profile.points}) < 2:  # noqa: PLR2004  a line needs two points
        raise InputError("a profile of one batch size does not predict others; measure at least two")


def step_seconds(profile: DeviceProfile, batch_size: int) -> Interval:
    """Step time of one device alone at a batch size that need not have been measured.

    Raises:
        InputError: the profile has a single batch size, or the batch is empty.
    """
    _check(profile)
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} is below 1; a step needs a sample")
    draws_D = _Draws(profile, Link(name="", latency_seconds=0, seconds_per_byte=0, source="given")).step(batch_size)
    low, high = np.quantile(draws_D[1:], [0.025, 0.975])
    return Interval(value=float(draws_D[0]), low=float(low), high=float(high))


def predict(
    profile: DeviceProfile, link: Link, num_devices: int, scaling: ScalingKind, price: float | None = None
) -> Prediction:
    """Speedup over one device, with its 95 % interval.

    Args:
        profile: Of one device.
        link: Between the devices.
        num_devices: N, from 1 on.
        scaling: strong: the global batch stays the recipe's; weak: each device keeps it.
        price: Of one device for one hour.

    Raises:
        InputError: fewer samples in a global batch than devices, or no device.
    """
    _check(profile)
    prediction = _predict(profile, link, _Draws(profile, link), num_devices, scaling)
    return prediction if price is None else prediction.model_copy(update={"cost": price * prediction.device_hours})


def _predict(profile: DeviceProfile, link: Link, draws: _Draws, num_devices: int, scaling: ScalingKind) -> Prediction:
    local = local_batch(profile.batch_size, num_devices, scaling)
    one_D = draws.step(profile.batch_size)
    alone_D = draws.step(local)
    several = num_devices > 1
    compute_D = alone_D * (draws.contention(local) if several else 1.0)
    all_reduce = all_reduce_seconds(link, num_devices, profile.gradient_bytes)
    exchange_D = draws.exchange(all_reduce, local) if several else draws.zero_D
    exposed_D = exchange_D
    if profile.gradient_bytes > BUCKET_BYTES:
        coverable_D = exchange_D * (1 - BUCKET_BYTES / profile.gradient_bytes)
        exposed_D = exchange_D - draws.hidden_D * np.minimum(coverable_D, BACKWARD_SHARE * compute_D)
    waiting_D = draws.waiting_for(num_devices, local) if several else np.zeros_like(one_D)
    step_D = (compute_D + waiting_D + exposed_D) * (draws.model_D if several else 1.0)
    ratio_D = (num_devices if scaling == "weak" else 1) * one_D / step_D
    low, high = np.quantile(ratio_D[1:], [0.025, 0.975])
    global_batch = profile.batch_size * (num_devices if scaling == "weak" else 1)
    epoch = float(step_D[0]) * profile.num_train / global_batch
    total = epoch * profile.num_epochs
    overhead, compute = float(draws.overhead_D[0]), float(compute_D[0])
    parts: dict[Bound, float] = {
        "compute": compute - overhead,
        "communication": float(exposed_D[0] + waiting_D[0]),
        "overhead": min(overhead, compute),
    }
    return Prediction(
        num_devices=num_devices,
        scaling=scaling,
        ratio=float(ratio_D[0]),
        low=float(low),
        high=float(high),
        efficiency=float(ratio_D[0]) / num_devices,
        step_seconds=float(step_D[0]),
        communication_seconds=float(exchange_D[0]),
        waiting_seconds=float(waiting_D[0]),
        epoch_seconds=epoch,
        bound=max(parts, key=lambda name: parts[name]),
        total_seconds=total,
        device_hours=num_devices * total / SECONDS_PER_HOUR,
    )


def local_batch(batch_size: int, num_devices: int, scaling: ScalingKind) -> int:
    """Samples per device and step; the largest share where the batch does not divide.

    Raises:
        InputError: a device would be left without a sample.
    """
    if num_devices < 1:
        raise InputError(f"num_devices={num_devices} is below 1; give at least one")
    if scaling == "weak":
        return batch_size
    if num_devices > batch_size:
        raise InputError(
            f"num_devices={num_devices} exceeds the global batch of {batch_size} under strong scaling; "
            f"use at most {batch_size} devices or a larger recipe.batch_size"
        )
    return -(-batch_size // num_devices)


def _powers(profile: DeviceProfile, scaling: ScalingKind) -> Iterator[int]:
    number = 1
    while number <= MAX_DEVICES and (scaling == "weak" or number <= profile.batch_size):
        yield number
        number *= 2


def limits(profile: DeviceProfile, link: Link, scaling: ScalingKind) -> Limits:
    """Where adding devices stops paying, over powers of two."""
    _check(profile)
    draws = _Draws(profile, link)
    ratios = {number: _predict(profile, link, draws, number, scaling).ratio for number in _powers(profile, scaling)}
    paying = 1
    for number in list(ratios)[1:]:
        if ratios[number] < PAYING_FACTOR * ratios[number // 2]:
            break
        paying = number
    return Limits(
        scaling=scaling,
        best_num_devices=max(ratios, key=lambda number: ratios[number]),
        last_paying_num_devices=paying,
        smallest_paying_batch_size=_smallest_batch(profile, link, draws, scaling),
    )


def _smallest_batch(profile: DeviceProfile, link: Link, draws: _Draws, scaling: ScalingKind) -> int | None:
    """Samples per device and step from which two devices beat one; None when they always do, 0 when never."""
    size = 1
    while size <= profile.batch_size * MAX_LARGER:
        changed = profile.model_copy(update={"batch_size": size * (2 if scaling == "strong" else 1)})
        if _predict(changed, link, draws, 2, scaling).ratio > 1:
            return None if size == 1 else size
        size *= 2
    return 0


def cheapest(
    profile: DeviceProfile, link: Link, scaling: ScalingKind, deadline_seconds: float, price: float | None = None
) -> CheapestChoice:
    """The number of devices, a power of two, with the fewest device-hours that meets a deadline."""
    _check(profile)
    draws = _Draws(profile, link)
    predictions = [_predict(profile, link, draws, number, scaling) for number in _powers(profile, scaling)]
    meeting = [prediction for prediction in predictions if prediction.total_seconds <= deadline_seconds]
    best = min(meeting, key=lambda prediction: prediction.device_hours, default=None)
    return CheapestChoice(
        deadline_seconds=deadline_seconds,
        num_devices=best.num_devices if best else None,
        total_seconds=best.total_seconds if best else None,
        device_hours=best.device_hours if best else None,
        cost=best.device_hours * price if best and price is not None else None,
    )
