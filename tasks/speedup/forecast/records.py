"""Records of a forecast: the profile, the link, and the result for N devices."""

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.record import Record

Bound = Literal["compute", "communication", "overhead"]
ScalingKind = Literal["strong", "weak"]


class Link(Record):
    """A connection between devices as the alpha-beta model sees it: a message of m bytes takes alpha + beta m."""

    name: str
    latency_seconds: float  # alpha, per message
    seconds_per_byte: float  # beta; 1 / bandwidth
    relative_error: float = 0.0  # half-width of the 95 % interval of a predicted all-reduce time, relative
    source: Literal["measured", "given"]


class ProfilePoint(Record):
    """Step time of one device at one batch size, all-reduce excluded."""

    batch_size: int  # samples per device and step
    seconds: Interval  # per step: data, forward, backward, update


class Interference(Record):
    """Slowdown of two devices together at one batch size."""

    batch_size: int  # samples per device and step
    contention: Interval
    """While the other device of the host computes too, over a device alone: above 1 if they share memory or clock."""
    waiting: Interval  # when they wait for each other in every step and exchange a single number, over that
    token_seconds: float  # the all-reduce of that single number
    step_seconds: Interval  # of a step as in training, with the exchange of the gradients


class DeviceProfile(Record):
    """Step times of one device."""

    points: tuple[ProfilePoint, ...]  # at least two batch sizes
    gradient_bytes: int  # bytes all-reduced per step
    batch_size: int  # the recipe's, samples per device and step under weak scaling, per step under strong scaling
    num_train: int
    num_epochs: int
    num_steps: int | None = None  # of a training that takes as many on several devices as on one; else None
    company: tuple[Interference, ...] | None = None
    """Two devices at two or more batches, the smallest first; None where only one was profiled."""
    label: str  # the execution that was profiled, in words
    num_threads: int | None = None  # threads of a device on a CPU, which is a share of the cores; None on a GPU


class Prediction(Record):
    """Forecast for N devices."""

    num_devices: int
    scaling: ScalingKind
    # Speedup over one device and its 95 % interval; weak: in samples per second.
    ratio: float
    low: float
    high: float
    efficiency: float
    step_seconds: float
    communication_seconds: float  # of the all-reduce per step, all of it; what backward hides is not subtracted
    waiting_seconds: float  # per step, for the slowest device and the engine
    epoch_seconds: float
    bound: Bound  # the largest part of the step
    total_seconds: float  # all epochs
    device_hours: float
    cost: float | None = None


class Limits(Record):
    """Where adding devices stops paying."""

    scaling: ScalingKind
    best_num_devices: int  # with the largest predicted speedup among powers of two up to 4,096
    last_paying_num_devices: int
    """Largest power of two at which doubling the devices still gave at least 1.1 times the speedup."""
    smallest_paying_batch_size: int | None
    """Samples per device and step below which two devices are slower than one; None: two always pay, 0: never."""


class Advice(Record):
    """One step that may be taken next, with the gain expected of it."""

    setting: str  # `key=value`
    # Expected gain in throughput and its 95 % interval; None where it was not measured.
    ratio: float | None
    low: float | None
    high: float | None
    reason: str


class CheapestChoice(Record):
    """The fewest device-hours that meet a deadline."""

    deadline_seconds: float
    num_devices: int | None  # None when no number of devices meets it
    total_seconds: float | None
    device_hours: float | None
    cost: float | None


class AdviseResult(Record):
    """The outcome of `paceline advise`."""

    run_id: str
    experiment: str
    preset: str
    workload: str
    profile: DeviceProfile
    link: Link
    predictions: tuple[Prediction, ...]
    limits: tuple[Limits, ...]
    bound: Bound  # at the largest requested number of devices, strong scaling
    advice: tuple[Advice, ...]
    cheapest: CheapestChoice | None
    seconds: float


class Check(Record):
    """A forecast compared with a later measurement."""

    prediction_run_id: str
    run_id: str
    num_devices: int
    predicted: float
    low: float
    high: float
    measured: float
    error: float  # predicted / measured - 1
    inside: bool  # the measured value lay in the predicted interval
    measured_at: float  # Unix time


def check(prediction: Prediction, prediction_run_id: str, run_id: str, measured: float, measured_at: float) -> Check:
    """Hold a prediction against a measured speedup over one device."""
    return Check(
        prediction_run_id=prediction_run_id,
        run_id=run_id,
        num_devices=prediction.num_devices,
        predicted=prediction.ratio,
        low=prediction.low,
        high=prediction.high,
        measured=measured,
        error=prediction.ratio / measured - 1,
        inside=prediction.low <= measured <= prediction.high,
        measured_at=measured_at,
    )


def calibration(checks: Sequence[Check]) -> dict[str, Any]:
    """Calibration of forecasts: errors, and the share inside their intervals with its Wilson interval (1927)."""
    if not checks:
        return {"num_checks": 0, "verdict": "no prediction has been checked yet"}
    errors = [check.error for check in checks]
    num_inside = sum(check.inside for check in checks)
    from scipy import stats  # SciPy's distributions: a second

    share = stats.binomtest(num_inside, len(checks)).proportion_ci(method="wilson")
    mean = statistics.fmean(abs(error) for error in errors)
    plural = "s" if len(checks) > 1 else ""
    return {
        "num_checks": len(checks),
        "mean_error": statistics.fmean(errors),
        "mean_absolute_error": mean,
        "share_inside": num_inside / len(checks),
        "share_inside_low": float(share.low),
        "share_inside_high": float(share.high),
        "verdict": f"{len(checks)} prediction{plural} checked: {mean:.1%} mean absolute error, "
        f"{num_inside} of {len(checks)} inside their interval",
    }
