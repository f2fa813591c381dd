"""Share of a device's limit that a training step reaches in steady state.

Achieved FLOP/s are the operations that the network needs for a sample, forward and backward, times the samples per
second of one device. They are divided by what the same device did in a matrix product of the same precision. Kernels
that need fewer operations than the definition (Winograd) can lift the share above 1.
"""

from typing import Literal

from paceline.tasks.formatting import number_text
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import Trained
from paceline.tasks.speedup.data_sheet import sheet_of
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import steady_rate

SHARES = ("flops_per_second", "bytes_per_second", "mfu", "why_no_share")
"""Fields of a share that are in the summary of a training; `add_share` gives the others to the speedup."""


class LimitShare(Record):
    """Rates of one device in a training step, and their shares of its limit; None for unknown."""

    precision: str = ""
    flops_per_second: float | None = None
    bytes_per_second: float | None = None  # at least: what a step moves through the memory if nothing is moved twice
    of_limit: float | None = None  # `flops_per_second` over the device's measured rate of a matrix product
    of_bandwidth: float | None = None  # `bytes_per_second` over the device's measured rate of a copy; a lower bound
    bound: Literal["memory"] | None = None
    """`memory` where that limit is nearer than the one of arithmetic. None says neither: the traffic may be larger."""
    mfu: float | None = None  # model FLOP utilisation: `flops_per_second` over the peak in the maker's data sheet
    limit_flops_per_second: float | None = None  # measured, at this precision
    limit_bytes_per_second: float | None = None
    contaminated: bool | None = None  # whether other work disturbed the measurement of the limit
    why_no_share: str = ""  # why `of_limit` is None


def limit_share(train: Trained) -> LimitShare:
    """The share that a training reached, by its probe's step time where it has a probe."""
    if train.cost is None:
        return LimitShare(why_no_share=train.uncounted or "not counted")
    if train.probe is not None:  # samples per second of one device
        rate = 1 / train.probe.seconds_per_sample("candidate") / train.probe.candidate.num_devices
    else:
        rate = (steady_rate(train) or train.samples_per_second or 0.0) / train.world_size
    execution = train.plan or (train.probe.candidate if train.probe else None)
    if execution is None or not rate:
        return LimitShare(why_no_share="no step was timed")
    precision, flops = execution.precision, train.cost.training_flops * rate
    bytes_moved = None if train.bytes_per_sample is None else train.bytes_per_sample * rate
    share = LimitShare(precision=precision, flops_per_second=flops, bytes_per_second=bytes_moved)
    if train.limit is None or precision not in train.limit.flops_per_second:
        return share.model_copy(update={"why_no_share": train.uncounted or "the device's limit was not measured"})
    peak, sheet = train.limit.flops_per_second[precision], sheet_of(train.limit.device_name)
    sheet_peak = sheet.peaks.get(precision) if sheet else None
    of_limit = flops / peak
    share = share.model_copy(
        update={
            "mfu": None if sheet_peak is None else flops / sheet_peak,
            "contaminated": train.limit.contaminated,
        }
    )
    if train.limit.contaminated and of_limit > 1:
        why = "the machine was busy when the device's limit was measured, and the training was faster than that limit"
        return share.model_copy(update={"why_no_share": why})
    of_bandwidth = None if bytes_moved is None else bytes_moved / train.limit.bytes_per_second
    return share.model_copy(
        update={
            "of_limit": of_limit,
            "of_bandwidth": of_bandwidth,
            "bound": "memory" if (of_bandwidth or 0.0) > of_limit else None,
            "limit_flops_per_second": peak,
            "limit_bytes_per_second": train.limit.bytes_per_second,
        }
    )


def add_share(speedup: SpeedupResult, share: LimitShare) -> SpeedupResult:
    """The speedup with the share of the limit."""
    return speedup.model_copy(update=share.model_dump(include={"of_limit", "of_bandwidth", "bound"}))


def format_flops(rate: float) -> str:
    """A rate of floating-point operations for people: 123 GFLOP/s, 4.56 TFLOP/s."""
    unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)  # noqa: PLR2004
    return f"{rate / size:.3g} {unit}"


def format_share(share: float | None) -> str:
    """A share for people, with a decimal below a tenth; a dash for unknown."""
    return number_text(share, ".0%" if (share or 0.0) >= 0.1 else ".1%")  # noqa: PLR2004
