"""The records of a study: its arms, their runs, and what was found. Knows nothing of how they are run or drawn."""

from typing import Literal

from pydantic import ConfigDict, Field

from paceline.conf.lightning import Objective
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import CompileStats

Parity = Literal["on par", "better", "worse", "undecided", "unknown"]


class FieldVerdict(Record):
    """One fact of two runs, compared."""

    field: str  # dotted setting, or one of: data, code, versions, device, arithmetic, global_batch_size
    verdict: Literal["same", "allowed", "breaks"]  # `allowed`: it may differ between compared runs, and does
    first: str
    second: str


class MatchVerdict(Record):
    """Whether two runs did the same work. Without a match no ratio is given anywhere."""

    matches: bool
    scaling: Literal["none", "strong", "weak"]  # how the batch follows the number of devices; `none` if that is equal
    fields: tuple[FieldVerdict, ...]

    @property
    def breaking(self) -> tuple[FieldVerdict, ...]:
        """The facts that forbid the comparison."""
        return tuple(field for field in self.fields if field.verdict == "breaks")


class StudyArm(Record):
    """One execution of a workload inside a study."""

    name: str  # the axes' values, such as "precision=bf16-mixed, num_devices=2"
    overrides: tuple[str, ...]  # `key=value` for each axis
    group: str
    """Values of the axes that change the workload; only arms of one group are compared. Empty with no such axis."""
    is_baseline: bool  # first value on every execution axis: the arm that the others of its group are divided by
    rung: int | None = None  # ladder: how many factors have been added; None for single factors, and on grids
    factor: str | None = None  # ladder: the factor that this arm adds to the rung below, or shows alone


class ArmRun(Record):
    """One training of one arm. None where unknown."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    arm: str  # `StudyArm.name`
    repeat: int  # from 0; the runs of one repeat stand next to each other in time, and share their seed
    position: int  # in the order in which the study ran them, from 0
    is_fresh: bool = False  # whether it measures a winner or its baseline again, for `ArmSummary.confirmation` alone
    run_id: str | None = None  # MLflow run, nested in the study's
    status: Literal["done", "failed"] = "done"
    error: str | None = None
    facts: dict[str, str] = Field(default_factory=dict)
    """What the match verdict compares: flattened settings, and data, code, versions, device, global_batch_size."""
    world_size: int = 1
    num_epochs: int = 0
    samples_per_second: float | None = None  # steady state: median over the windows after warm-up, over all devices
    flops_per_second: float | None = None  # floating-point operations of one device, steady state
    of_limit: float | None = None  # over what the device did in a matrix product of the same precision
    mfu: float | None = None  # over the peak in the device's data sheet
    epoch_seconds: float | None = None  # one epoch at steady state, validation and checkpoint included
    first_epoch_seconds: float | None = None  # the first epoch, compile and warm-up included
    startup_seconds: float | None = None  # process start to the first training step, probe excluded
    end_to_end_seconds: float | None = None  # process start to the end of training, probe excluded
    score_name: str = "accuracy"  # as `ScoreName`, or the metric of own Lightning code
    objective: Objective | None = None  # of own Lightning code: the metric that is its score; None without one
    score: float | None = Field(default=None, alias="accuracy")
    """On the test split; stored as `accuracy` whatever its name. Of own code as the module has logged it last."""
    num_test: int = 0
    num_gained: int | None = None  # test samples that are right here and wrong in the baseline's run of the same repeat
    num_lost: int | None = None  # the reverse
    score_difference: float | None = None
    """Where no sample is right or wrong as a whole: the score less that of the baseline's run of the same repeat. Of
    own code the gain as a share of the baseline's score."""
    score_error: float | None = None
    """Its standard error, the test samples being a sample; 0 of own code, whose samples have no known scores."""
    validation: tuple[tuple[float, float], ...] = ()  # (seconds since process start, validation score) after each epoch
    time_budget: dict[str, float] = Field(default_factory=dict)
    """Seconds per item, adding up to the wall time of rank 0."""
    data_wait_fraction: float | None = None
    communication_fraction: float | None = None
    idle_fraction: float | None = None
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    contaminated: bool | None = None
    contamination: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()  # files, one per rank
    prediction_samples_per_second: float | None = None  # over the test split, warmed up, over all devices
    compile: CompileStats | None = None
    cause: str | None = None  # what limits its step; of a training that was diagnosed
    shares: dict[str, tuple[float, float | None, float | None]] = Field(default_factory=dict)
    """Of its step, with the ends of their 95 % intervals, as `SpeedupResult.shares`."""


class ArmSummary(Record):
    """Result of one arm of a study. Ratios are the baseline's time over the arm's; None without a match."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    arm: StudyArm
    execution: dict[str, str]  # the settings of its axes, by dotted path
    num_devices: int
    num_done: int
    num_failed: int
    error: str | None  # of its last failed run
    match: MatchVerdict | None  # against the baseline of its group; None when one of the two has no run
    run_ids: tuple[str, ...]
    samples_per_second: float | None  # median over repeats, steady state
    flops_per_second: float | None = None  # this and the next four as of each run; medians over repeats
    of_limit: float | None = None
    mfu: float | None = None
    epoch_seconds: float | None
    end_to_end_seconds: float | None
    ratio: Interval | None  # steady state
    num_pairs: int  # repeats behind the ratio
    significant: bool | None  # whether the interval excludes 1 and the arm differs among all arms of the study (Holm)
    p_value: float | None = None  # of the ratio, adjusted for the number of arms
    confirmation: Interval | None = None
    """`ratio` of a winner among several arms, from fresh trainings: the fastest of many is partly the luckiest."""
    confirmed: bool | None = None  # whether fresh trainings show it faster; None without any
    end_to_end_ratio: Interval | None
    break_even_epochs: float | None
    """Epochs after which the arm has made up for its longer start-up, compile and warm-up; 0 when it has none to make
    up for, None when it never does or is not significantly faster."""
    break_even_low: float | None = None  # ends of its 95 % interval (Fieller); None where it is not bounded
    break_even_high: float | None = None
    efficiency: Interval | None
    """`ratio` divided by the arm's number of devices over the baseline's, for arms that differ in that number."""
    score: float | None = Field(alias="accuracy")
    """Mean over repeats, test split; stored as `accuracy` whatever its name."""
    accuracy_difference: Interval | None  # arm minus baseline, mean over repeats of the same seed
    parity: Parity
    parity_margin: float | None = None  # smallest margin, as a fraction, within which the data prove it to be on par
    seconds_to_target: float | None  # median over repeats that reached the study's target; None: fewer than half did
    data_wait_fraction: float | None
    communication_fraction: float | None
    idle_fraction: float | None
    peak_memory_bytes: int | None
    energy_joules_per_epoch: float | None
    cost_per_epoch: float | None  # in the unit of `speedup.price_per_device_hour`
    contaminated: int  # runs of it that were marked
    prediction_ratio: Interval | None = None  # of prediction, as `ratio` is of training
    hit_rate: float | None = None
    """Share of a compiled network's calls that found their graph ready, the lowest of its runs."""
    compile_seconds: float | None = None  # median over repeats, compiled from nothing
    cause: str | None = None  # what limits its step, with `--diagnose`
    shares: dict[str, tuple[float, float | None, float | None]] = Field(default_factory=dict)
    score_name: str | None = None  # None without a run


class Rung(Record):
    """One step of an attribution ladder."""

    factor: str
    contribution: Interval | None  # multiplies the throughput of the rung below
    alone: Interval | None  # against the baseline with only this factor added


class BudgetItem(Record):
    """One item of the difference between two time budgets."""

    item: str
    baseline_seconds: float
    seconds: float

    @property
    def difference(self) -> float:
        """Seconds that the arm takes longer; negative where it gained."""
        return self.seconds - self.baseline_seconds


class BudgetDifference(Record):
    """Where the seconds between an arm and its baseline went; the differences add up to `difference`."""

    arm: str
    baseline: str
    items: tuple[BudgetItem, ...]  # largest difference first; means, because medians over repeats would not add up
    difference: float


class Fit(Record):
    """A scaling law fitted to measured speedups."""

    law: Literal["Amdahl", "Universal Scalability"]
    parameters: dict[str, Interval]  # Amdahl: serial_fraction; Universal Scalability: contention, coherence; no units
    residual: float  # root mean square of the relative residuals
    peak_devices: float | None = None  # with the largest speedup by this law; None where the repeats do not identify it
    peak_low: float | None = None  # ends of its 95 % interval
    peak_high: float | None = None


class ScalingPoint(Record):
    """Measured scaling at one number of devices."""

    num_devices: int
    speedup: Interval
    efficiency: Interval
    karp_flatt: Interval | None  # experimentally determined serial fraction; None at one device


class Scaling(Record):
    """Scaling over the number of devices, strong or weak but never both."""

    kind: Literal["strong", "weak"]
    group: str
    points: tuple[ScalingPoint, ...]
    fits: tuple[Fit, ...]
    refused: str | None  # reason for a missing fit; None with a fit


class StudyResult(Record):
    """Everything a study found."""

    run_id: str
    experiment: str
    preset: str
    kind: Literal["grid", "ladder"]
    num_repeats: int
    arms: tuple[ArmSummary, ...]
    rungs: tuple[Rung, ...] = ()
    interaction: Interval | None = None
    """Ladder: what all factors give together over the product of what each gives alone; 1 without interaction."""
    differences: tuple[BudgetDifference, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    target_accuracy: float | None = None  # score on the validation split
    price_per_device_hour: float | None = None
    contaminated: int = 0
    seconds: float = 0.0
    hardware: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class PredictionThroughput(Record):
    """Prediction throughput, samples per second."""

    eager: float  # float32, contiguous, nothing folded
    executed: float  # as `paceline predict` executes it
    ratio: Interval | None = None  # executed over eager
    gpu: float | None = None  # as it is executed on this host's GPU
