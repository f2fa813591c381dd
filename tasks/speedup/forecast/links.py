"""Time of an all-reduce on a link: the alpha-beta model of a ring, fitted to measurements or given.

A ring all-reduce of m bytes over N devices takes 2 (N - 1) messages of m / N bytes one after another:

    T(N, m) = 2 (N - 1) alpha + 2 (N - 1) / N m beta

(Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009, who show that its bandwidth is optimal.)
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy

from paceline.tasks.errors import InputError
from paceline.tasks.records.measurement import AllReduceTime
from paceline.tasks.speedup.forecast.records import Link

MIN_RELATIVE_ERROR = 0.05
"""Smallest half-width that is claimed for a predicted all-reduce: a link is shared, and repeats differ by as much."""
GIVEN_RELATIVE_ERROR = 0.3
"""Of a link that was not measured here: libraries and topologies reach between half of a figure and all of it."""


def _unmeasured_link(name: str, latency_seconds: float, gigabytes_per_second: float) -> Link:
    beta, error = 1 / (gigabytes_per_second * 1e9), GIVEN_RELATIVE_ERROR
    return Link(name=name, latency_seconds=latency_seconds, seconds_per_byte=beta, relative_error=error, source="given")


# Bandwidths are what a collective reaches, about 80 % of one direction of the vendor's figure (NVIDIA H100 datasheet:
# NVLink 4 900 GB/s both ways; PCI-SIG: PCIe 4.0 x16 31.5 GB/s; InfiniBand HDR 200 Gbit/s). Latencies are those of one
# step of a collective: 10 us inside a host, 5 us by RDMA, 30 us and more through TCP.
LINKS: dict[str, Link] = {
    name: _unmeasured_link(name, microseconds * 1e-6, gigabytes_per_second)
    for name, microseconds, gigabytes_per_second in (
        ("nvlink", 10.0, 360.0),
        ("pcie4", 12.0, 20.0),
        ("infiniband", 5.0, 20.0),
        ("ethernet100", 30.0, 9.0),
        ("ethernet25", 30.0, 2.4),
        ("ethernet10", 40.0, 1.0),
    )
}


def given_link(latency_seconds: float | None, gigabytes_per_second: float | None) -> Link:
    """A link as the user describes it. Raises InputError: a value is missing or impossible."""
    if latency_seconds is None or gigabytes_per_second is None:
        raise InputError(
            "--link given needs --latency and --bandwidth",
            hint="for example --latency 30e-6 --bandwidth 10",
            setting="--link",
        )
    if not 0 <= latency_seconds < math.inf:
        raise InputError(
            f"--latency must be 0 or more seconds, got {latency_seconds:g}",
            hint="give seconds per message, for example --latency 30e-6",
            setting="--latency",
        )
    if not 0 < gigabytes_per_second < math.inf:
        raise InputError(f"--bandwidth {gigabytes_per_second:g} is not above 0; give gigabytes per second, such as 10")
    return _unmeasured_link("given", latency_seconds, gigabytes_per_second)


def fit_link(samples: Sequence[AllReduceTime]) -> Link:
    """Alpha and beta >= 0 by least squares of relative errors. Raises InputError: too few sizes, or a bad time."""
    if len({sample.num_bytes for sample in samples}) < 2:  # noqa: PLR2004  two unknowns
        raise InputError(f"{len(samples)} all-reduces of one size do not give a latency and a bandwidth; measure two")
    for sample in samples:
        if sample.num_devices < 2 or not sample.seconds > 0:  # noqa: PLR2004  one device has nobody to exchange with
            raise InputError(
                f"all-reduce of {sample.num_bytes} bytes on {sample.num_devices} devices took {sample.seconds} s"
            )
    from scipy import optimize  # a tenth of a second, for few runs

    design = np.array([_terms(sample.num_devices, sample.num_bytes) for sample in samples])
    scaled = design / np.array([sample.seconds for sample in samples])[:, None]
    norms = scaled.max(axis=0)  # the two unknowns differ by orders of magnitude
    solution = optimize.nnls(scaled / norms, np.ones(len(samples)))[0] / norms
    relative_error, freedom = GIVEN_RELATIVE_ERROR, len(samples) - 2
    if freedom >= 1:
        spread = float(np.sqrt(np.sum((scaled @ solution - 1) ** 2) / freedom))
        relative_error = max(MIN_RELATIVE_ERROR, min(1.0, float(scipy.special.stdtrit(freedom, 0.975)) * spread))
    alpha, beta = solution.tolist()
    return Link(
        name="measured",
        latency_seconds=alpha,
        seconds_per_byte=beta,
        relative_error=relative_error,
        source="measured",
    )


def _terms(num_devices: int, num_bytes: float) -> tuple[float, float]:
    steps = 2.0 * (num_devices - 1)
    return steps, steps / num_devices * num_bytes


def all_reduce_seconds(link: Link, num_devices: int, num_bytes: float) -> float:
    """Time of one ring all-reduce; 0 on one device."""
    latency, volume = _terms(num_devices, num_bytes)
    return latency * link.latency_seconds + volume * link.seconds_per_byte
