"""Forecast of N devices from one device's profile and a link: intervals, limits, the cheapest N.

A step on N devices takes contention times the step of one device at its share of the batch, plus what waiting for the
slowest costs, plus the all-reduce of the gradients. All three are measured on two devices in the training step itself,
at several batches; between neighbours they change as a straight line does.

A part of the waiting is the engine's own work, which neither grows with the step nor with N; a part is the scatter of
step times, which grows with the step and, as the expected largest of N normal values does, with N.

In the step an all-reduce takes longer than on the bare link: cold caches, sleeping threads. What it takes longer on two
devices is added to the link's time for N.

Up to 25 MB of gradients travel in DistributedDataParallel's one bucket, after the last gradient is known, so
that nothing overlaps; of more, all but the last bucket may hide behind the rest of the backward pass, which is about
two thirds of a step. How much really hides is not known beforehand: the prediction takes half of what could, and its
interval reaches from nothing to all.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import scipy

from paceline.tasks.errors import InputError
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.speedup.forecast.links import all_reduce_seconds
from paceline.tasks.speedup.forecast.records import (
    Bound,
    CheapestChoice,
    DeviceProfile,
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
MODEL_ERROR = 0.045
"""Half-width of what the model itself leaves out on several devices (2 %), and of what differs between two starts of
the same process: a standard deviation of about 1.5 % each (infra/LOG.md)."""
UNSEEN_ERROR = 0.1
"""The same where only one device was profiled: several have cost each other 5 to 20 % of a step (infra/LOG.md)."""
MIN_EXCHANGE = 0.2  # smallest share of the link's time that an exchange takes in a step, even if noise hides it
PAYING_FACTOR = 1.1  # doubling the devices pays while it gives at least this factor
MAX_DEVICES = 4096
MAX_LARGER = 1024  # times the batch of the profile, up to which batches are tried
TWO_SIGMA = 1.96
SECONDS_PER_HOUR = 3600.0

Floats = npt.NDArray[np.float64]


class Forecast:
    """Many profiles and links that the measurements leave possible; row 0 (D) holds the measured values themselves.

    Raises InputError: the profile has a single batch size.
    """

    def __init__(self, profile: DeviceProfile, link: Link) -> None:
        if len({point.batch_size for point in profile.points}) < 2:  # noqa: PLR2004  a line needs two points
            raise InputError("a profile of one batch size does not predict others; measure at least two")
        self.profile, self.link, rng = profile, link, np.random.default_rng(1)
        points = sorted(profile.points, key=lambda point: point.batch_size)
        self.sizes_P = np.array([point.batch_size for point in points], dtype=np.float64)
        self.seconds_DP = np.stack([_possible(rng, point.seconds) for point in points], axis=1)
        self.link_D = np.exp(_noise(rng) * np.log1p(link.relative_error) / TWO_SIGMA)
        self.model_D = np.exp(_noise(rng) * (MODEL_ERROR if profile.company else UNSEEN_ERROR) / TWO_SIGMA)
        self.hidden_D = np.concatenate([[0.5], rng.uniform(0, 1, NUM_DRAWS)])
        self.zero_D = np.zeros(NUM_DRAWS + 1)
        self.beyond_D = _noise(rng) / TWO_SIGMA
        self.overhead_D, self.slope_D = self._line()
        company = profile.company or ()
        self.company_sizes = [interference.batch_size for interference in company]
        least_D = MIN_EXCHANGE * all_reduce_seconds(link, 2, profile.gradient_bytes) * self.link_D
        self.contention_CD, self.free_CD, self.lost_CD, self.beyond_link_CD = (list[Floats]() for _ in range(4))
        for interference in company:  # the parts of a step on two devices, which add up to it
            step_D, alone_D = _possible(rng, interference.step_seconds), self.step(interference.batch_size)
            free_D = np.minimum(alone_D * _possible(rng, interference.contention), step_D - least_D)
            without_D = free_D * _possible(rng, interference.waiting) - interference.token_seconds
            exchange_D = np.clip(step_D - without_D, least_D, step_D - free_D)
            self.contention_CD.append(np.maximum(free_D / alone_D, 1e-9))
            self.free_CD.append(free_D)
            self.lost_CD.append(step_D - exchange_D - free_D)  # by waiting
            self.beyond_link_CD.append(exchange_D - least_D / MIN_EXCHANGE)  # what it takes longer than on the link
        # Scatter per second of a step: what waiting grows by between the smallest and the largest batch. A part that
        # noise makes negative stays so, or the interval would be cut on one side.
        self.slack_D = self.zero_D
        if company:
            self.slack_D = (self.lost_CD[-1] - self.lost_CD[0]) / (self.free_CD[-1] - self.free_CD[0])

    def _line(self) -> tuple[Floats, Floats]:
        """Overhead and seconds per sample by least squares of the relative errors, neither below 0."""
        weights_DP = 1 / self.seconds_DP
        design_DPK = np.stack([weights_DP, self.sizes_P * weights_DP], axis=2)
        normal_DKK = np.einsum("dpk,dpl->dkl", design_DPK, design_DPK)
        solution_DK = np.linalg.solve(normal_DKK, design_DPK.sum(axis=1)[..., None])[..., 0]
        overhead_D, slope_D = solution_DK[:, 0], solution_DK[:, 1]
        slope_D = np.where(overhead_D < 0, (self.seconds_DP / self.sizes_P).mean(axis=1), slope_D)  # through zero
        return np.maximum(overhead_D, 0.0), np.maximum(slope_D, 0.0)

    def step(self, batch_size: float) -> Floats:
        """Step seconds of one device: between measured sizes on the line between neighbours, beyond them on the fit."""
        smallest, largest = self.sizes_P[0], self.sizes_P[-1]
        if smallest <= batch_size <= largest:
            return _between(self.sizes_P, self.seconds_DP.T, batch_size)
        edge = smallest if batch_size < smallest else largest
        at_edge_D = _between(self.sizes_P, self.seconds_DP.T, edge)
        line_D = self.overhead_D + self.slope_D * batch_size
        shifted_D = line_D * at_edge_D / (self.overhead_D + self.slope_D * edge)  # no jump at the edge
        doublings = abs(np.log2(batch_size / edge))
        return np.asarray(shifted_D * np.exp(self.beyond_D * EXTRAPOLATION_ERROR * doublings))

    def predict(
        self, num_devices: int, scaling: ScalingKind, batch_size: int | None = None, price: float | None = None
    ) -> Prediction:
        """Speedup of N devices over one, with its 95 % interval; `batch_size` in place of the profile's.

        Under strong scaling the global batch stays the recipe's; under weak scaling each device has it. The price is
        that of one device for one hour. Raises InputError: fewer samples in a global batch than devices, or no device.
        """
        profile, several = self.profile, num_devices > 1
        batch_size = profile.batch_size if batch_size is None else batch_size
        times = num_devices if scaling == "weak" else 1
        local = _local_batch(batch_size, num_devices, scaling)
        one_D, compute_D, exchange_D, waiting_D = self.step(batch_size), self.step(local), self.zero_D, self.zero_D
        if several:
            exchange_D = all_reduce_seconds(self.link, num_devices, profile.gradient_bytes) * self.link_D
        if several and self.company_sizes:
            growth = expected_largest(num_devices) / expected_largest(2)
            compute_D = compute_D * self._in_company(self.contention_CD, local)
            scatter_D = self.slack_D * (growth * compute_D - self._in_company(self.free_CD, local))
            waiting_D = np.maximum(self._in_company(self.lost_CD, local) + scatter_D, 0.0)
            beyond_link_D = self._in_company(self.beyond_link_CD, local)
            exchange_D = np.maximum(exchange_D + beyond_link_D, MIN_EXCHANGE * exchange_D)
        exposed_D = exchange_D
        if profile.gradient_bytes > BUCKET_BYTES:
            coverable_D = exchange_D * (1 - BUCKET_BYTES / profile.gradient_bytes)
            exposed_D = exchange_D - self.hidden_D * np.minimum(coverable_D, BACKWARD_SHARE * compute_D)
        step_D = (compute_D + waiting_D + exposed_D) * (self.model_D if several else 1.0)
        ratio_D = times * one_D / step_D
        low, high = np.quantile(ratio_D[1:], [0.025, 0.975])
        num_steps = profile.num_train / (batch_size * times)  # of an epoch
        if profile.num_steps is not None:
            num_steps = profile.num_steps / profile.num_epochs
        epoch = float(step_D[0]) * num_steps
        total = epoch * profile.num_epochs
        device_hours = num_devices * total / SECONDS_PER_HOUR
        overhead, compute = float(self.overhead_D[0]), float(compute_D[0])
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
            device_hours=device_hours,
            cost=None if price is None else price * device_hours,
        )

    def limits(self, scaling: ScalingKind) -> Limits:
        """Where adding devices stops paying, over powers of two."""
        ratios, paying = {number: one.ratio for number, one in self._on_powers(scaling).items()}, 1
        while 2 * paying in ratios and ratios[2 * paying] >= PAYING_FACTOR * ratios[paying]:
            paying *= 2
        share = 2 if scaling == "strong" else 1
        batches = _powers_of_two(self.profile.batch_size * MAX_LARGER)  # samples per device and step
        batch = next((size for size in batches if self.predict(2, scaling, size * share).ratio > 1), 0)
        return Limits(
            scaling=scaling,
            best_num_devices=max(ratios, key=lambda number: ratios[number]),
            last_paying_num_devices=paying,
            smallest_paying_batch_size=None if batch == 1 else batch,  # None: always, 0: never
        )

    def cheapest(self, scaling: ScalingKind, deadline_seconds: float, price: float | None = None) -> CheapestChoice:
        """The number of devices, a power of two, with the fewest device-hours that meets a deadline."""
        predictions = self._on_powers(scaling, price).values()
        meeting = [prediction for prediction in predictions if prediction.total_seconds <= deadline_seconds]
        best = min(meeting, key=lambda prediction: prediction.device_hours, default=None)
        return CheapestChoice(
            deadline_seconds=deadline_seconds,
            num_devices=best.num_devices if best else None,
            total_seconds=best.total_seconds if best else None,
            device_hours=best.device_hours if best else None,
            cost=best.cost if best else None,
        )

    def _on_powers(self, scaling: ScalingKind, price: float | None = None) -> dict[int, Prediction]:
        """Predictions for the powers of two, by the number of devices."""
        most = MAX_DEVICES if scaling == "weak" else min(MAX_DEVICES, self.profile.batch_size)
        return {number: self.predict(number, scaling, price=price) for number in _powers_of_two(most)}

    def _in_company(self, values_CD: list[Floats], batch_size: float) -> Floats:
        """On the lines between the batch sizes of two devices, and beyond them as at the nearest one."""
        sizes = self.company_sizes
        return _between(sizes, values_CD, min(max(batch_size, sizes[0]), sizes[-1]))


def _between(sizes: Sequence[float] | Floats, values_XD: Sequence[Floats] | Floats, size: float) -> Floats:
    """The value at a size on the line between its neighbours."""
    upper = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    return np.asarray((1 - share) * values_XD[upper - 1] + share * values_XD[upper])


def expected_largest(num: int) -> float:
    """Of `num` independent standard normal values, from 2 on (Blom 1958; within 5 % of the exact value)."""
    return float(scipy.special.ndtri((num - 0.375) / (num + 0.25)))


def _noise(rng: np.random.Generator) -> Floats:
    return np.concatenate([[0.0], rng.standard_normal(NUM_DRAWS)])


def _possible(rng: np.random.Generator, interval: Interval) -> Floats:
    """Lognormal around the value, as wide as the interval; an unknown interval is taken as 10 %."""
    reach = 0.1
    if interval.low is not None and interval.high is not None and interval.low > 0:
        reach = float(np.log(interval.high / interval.low)) / 2
    return np.asarray(interval.value * np.exp(_noise(rng) * reach / TWO_SIGMA))


def _local_batch(batch_size: int, num_devices: int, scaling: ScalingKind) -> int:
    """Samples per device and step; the largest share where the batch does not divide."""
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


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
