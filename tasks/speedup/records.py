"""The speedup of a run."""

from typing import Literal

from pydantic import Field

from paceline.conf.config import RatioName
from paceline.tasks.records.measurement import Validity
from paceline.tasks.records.record import Record

Basis = Literal["mean over the orders", "added alone", "added last", "in the search", "unchanged", "not measured"]


class Factor(Record):
    """One factor between the baseline and a run."""

    factor: str  # key of `FACTORS`
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """Throughput with the factor over that without it, with its 95 % interval; None where not measured singly."""
    basis: Basis
    """How it was measured: as a mean over the orders of a ladder, added to the baseline alone, added to the run's other
    factors, or in `auto`'s search before the training, where it alone changed."""


class FactorCard(Record):
    """What each factor between the baseline and a run is worth."""

    method: str  # `Shapley value over N orders`, whose ratios multiply to the run's in each round, or `one at a time`
    factors: tuple[Factor, ...]  # in the order from naive to the run, unchanged ones too
    interaction: float | None = None
    interaction_low: float | None = None
    interaction_high: float | None = None
    """Ratio of loading, layout and precision together over the product of each alone; None where an arm is missing."""


class VarianceComponents(Record):
    """Variances of the log-ratio by level, each without those of the levels below; None where unknown."""

    process: float | None = None  # from one start to the next
    block: float | None = None  # from round to round inside a process; with that of the steps where `step` is unknown
    step: float | None = None  # of one step of each arm inside a block


class Ratio(Record):
    """A ratio, and what it means."""

    value: float | None = None
    low: float | None = None  # ends of the 95 % interval
    high: float | None = None
    meaning: str  # one sentence with the figures, or why the ratio is not known


class SpeedupResult(Record):
    """The `speedup` part of a run's summary. None where not measured."""

    ratio: float | None = None  # candidate's throughput over the baseline's, steady state: ratio of total times
    low: float | None = None  # ends of the 95 % interval of `ratio`
    high: float | None = None
    scope: Literal["within this process", "across starts"] | None = None
    """What the interval holds for: repetitions in this process, or further starts too. None without a probe."""
    starts: Literal["measured", "borrowed"] | None = None
    """Where the variance between starts is from: further processes of this run, or earlier starts of the series."""
    num_starts: int = 0  # starts that show the variance between starts: processes of this run, or earlier ones
    starts_reason: str = ""  # why further processes were, or were not, measured
    start_ratios: tuple[float, ...] = ()
    start_rounds: tuple[int, ...] = ()
    """Ratio and rounds of each measured process, this one first; empty where the variance was not measured."""
    variance: VarianceComponents | None = None
    process_ratio: float | None = None  # ratio and interval within this process
    process_low: float | None = None
    process_high: float | None = None
    typical_ratio: float | None = None
    typical_low: float | None = None
    typical_high: float | None = None
    """Ratio of the typical (median) steps, with its 95 % interval. It differs from `ratio`, which is of total times,
    where some steps take much longer than others."""
    autocorrelation: float | None = None  # lag-1, of the rounds' ratios; above 0 it has widened the interval
    num_warm_up: int = 0  # paired rounds that were left out of both arms as warm-up
    carry_over: float | None = None
    """Share by which the ratio is too high because what ran before an arm changes its time; negative for too low."""
    carry_over_p: float | None = None  # p-value of `carry_over`; from 0.05 down the interval is widened by it
    num_blocks: int = 0  # paired rounds behind the ratio; 0 where it was divided by other runs
    significant: bool | None = None
    """Whether the interval excludes 1. None without an interval, and where it holds within this process alone: nothing
    is significant across runs by one start."""
    significant_within_process: bool | None = None  # whether the interval within this process excludes 1
    efficiency: float | None = None
    """Parallel efficiency: throughput on N devices over N times that of one device, same execution otherwise."""
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    verdict: str = "not measured"  # one sentence with the cause
    cause: str | None = None
    bottleneck: str | None = None
    """What limits the step, whatever the cause: its largest measured share, or inferred without a diagnosis."""
    baseline: str | None = None  # what the run was divided by, in words
    candidate: str | None = None
    baseline_arithmetic: str | None = None
    candidate_arithmetic: str | None = None
    """Arithmetic of matrix products and convolutions on GPUs, with cuDNN's mode; None on CPUs and where unknown."""
    baseline_samples_per_second: float | None = None  # steady-state throughput of the two arms, over all their devices
    candidate_samples_per_second: float | None = None
    diverged: tuple[str, ...] = ()  # arms of the probe whose loss was not a finite number
    contaminated: bool | None = None
    validity: Validity | None = None  # of the machine during the probe
    shares: dict[str, tuple[float, float | None, float | None]] = Field(default_factory=dict)
    """Of the candidate's step, with the ends of the 95 % interval: `input`, `communication`, `imbalance`, `contention`,
    `update`, `overhead` and the remainder `compute`; empty without the arms of `speedup.diagnose`."""
    diagnosis: tuple[str, ...] = ()  # one sentence for each share, the largest first
    factors: FactorCard | None = None  # what each factor is worth; None where the ratio is not of a probe
    of_limit: float | None = None  # this and the next two as in `LimitShare`
    of_bandwidth: float | None = None
    bound: Literal["memory"] | None = None
    ratios: dict[RatioName, Ratio] = Field(default_factory=dict)
    """Over the naive baseline (`ratio` with its sentence), over a competent loop, end to end, and of the limit."""
    headline: RatioName | None = None  # the one in the headline; None where none is known
    equal_hardware: Ratio | None = None  # throughput of N ranks on CPUs over that of one rank on all their cores
    baseline_runs: tuple[str, ...] = ()
    """Ids of the runs that it was divided by, the newest first; empty where the baseline is an arm of its own probe."""
