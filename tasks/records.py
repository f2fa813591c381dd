"""The records that stages hand to each other: paths, counts, seconds and fingerprints.

Frozen and plain: they travel through Prefect, Dask and JSON files. Never arrays, models, clients or live clusters.
All times are seconds; unknown quantities are None, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from paceline.conf.data import NUM_COLOURS
from paceline.conf.execution import Compile, Compression, Loading, MemoryFormat, Precision
from paceline.conf.model import Model
from paceline.conf.plugins import EMBEDDED_MODELS, NetworkFacts, Plugin
from paceline.conf.signal import Signal


class Record(BaseModel):
    """A frozen record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(Record):
    """A value chosen for the user, with its reason."""

    value: str | int
    reason: str


class Pretrained(Record):
    """Pretrained weights that fit the network."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    reference: str
    """As the configuration names them."""
    path: str
    """Where all ranks see them."""
    sha256: str
    """Of the file."""
    num_tensors: int
    """That the network takes from it."""
    reinitialized: tuple[str, ...] = Field(default=(), alias="anew")
    """Parameters that the seed initialises anyway: those of a head for other classes."""

    @property
    def summary(self) -> str:
        """One line."""
        seeded = f"; by the seed: {', '.join(self.reinitialized)}" if self.reinitialized else ""
        return f"{self.num_tensors} tensors of {self.reference} (sha256 {self.sha256[:12]}){seeded}"


class Reads(Record):
    """Reads from remote storage."""

    num_fetched: int = 0
    """Objects that came from the store."""
    num_bytes: int = 0
    """Of those."""
    num_cached: int = 0
    """Objects that were in the cache of a worker's host."""
    num_retries: int = 0
    """Requests that were sent again."""
    num_damaged: int = 0
    """Objects in a cache that were not what had been put there; fetched again."""

    @classmethod
    def total(cls, reads: Iterable[Reads]) -> Reads:
        """Sum of all records."""
        counts: Counter[str] = Counter()
        for record in reads:
            counts.update(record.model_dump())
        return cls(**counts)

    @property
    def summary(self) -> str:
        """One line; empty without remote reads."""
        if not self.num_fetched + self.num_cached:
            return ""
        retries = f", {self.num_retries:,} requests sent again" if self.num_retries else ""
        damaged = f", {self.num_damaged:,} damaged ones in the cache" if self.num_damaged else ""
        return (
            f"{self.num_fetched:,} objects ({self.num_bytes / 1e6:,.1f} MB) fetched, "
            f"{self.num_cached:,} in the cache{retries}{damaged}"
        )

    @property
    def metrics(self) -> dict[str, float | None]:
        """By name in MLflow; empty without remote reads."""
        return {f"data/{name}": value for name, value in self.model_dump().items()} if self.summary else {}


class PreparedSet(Record):
    """A prepared set on disk; the facts of its manifest."""

    path: str
    key: str
    """sha256 of the preparation's inputs; the set is reused while it stays the same."""
    fingerprint: str
    """8 hex digits over the content (every shard's sha256, class names): equal for equal data on any machine."""
    image_shape: tuple[int, int, int]
    """Height, width, channels, masks among them."""
    class_names: tuple[str, ...]
    target_names: tuple[str, ...] = ()
    """Names of regression targets, such as ("angle",)."""
    num_planes: int = 0
    """Of the channels, the last so many are masks: 0 for no class, 1 and up for the classes."""
    num_train: int
    num_validation: int
    num_test: int
    num_rejected: int
    ignored: dict[str, int] = {}
    class_counts: dict[str, tuple[int, ...]]
    """Samples per class for each split; pixels, where these have one."""
    mean: tuple[float, ...]
    """Per-channel mean of the training split in units of full scale (0 to 1)."""
    std: tuple[float, ...]
    """Per-channel standard deviation of the training split in units of full scale."""
    num_bytes: int
    reused: bool
    seconds: float
    """Wall time of this call; of looking the set up when it was reused."""
    reads: Reads = Reads()
    """Remote reads of this call."""

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what a network sees."""
        height, width, channels = self.image_shape
        return height, width, channels - self.num_planes


class ModelFacts(Record):
    """Description of a trained model: everything needed to build its network and to feed it."""

    model: Model
    image_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Height, width, channels."""
    class_names: tuple[str, ...]
    target_names: tuple[str, ...] = ()
    mean: tuple[float, ...]
    """Per channel, in units of full scale, as in `PreparedSet`."""
    std: tuple[float, ...]
    fingerprint: str
    """Of the prepared set that it was trained on."""
    weights_sha256: str
    """Of the file of weights."""
    package: Plugin | None = None
    """The user's package that offered the model when it was trained; None for one of Paceline's."""
    signal: Signal | None = None
    """How signals became the pictures that it was trained on; None for what was pictures already."""
    fit: Literal["crop"] | None = None
    """How images came to their size; None for the usual way, which is to scale them."""

    @property
    def num_frames(self) -> int:
        """Frames of its clips; 0 for a model of images."""
        takes_clips = EMBEDDED_MODELS.get(self.model.name, NetworkFacts()).takes_clips
        return self.image_shape[2] // NUM_COLOURS if takes_clips else 0


class Gpu(Record):
    """One GPU as NVML names it."""

    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Hardware(Record):
    """Hardware of a host."""

    host: str
    cpu_name: str
    num_cores: int
    memory_bytes: int
    cpu_bf16: bool
    """The CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    gpus: tuple[Gpu, ...] = ()


class Plan(Record):
    """The execution with every `auto` resolved, and the reason of each."""

    accelerator: Literal["cpu", "gpu"]
    device_name: str
    world_size: int
    num_threads: int
    precision: Precision
    compile: Compile
    memory_format: MemoryFormat
    loading: Loading
    strategy: Literal["single", "ddp", "fsdp"]
    gradient_compression: Compression = "off"
    micro_batch: int | None = None
    """Samples that a rank computes on at once; None for its whole share of a batch."""
    reasons: dict[str, Choice]
    """For each field that was `auto`: what was chosen and why."""


Variant = Literal["full", "synthetic_input", "no_sync", "token_sync"]


class Arm(Record):
    """One way to execute the steps of a probe."""

    num_devices: int
    precision: Precision
    compile: Compile
    memory_format: MemoryFormat
    loading: Loading
    batch_size: int | None = None
    """Samples per device and step, their mean over the devices; None for the recipe's."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    gradient_compression: Compression = "off"
    loads: tuple[float, ...] | None = None
    """Relative speeds of the devices, in proportion to which they share each batch; None for even shares. Without
    meaning on one device, as strategy and compression are."""
    micro_batch: int | None = None
    """Samples that a device computes on at once; None for its whole share of a batch."""
    num_threads: int | None = None
    """CPU threads of each rank; None for its host's cores over its ranks, or what the configuration says."""
    variant: Variant = "full"
    """What is left out to see its cost: `synthetic_input` computes on one batch that is there already, `no_sync` leaves
    the gradients of each device alone while all compute, `token_sync` lets the devices wait for each other in each step
    as usual, but exchange a single number."""

    @property
    def label(self) -> str:
        """Short description for people."""
        devices = f"{self.num_devices} device" + ("s" if self.num_devices > 1 else "")
        compiled = {"off": "eager", "step": "compiled", "graph": "one graph"}[self.compile]
        parts = [devices, self.precision, self.memory_format.replace("_", " "), compiled, self.loading]
        if self.batch_size is not None:
            parts.append(f"batch {self.batch_size}")
        if self.micro_batch is not None:
            parts.append(f"micro-batches of {self.micro_batch}")
        if self.num_threads is not None:
            parts.append(f"{self.num_threads} thread" + ("s" if self.num_threads > 1 else ""))
        if self.num_devices > 1 and self.strategy != "ddp":
            parts.append(self.strategy)
        if self.num_devices > 1 and self.gradient_compression != "off":
            parts.append(f"{self.gradient_compression} gradients")
        if self.num_devices > 1 and self.loads is not None:
            parts.append(f"shares {':'.join(f'{load:.2g}' for load in self.loads)}")
        if self.variant != "full":
            parts.append(self.variant.replace("_", " "))
        return ", ".join(parts)


BASELINE = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="foreground")
"""Default baseline of a run."""


class Block(Record):
    """One measured block of one arm."""

    arm: str
    """Role of the arm: `baseline`, `candidate`, `single` (the candidate's execution on one device, for parallel
    efficiency), or a key of `ProbeResult.others`."""
    seconds_per_sample: float
    """Median over the steps of the block."""
    num_steps: int


class Validity(Record):
    """Validity of a measurement: other work on its host. None where the platform does not report it."""

    steal_fraction: float | None = None
    """Share of CPU time that the hypervisor took."""
    foreign_load: float | None = None
    """Mean number of cores busy with processes that do not belong to the run."""
    num_cores: int | None = None
    foreign_device_processes: int | None = None
    """Processes of others with memory on the run's GPUs; None without a GPU."""
    min_cpu_mhz: float | None = None
    max_cpu_mhz: float | None = None
    """Lowest and highest clock seen on any core at the start and the end."""
    min_gpu_clock_fraction: float | None = None
    """Lowest streaming-multiprocessor clock seen over the highest the GPU is made for."""
    throttled: tuple[str, ...] = ()
    """Reasons why a GPU or CPU ran slower than it could, such as `power cap` or `thermal`; empty for none seen."""
    cached_fraction: float | None = None
    """Share of the prepared set's bytes that lay in the page cache at the start."""
    contaminated: bool | None = None
    """True when any of the above is beyond its limit; None when nothing could be observed."""
    reasons: tuple[str, ...] = ()
    """One clause per limit that was broken, with the figure."""


class ProbeResult(Record):
    """Raw outcome of a paired probe."""

    baseline: Arm
    candidate: Arm
    batch_size: int
    """Samples per device and step."""
    samples_per_step: dict[str, int] = {}
    """Samples of one step over all devices of an arm, keyed as `Block.arm`; empty where not recorded."""
    others: dict[str, Arm] = {}
    """Further arms of the same rounds, keyed as `Block.arm`: `single`, `synthetic_input`, `no_sync`, `half_batch`."""
    rounds: tuple[tuple[Block, ...], ...]
    """One inner tuple per round: one block of each arm, in the order they ran."""
    seconds: float
    stopped_because: Literal["interval narrow enough", "time is up", "all blocks done"]
    validity: Validity = Validity()
    """Of the machine during the probe, rank 0's host."""
    num_repeats: int = 0
    """Number of restarts of the probe because the machine was contaminated; the last attempt counts."""


class SlowArm(Record):
    """An arm whose first steps took too long to compare it further."""

    arm: Arm
    candidate: Arm
    """The arm that it was compared with."""
    times: float
    """Seconds of a step over those of the candidate's."""


class AutotuneResult(Record):
    """Timings before a training, compared with the execution that the rules chose."""

    probes: tuple[ProbeResult, ...]
    """One after the other. In each the `candidate` is the best execution known by then, the first one the rules'; the
    `baseline` and the others are what could be better."""
    slower: tuple[SlowArm, ...] = ()
    """Arms that were left out after their first steps."""
    failed: dict[str, str] = {}
    """Compiled arms that were left out because compiling them failed, by their labels, and why."""
    compile_seconds: float = 0.0
    """That compiling took in it."""
    budget_seconds: float
    """That it might take."""
    seconds: float
    """That it took, all included."""
    validity: Validity = Validity()
    """Of the machine meanwhile, rank 0's host. What a contaminated one has shown is not gone by."""


class CompileStats(Record):
    """Statistics of `torch.compile`, or of recording a CUDA graph, in a training."""

    num_calls: int
    """Forward passes of the compiled network; steps, where the whole step is a graph."""
    num_graphs: int
    """Made for them."""
    hit_rate: float
    """Share of the calls that found their graph ready."""
    seconds: float
    """Spent compiling, forward and backward, in the probe before the training too; or recording."""
    is_warm: bool = False
    """All code was found in the cache that earlier trainings have left."""
    recompile_reasons: tuple[str, ...] = ()
    """Why any graph after the first was made."""


class Restart(Record):
    """A restart of a training after a failure."""

    cause: str
    """The root cause."""
    rank: int | None
    """Where it was; None when it was none of the ranks."""
    num_ranks: int
    """Of the attempt that ended."""
    first_step: int
    """Step of the newest valid checkpoint, from which training resumed."""
    lost_steps: int
    """Done before, and done again."""
    seconds: float
    """From the failure to the start of the next attempt's ranks."""


STEP_ITEMS = ("forward", "backward", "optimizer", "graph", "loop")
"""Items of the time budget that are training steps; with `data_wait` they are what the throughput is taken over."""


ScoreName = Literal["accuracy", "mean_iou", "ssim"]  # a measure of quality from 0 to 1, one for each task


class TrainResult(Record):
    """Result of a training."""

    world_size: int
    num_epochs: int
    num_steps: int
    seconds: float
    """Wall time of the fit: first step to last, validation and checkpoints included, probe and start-up excluded."""
    samples_per_second: float | None
    """Training samples over the time spent in training steps and waiting for data; None if none was left to do."""
    final_loss: float
    checkpoint: str
    resumed_from: str | None
    losses: tuple[float, ...]
    """Training loss of every step from step 0 on (mean over the global batch), those before a resume included."""
    first_step: int
    """The step this process started at; above 0 after a resume."""
    score_name: ScoreName = "accuracy"
    """Of the measure of quality that the task has."""
    validation_scores: tuple[float, ...]
    """After each epoch; empty without a validation split."""
    time_budget: dict[str, float]
    """Seconds per item on rank 0, from process start to process end; the items add up to `wall_seconds`."""
    wall_seconds: float
    """Measured from outside the rank: process start to process end."""
    data_wait_fraction: float | None
    """Share of the training steps' time spent waiting for data."""
    predictions: tuple[str, ...]
    """One .npz per rank: `index`, `kept` (logits, or statistics of each sample), and `targets` where there are any."""
    examples: str | None = None
    """.npz of some test samples, `seen`, `told` and `there`, of tasks with outputs per pixel."""
    prediction_samples_per_second: float
    """Over the test split, after a warm-up that compiles and autotunes."""
    plain_score: float | None = None
    """On the test split, of the same weights in 32-true and without folding; measured where the model is to be
    registered."""
    compile: CompileStats | None = None
    """Rank 0's; None for an eager network."""
    weights: str | None
    """State dict of the trained network, readable with weights_only; written by rank 0."""
    probe: ProbeResult | None
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    windows: tuple[tuple[int, int, float], ...] = ()
    """(first step, number of steps, seconds) between two reads of the loss: training steps and their waits for data,
    without validation, checkpoints and logging. Rank 0's."""
    samples_per_epoch: int | None = None
    """Training samples, over all devices."""
    steps_per_epoch: int | None = None
    """Of a whole epoch, in batches of the group that finished; an elastic group had others before."""
    startup_seconds: float | None = None
    """Process start to the first training step, probe excluded."""
    plan: Plan | None = None
    """What was executed, where that is not what the rules had chosen or its reasons are better ones."""
    search: AutotuneResult | None = None
    """What led to it; None where it was not searched for, or no result of an earlier search is known."""
    epoch_ends: tuple[float, ...] = ()
    """Seconds from process start to the end of each epoch that this process trained, its validation and checkpoint
    included, the probe excluded."""
    communication_fraction: float | None = None
    """Share of the training steps' time in which gradients were exchanged and nothing was computed; 0 on one device."""
    idle_fraction: float | None = None
    """Share of the device's time in the fit that went unused: CPU threads by their CPU time, GPUs by NVML."""
    peak_memory_bytes: int | None = None
    """Largest memory of one rank: resident on CPUs, allocated on a GPU."""
    worker_load: tuple[float, ...] | None = None
    """Relative speeds in proportion to which the ranks shared each batch, given or measured; None for even shares."""
    energy_joules: float | None = None
    """Over all hosts during the fit, from NVML or RAPL; None where neither can be read."""
    validity: Validity | None = None
    """Of rank 0's host during the fit."""
    restarts: tuple[Restart, ...] = ()
    """Within this training, the oldest first."""


class EvaluateResult(Record):
    """Quality on the test split."""

    num_samples: int
    score_name: ScoreName = "accuracy"
    """The measure that models of this task are judged by."""
    accuracy: float | None = None
    """Share of right classes: of samples, or of the pixels that have one; None where nothing has a class."""
    top_k: dict[str, float] = {}
    """Top-k accuracy, keyed "2", "3", "5" where there are enough classes."""
    per_class_accuracy: dict[str, float | None] = {}
    """None for a class without test samples, or pixels."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """Rows: true class; columns: predicted class. Empty where pixels are classified."""
    angle_rmse_degrees: float | None = None
    mean_iou: float | None = None
    """Mean over the classes of intersection over union, all test pixels together."""
    per_class_iou: dict[str, float | None] = {}
    """None for a class that is neither predicted nor present."""
    ssim: float | None = None
    """Mean structural similarity to the clean images (Wang et al. 2004: windows of 11 pixels, sigma 1.5)."""
    psnr_db: float | None = None
    """Mean peak signal-to-noise ratio to the clean images, decibels."""
    noisy_psnr_db: float | None = None
    """The same of the images as the network saw them."""
    samples_per_second: float
    seconds: float

    @property
    def score(self) -> float:
        """From 0 to 1; what models of this task are judged by."""
        value = {"accuracy": self.accuracy, "mean_iou": self.mean_iou, "ssim": self.ssim}[self.score_name]
        assert value is not None
        return value
