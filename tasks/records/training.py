"""Records of a finished training and evaluation."""

from typing import Literal

from pydantic import Field

from paceline.tasks.records.cost import Cost
from paceline.tasks.records.data import PreparedPartitions
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import DeviceLimit
from paceline.tasks.records.measurement import AutotuneResult, Energy, ProbeResult, Validity
from paceline.tasks.records.record import Record


class CompileStats(Record):
    """Statistics of `torch.compile`, or of recording a CUDA graph, in a training."""

    num_calls: int  # forward passes of the compiled network; steps, where the whole step is a graph
    num_graphs: int  # made for them
    hit_rate: float  # share of the calls that found their graph ready
    seconds: float  # spent compiling, forward and backward, in the probe before the training too; or recording
    is_warm: bool = False  # all code was found in the cache that earlier trainings have left
    recompile_reasons: tuple[str, ...] = ()  # why any graph after the first was made


class Restart(Record):
    """A restart of a training after a failure."""

    cause: str  # the root cause
    rank: int | None  # where it was; None when it was none of the ranks
    num_ranks: int  # of the attempt that ended
    first_step: int  # step of the newest valid checkpoint, from which training resumed
    lost_steps: int  # done again, at least: how far a killed rank came is known from its last report
    seconds: float  # from the moment at which the failure was noticed to the start of the next attempt's ranks
    wait_seconds: float = 0.0  # of them, while the cluster was not complete or did not answer; not for a busy device


STEP_ITEMS = ("forward", "backward", "optimizer", "graph", "loop", "device")
"""Items of the time budget that are training steps; with `data_wait` about the time that the throughput is taken over.

`device` is the host's wait for a GPU that has not finished its steps, at the next read of the losses.
"""


ScoreName = Literal["accuracy", "mean_iou", "ssim"]  # a measure of quality from 0 to 1, one for each task


class Trained(Record):
    """A finished training, of a preset or of the user's own Lightning code."""

    world_size: int
    num_epochs: int
    num_steps: int  # updates of weights; of own code as Lightning counts them
    seconds: float  # of the fit: first step to last, validation and checkpoints included, probe and start-up excluded
    samples_per_second: float | None  # training samples over the seconds of `windows`; None if unknown
    resumed_from: str | None
    first_step: int = 0  # the step this process started at; above 0 after a resume
    time_budget: dict[str, float]  # seconds per item, rank 0's process from start to end; their sum is `wall_seconds`
    wall_seconds: float  # measured from outside the rank: process start to process end
    clock_difference: float | None = None
    """By which share the items, without `recovery`, add up to more than the supervisor's clock measured from the start
    to the end of rank 0's process; negative for less. None before November 2026 and for a rank that is run by hand."""
    data_wait_fraction: float | None
    """Share of the training steps' time spent waiting for data. On a GPU, where the host's waits are not the device's,
    measured by the probe's arm without input; None without that arm."""
    compile: CompileStats | None = None  # rank 0's; None for an eager network
    probe: ProbeResult | None = None
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    windows: tuple[tuple[int, int, float], ...] = ()
    """(first step, number of steps, seconds) between two reads of the loss: training steps and their waits for data,
    without validation, checkpoints and logging. Rank 0's. Of own code, steps are batches."""
    window_samples: tuple[int, ...] = ()  # training samples of each of `windows`, over all devices
    samples_per_epoch: int | None = None  # training samples, over all devices
    steps_per_epoch: int | None = None  # in batches of the group that finished; an elastic group had others before
    epoch_ends: tuple[float, ...] = ()
    """Seconds from process start to the end of each epoch that this process trained, its validation and checkpoint
    included, the probe excluded. Of own code without an epoch that a limit of steps has cut."""
    startup_seconds: float | None = None  # process start to the first training step, probe excluded
    plan: Plan | None = None  # what was executed, where it differs from what the rules had chosen, or its reasons do
    no_probe: str | None = None  # why there was no probe, though the configuration asks for one
    search: AutotuneResult | None = None  # that led to the plan, perhaps an earlier one; None where none is known
    communication_fraction: float | None = None
    """Share of the training steps' time in which gradients were exchanged and nothing was computed; 0 on one device."""
    idle_fraction: float | None = None  # unused share of the device's time in the fit: by CPU time, on GPUs by NVML
    peak_memory_bytes: int | None = None  # largest memory of one rank: resident on CPUs, allocated on a GPU
    energy_joules: float | None = None  # all hosts during the fit, from NVML or RAPL; None where neither can be read
    validity: Validity | None = None  # of rank 0's host during the fit
    cost: Cost | None = None  # of the network in training; None where it cannot be counted
    uncounted: str = ""  # why `cost` or `limit` is None
    bytes_per_sample: float | None = None
    """Lower bound of the traffic of a training step through its device's memory, over the samples of the step on that
    device; None where no bound can be stated."""
    limit: DeviceLimit | None = None  # of rank 0's device, measured in its process
    restarts: tuple[Restart, ...] = ()  # within this training, the oldest first


class BestModel(Record):
    """What a ModelCheckpoint callback of the user's has kept."""

    path: str
    monitor: str | None  # metric that chose it; None: it is the newest
    score: float | None  # its value; None if that is not finite


class TrainResult(Trained):
    """Result of a training of a preset."""

    final_loss: float
    checkpoint: str
    losses: tuple[float, ...]  # of every step from step 0 on (mean over the global batch), also before a resume
    score_name: ScoreName = "accuracy"  # of the measure of quality that the task has
    validation_scores: tuple[float, ...]  # after each epoch; empty without a validation split
    predictions: tuple[str, ...]
    """One .npz per rank: `index`, `kept` (logits, or statistics of each sample), and `targets` where there are any."""
    examples: str | None = None  # .npz of some test samples, `seen`, `told`, `there`, of tasks with outputs per pixel
    prediction_samples_per_second: float  # over the test split, after a warm-up that compiles and autotunes
    plain_score: float | None = None
    """On the test split, of the same weights in 32-true and without folding; measured where the model is to be
    registered."""
    weights: str | None  # state dict of the trained network, readable with weights_only; written by rank 0
    worker_load: tuple[float, ...] | None = None  # relative speeds by which the ranks shared each batch; None: evenly
    energy: Energy | None = None  # the fit's with its interval, the power before the start, and neighbours


class ModuleResult(Trained):
    """Result of a training of the user's own Lightning code."""

    num_batches: int  # of each rank, earlier attempts included
    losses: tuple[float | None, ...]  # of rank 0, of each batch; None where a step returned none
    metrics: dict[str, float]  # the newest value of each metric that the module has logged, if it is finite
    not_finite: tuple[str, ...] = ()  # the other metrics
    not_tested: str | None = None  # reason not to use the metrics of the test; None without one
    checkpoint: str | None
    best_models: tuple[BestModel, ...] = ()  # of the user's ModelCheckpoint callbacks
    weights: str | None = None  # state dict, readable with weights_only; None where it is not, or code is not installed
    units_per_second: dict[str, float] = Field(default_factory=dict)  # throughput in other units, such as tokens
    partitions: PreparedPartitions | None = None  # that the DataModule had prepared; None for nothing
    directory: str = ""  # of rank 0's files, inside that of the attempt
    notes: tuple[str, ...] = ()  # what the user should know of the training


class EvaluateResult(Record):
    """Quality on the test split."""

    num_samples: int
    score_name: ScoreName = "accuracy"  # the measure that models of this task are judged by
    accuracy: float | None = None  # share of right classes: of samples, or of pixels with one; None: no classes
    top_k: dict[str, float] = Field(default_factory=dict)  # keyed "2", "3", "5" where there are enough classes
    per_class_accuracy: dict[str, float | None] = Field(default_factory=dict)  # None: no test samples or pixels
    confusion: tuple[tuple[int, ...], ...] = ()  # rows: true class; columns: predicted class. Empty for pixels
    angle_rmse_degrees: float | None = None
    mean_iou: float | None = None  # mean over the classes of intersection over union, all test pixels together
    per_class_iou: dict[str, float | None] = Field(default_factory=dict)  # None: neither predicted nor present
    ssim: float | None = None
    """Mean structural similarity to the clean images (Wang et al. 2004: windows of 11 pixels, sigma 1.5)."""
    psnr_db: float | None = None  # mean peak signal-to-noise ratio to the clean images, decibels
    noisy_psnr_db: float | None = None  # the same of the images as the network saw them
    samples_per_second: float
    seconds: float

    @property
    def score(self) -> float:
        """From 0 to 1; what models of this task are judged by."""
        value = {"accuracy": self.accuracy, "mean_iou": self.mean_iou, "ssim": self.ssim}[self.score_name]
        assert value is not None
        return value
