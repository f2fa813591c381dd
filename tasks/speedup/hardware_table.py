"""Comparison of devices on the same work, from existing runs: speed, memory, energy, price.

Runs are put side by side only where they did the same work with the same code; device and execution may differ. Of
several executions on one number of devices the fastest stands for the hardware. Knows nothing of stores and pages.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np
from pydantic import Field

from paceline.tasks.records.record import Record
from paceline.tasks.speedup.comparability import UNKNOWN
from paceline.tasks.speedup.study.analysis import SECONDS_PER_HOUR, median_known

FREE = ("execution.", "arithmetic", "data.root", "model.pretrained", "device")  # prefixes of facts that may differ
MIN_REPEATS = 2  # runs of each side, for an interval
MAX_CODE = 12  # characters of a commit that are shown
BUILD = re.compile(r"\+[\w.]+")  # of a version: 2.13.0+cpu and 2.13.0+cu130 are one release, built for other devices


class HardwareFigures(Record):
    """Figures of a run, or their medians over runs; None for unknown."""

    fixed_seconds: float | None = None
    """Of the wall time, what does not grow with the samples: start-up, setting up, evaluation, accounting; without
    preparation, search and probe, which a second run of the same does not have."""
    peak_memory_bytes: float | None = None
    joules_per_sample: float | None = None
    prediction_samples_per_second: float | None = None  # over the test split, over all devices
    of_limit: float | None = None
    mfu: float | None = None
    """Floating-point operations per second of one device, over its measured limit and over its data sheet."""


class HardwareRun(HardwareFigures):
    """One finished, undisturbed run."""

    run_id: str
    facts: dict[str, str]  # what a match verdict looks at
    num_devices: int
    execution: str  # in words
    samples_per_second: float  # over all devices
    price_per_device_hour: float | None


class HardwareRow(HardwareFigures):
    """One model of device in some number, with its fastest execution and the medians over its runs."""

    device: str
    num_devices: int
    execution: str
    num_runs: int
    samples_per_second: float  # median over the runs
    speedup: float  # over the slowest row of the same work
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval of `speedup` (Welch's t on the logarithms); None below two runs on either side."""
    price_per_million_samples: float | None = None  # of training, without what is fixed

    @property
    def label(self) -> str:
        """Number and model of the devices."""
        return f"{self.num_devices} x {self.device}"


class BreakEven(Record):
    """From which size of the work on one hardware is the better one."""

    small: str  # label of what is better below
    large: str  # label of what is better above
    by: str  # `time` or `price`
    num_samples: float  # passed in training, over all epochs; 0 where `large` is better at any size

    @property
    def sentence(self) -> str:
        """For people."""
        word = "cheaper" if self.by == "price" else "done sooner"
        if not self.num_samples:
            return f"{self.large} is {word} than {self.small} at any size."
        return f"From {self.num_samples:,.0f} samples on {self.large} is {word} than {self.small}."


class WorkTable(Record):
    """All hardware that did one work."""

    work: str  # in words
    rows: tuple[HardwareRow, ...]  # the slowest first
    break_evens: tuple[BreakEven, ...] = ()


class HardwareTable(Record):
    """All work that was done on some hardware."""

    tables: tuple[WorkTable, ...]  # work that several kinds of hardware did first, the newest first among equals
    num_runs: int
    left_out: dict[str, int] = Field(default_factory=dict)  # runs that are in no table, by reason


def tabulate(runs: Sequence[HardwareRun], left_out: Mapping[str, int], prices: Mapping[str, float]) -> HardwareTable:
    """Put runs into tables."""
    groups: dict[tuple[tuple[str, str], ...], list[HardwareRun]] = defaultdict(list)
    for run in runs:
        groups[_work(run.facts)].append(run)
    shared = set.intersection(*map(set, groups)) if groups else set()
    tables = [_table(_words(work, shared), members, prices) for work, members in groups.items()]
    return HardwareTable(
        tables=tuple(sorted(tables, key=lambda table: len(table.rows) < 2)),  # noqa: PLR2004  a table of one says little
        num_runs=len(runs),
        left_out=dict(left_out),
    )


def same_work(runs: Sequence[HardwareRun], facts: Mapping[str, str]) -> list[HardwareRun]:
    """The runs that did the work that facts describe, on any hardware."""
    work = _work(facts)
    return [run for run in runs if _work(run.facts) == work]


def _work(facts: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Facts that must be equal, sorted; one entry per package."""
    fixed = {name: value for name, value in facts.items() if not name.startswith((*FREE, "versions"))}
    packages = BUILD.sub("", facts.get("versions", "")).split(", ")
    return tuple(sorted(fixed.items()) + [("", package) for package in packages if package])


def _words(work: tuple[tuple[str, str], ...], shared: set[tuple[str, str]]) -> str:
    """Data, model and recipe, and the differences to the other works of the same table."""
    facts = dict(work)
    named = ("data.source", "model.name", "recipe.num_epochs", "global_batch_size")
    source, model, epochs, batch = (facts.get(name, UNKNOWN) for name in named)
    apart = [
        f"{name} {value[:MAX_CODE] if name == 'code' else value}".strip()
        for name, value in work
        if (name, value) not in shared and name not in named
    ]
    return f"{source}, {model}, {epochs} epochs of batches of {batch}" + (f"; {', '.join(apart)}" if apart else "")


def _table(work: str, runs: Sequence[HardwareRun], prices: Mapping[str, float]) -> WorkTable:
    places: dict[tuple[str, int], dict[str, list[HardwareRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        places[run.facts.get("device", UNKNOWN), run.num_devices][run.execution].append(run)
    fastest = {place: max(executions.values(), key=_rate) for place, executions in places.items()}
    order = sorted(fastest, key=lambda place: _rate(fastest[place]))
    base = fastest[order[0]]
    rows = tuple(_row(device, number, fastest[device, number], base, prices) for device, number in order)
    return WorkTable(work=work, rows=rows, break_evens=tuple(_break_evens(rows)))


def _rate(runs: Sequence[HardwareRun]) -> float:
    return median(run.samples_per_second for run in runs)


def _row(
    device: str, number: int, runs: Sequence[HardwareRun], base: Sequence[HardwareRun], prices: Mapping[str, float]
) -> HardwareRow:
    rate = _rate(runs)
    low, high = (None, None) if runs is base else ratio_interval(runs, base)
    price = next((listed_price for name, listed_price in prices.items() if name.lower() in device.lower()), None)
    if price is None:
        price = median_known([run.price_per_device_hour for run in runs])
    medians = {name: median_known([getattr(run, name) for run in runs]) for name in HardwareFigures.model_fields}
    return HardwareRow(
        device=device,
        num_devices=number,
        execution=runs[0].execution,
        num_runs=len(runs),
        samples_per_second=rate,
        speedup=rate / _rate(base),
        low=low,
        high=high,
        price_per_million_samples=None if price is None else price * number / SECONDS_PER_HOUR / rate * 1e6,
        **medians,
    )


def ratio_interval(runs: Sequence[HardwareRun], base: Sequence[HardwareRun]) -> tuple[float | None, float | None]:
    """Ends of the 95 % interval of the ratio of two rates, from runs that have nothing to do with each other.

    Welch (1947): the difference of two means whose variances differ, here of logarithms.
    """
    if min(len(runs), len(base)) < MIN_REPEATS:
        return None, None
    from scipy import stats  # half a second, for few runs

    ours, theirs = (np.log([run.samples_per_second for run in side]) for side in (runs, base))
    if not (np.ptp(ours) or np.ptp(theirs)):
        return None, None
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(math.exp(interval.low)), float(math.exp(interval.high))


def _break_evens(rows: Sequence[HardwareRow]) -> Iterator[BreakEven]:
    """For each two rows of which one has the lower fixed cost and the other the lower cost of a sample."""
    for pair in combinations(rows, 2):
        if any(row.fixed_seconds is None for row in pair):
            continue
        times = [(row.label, row.fixed_seconds or 0.0, 1.0 / row.samples_per_second) for row in pair]
        yield _break_even("time", *times)
        costs = []
        for row in pair:  # the price is that of the time that the devices are held
            if row.price_per_million_samples is not None:
                price = row.price_per_million_samples / 1e6
                costs.append((row.label, (row.fixed_seconds or 0.0) * price * row.samples_per_second, price))
        if len(costs) == len(pair):
            yield _break_even("price", *costs)


def _break_even(by: str, first: tuple[str, float, float], second: tuple[str, float, float]) -> BreakEven:
    """The size at which two straight lines meet."""
    # Of two that cost the same per sample, the one that costs more to start is never the better one.
    steep, flat = sorted((first, second), key=lambda line: (line[2], line[1]), reverse=True)
    size = (flat[1] - steep[1]) / (steep[2] - flat[2]) if flat[1] > steep[1] else 0.0
    return BreakEven(small=steep[0], large=flat[0], by=by, num_samples=size)
