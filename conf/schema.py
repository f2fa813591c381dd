"""The configuration of a run as frozen pydantic models.

Every field has its unit and its help in the docstring under it; the command line, the Prefect form and the
README show these same texts. Validators check and never rewrite: a value that follows from others is a property.
This module knows nothing of machines: URIs and roots come from the environment (`conf.site`).
"""

from __future__ import annotations

import re
import warnings
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from conf import plugins
from conf.credentials import Text
from conf.plugins import Plugin, Task
from conf.section import Section
from conf.signal import Signal
from conf.vary import Vary

Source = Literal[
    "digits",
    "rotated_digits",
    "folder",
    "cifar10",
    "pairs",
    "shapes",
    "textures",
    "signals",
    "tones",
    "arrays",
    "clips",
    "motions",
]
ModelName = Literal["convblocks", "twohead", "whitened", "unet", "dncnn", "resnet18", "resnet50", "sequence"]
_NAME = r"^[A-Za-z][\w.-]{0,63}$"


def _is_name(text: str) -> str:
    if re.match(_NAME, text) is None:
        raise ValueError("no name")
    return text


LayerName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.\w+)*$", max_length=200)]
"""Of a part of a network, as its parameters have it: `layer1`, `features.4`."""
OwnName = Annotated[Text, AfterValidator(_is_name), Field(json_schema_extra={"pattern": _NAME})]
"""Of a source or a model that an installed package offers, see `conf.plugins`."""
Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]
MemoryFormat = Literal["contiguous", "channels_last"]
Loading = Literal["resident", "streaming", "foreground"]
Compile = Literal["off", "step", "graph"]
Compression = Literal["off", "bf16"]
Augment = Literal["none", "shift", "flip_shift", "alternating_flip_shift"]
Overlap = Literal["queue", "skip", "cancel-oldest"]
"""What becomes of a scheduled run whose predecessor has not ended."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

SIGNAL_SOURCES: frozenset[str] = frozenset({"signals", "tones"})
"""Those whose samples are signals in time, and whose images have time from left to right."""
NUM_COLOURS = 3
"""Channels of a frame of a clip, of grey ones too."""
NUM_FRAMES, MAX_FRAMES = 8, 64
"""Of a clip: where nothing is said, and at most."""
CLIP_SOURCES = frozenset(name for name, facts in plugins.EMBEDDED_SOURCES.items() if facts.has_clips)
"""Those whose samples are clips, all frames of which are the channels of one image."""
WHITENED_MIN_SIZE = 9
"""Of an image, pixels: whitening takes one away, and what is left is halved three times."""
MIN_CLASSES = 2
MIN_DNCNN_DEPTH = 2
"""Convolutions: into the features, and out of them."""
DRAWN_SOURCES: frozenset[str] = frozenset({"digits", "rotated_digits", "shapes", "textures"})
"""Sources that draw their images at the size that is asked for."""
FLIPPING: frozenset[Augment] = frozenset({"flip_shift", "alternating_flip_shift"})
"""Augmentations that mirror."""


class Data(Section):
    """What is learned from."""

    source: Source | OwnName = "digits"
    """Kind of data: `digits` (1,797 handwritten digits), `rotated_digits` (with the angle as second target),
    `folder` (class-named folders of images), `cifar10` (the official archives or class-named folders), `pairs` (folders
    `images` and `masks` and a file `classes.txt`), `shapes` (2,000 generated scenes with their masks), `textures`
    (1,200 generated grey textures), `signals` (class-named folders of WAV, NumPy and Parquet files, as time-frequency
    images), `tones` (1,800 generated sounds in noise), `arrays` (files .npz with `images` and `labels`, or Parquet with
    columns `image` and `label`), `clips` (class-named folders of videos, or of folders with numbered frames), `motions`
    (1,600 generated clips in one of four directions), or the name of a source that an installed package offers."""
    root: Text | None = None
    """Where the data lies: a path or any URL that fsspec reads. Not used by the embedded sources."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Height and width of a prepared image, pixels."""
    fit: Literal["scale", "crop"] = "scale"
    """How images of other sizes come to theirs. `scale`: the shorter side is scaled to it, and the middle taken;
    `crop`: the middle is taken at the image's own scale, where the size of things or the grain of noise matters. Images
    that are too small for that are rejected."""
    num_frames: Annotated[int, Field(ge=2, le=MAX_FRAMES)] = NUM_FRAMES
    """Frames of a prepared clip, of `clips` and `motions`: the middle ones of so many equal parts of a clip, however
    long. Clips with fewer frames are rejected."""
    test_fraction: Fraction = 0.2
    """Share of each class that is held out for the test split where the source has no test split of its own."""
    validation_fraction: Fraction = 0.1
    """Share of each class of the training split that is held out for validation after each epoch; 0 for none."""
    classes: tuple[Text, ...] | None = None
    """Classes that are learned, by their names; the others' samples are left out. Quote numbers: ['0','1']. None for
    all."""
    max_rejected_fraction: Fraction = 0.01
    """Largest tolerated share of samples that cannot be decoded; above it the run stops with their list."""
    signal: Signal = Signal()
    """How signals become pictures; used by `signals` and `tones`."""

    @property
    def used_signal(self) -> Signal | None:
        """How signals become pictures; None for a source of pictures."""
        return self.signal if self.source in SIGNAL_SOURCES else None

    @model_validator(mode="after")
    def _signal_fits(self) -> Self:
        if self.source in SIGNAL_SOURCES:
            self.signal.check_size(self.image_size)
        elif self.signal != Signal():
            raise ValueError(
                f"data.signal has no use with source {self.source}, whose samples are images; "
                "drop its settings or choose data.source=signals"
            )
        return self

    @property
    def num_channels(self) -> int:
        """Of a prepared picture, its mask included: the colours of all its frames, where it is a clip."""
        facts = plugins.source_facts(self.source)
        return (facts.channels + facts.has_masks) * (self.num_frames if facts.has_clips else 1)

    @property
    def has_sizes(self) -> bool:
        """Whether its samples are images of their own sizes."""
        return self.source not in SIGNAL_SOURCES | CLIP_SOURCES | DRAWN_SOURCES

    @model_validator(mode="after")
    def _fit_fits(self) -> Self:
        if self.fit != "scale" and not self.has_sizes:
            raise ValueError(
                f"data.fit={self.fit} has no use with source {self.source}, whose samples are not images of their own "
                "sizes; drop it"
            )
        return self

    @model_validator(mode="after")
    def _frames_fit(self) -> Self:
        if self.num_frames != NUM_FRAMES and self.source not in CLIP_SOURCES:
            raise ValueError(
                f"data.num_frames={self.num_frames} has no use with source {self.source}, whose samples are no clips; "
                "drop it or choose data.source=clips"
            )
        return self

    @property
    def plugin(self) -> Plugin | None:
        """The user's package that offers the source; None for one of Paceline's."""
        return None if self.source in plugins.EMBEDDED_SOURCES else plugins.find("source", self.source)

    @model_validator(mode="after")
    def _classes_fit(self) -> Self:
        given = self.classes
        if given is not None and (len(set(given)) < len(given) or len(given) < MIN_CLASSES):
            raise ValueError(
                f"data.classes=[{','.join(given)}] is not {MIN_CLASSES} or more different classes; name each once"
            )
        if given is not None and plugins.EMBEDDED_SOURCES.get(self.source, plugins.SourceFacts()).has_masks:
            raise ValueError(f"data.classes is for classes of whole images, and data.source={self.source} has masks")
        return self

    @model_validator(mode="after")
    def _root_fits(self) -> Self:
        if self.source in plugins.EMBEDDED_SOURCES:
            self.check_root()
        return self

    def check_root(self) -> None:
        """Refuse a root that is not read.

        Raises:
            ValueError: there is one.
        """
        if self.root is not None and not plugins.source_facts(self.source).needs_root:
            raise ValueError(
                f"data.root={self.root} has no use with source {self.source}, which reads none; "
                "drop it or choose data.source=folder"
            )


class Model(Section):
    """The network."""

    name: ModelName | OwnName = "convblocks"
    """`convblocks`: three blocks of convolutions; `twohead`: a small residual net with a class and an angle head;
    `whitened`: three blocks of two convolutions behind a fixed layer that whitens patches, which learns fastest;
    `unet`: the class of each pixel, from data with masks; `dncnn`: the image without its noise, from any images;
    `resnet18`, `resnet50`: residual networks as published, with the parameters' common names; their stem halves images
    twice, small ones too; `sequence`: features of each frame of a clip, then a head over the frames; or the name of a
    model that an installed package offers, which does with `width` and `depth` as it likes."""
    width: Annotated[int, Field(ge=1, le=1024)] = 32
    """Filters of the first block; the following blocks have twice as many each. `twohead`: of its first
    convolution. `whitened`: the second and the third block have four times as many. `dncnn`: of all convolutions.
    No use with `resnet18` and `resnet50`, nor has `depth`."""
    depth: Annotated[int, Field(ge=1, le=32)] = 4
    """`convblocks`, `sequence`: convolutions per block; `unet`: times that it halves an image; `dncnn`: convolutions,
    2 or more."""
    test_views: Literal[1, 2, 6] = 1
    """Views of an image over which evaluation and prediction take the mean. 1: the image itself; 2: with its mirror
    image; 6: both, also shifted by a pixel up and left, and down and right. They cost so many times the work."""
    pretrained: Text | None = None
    """Weights to begin with: a file (`.safetensors`, or a state dict or checkpoint of torch, of which no code is
    executed), the id of a run, `runs:/RUN_ID/model`, `models:/NAME@ALIAS`, or a directory with a model. A head for
    other classes begins anew; all else must fit. None: by the seed."""
    freeze: Literal["none", "backbone"] | LayerName = "none"
    """What stays as `pretrained` has it, and works as in evaluation: batch norms keep their statistics, nothing is
    dropped. `backbone`: all but the head; the name of a layer: it and all that the network lists before it. What stays
    at its beginning needs no backward pass, so that a step takes less time."""

    @property
    def task(self) -> Task:
        """What it is to tell."""
        return plugins.model_facts(self.name).task

    @property
    def plugin(self) -> Plugin | None:
        """The user's package that offers the model; None for one of Paceline's."""
        return None if self.name in plugins.EMBEDDED_MODELS else plugins.find("model", self.name)


class Recipe(Section):
    """How the network is trained; part of the workload."""

    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
    """Optimizer; `sgd` is with momentum; `muon` takes orthogonal steps for the filters of convolutions, whose rate is
    `learning_rate`, and those of `sgd` for the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate of one device; multiplied by the number of devices under weak batch scaling."""
    backbone_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the learning rate is multiplied by for all but the head, as for weights that were trained before."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `sgd`, and of `muon` for filters; unused by the others."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Samples per device and step under weak scaling; samples per step over all devices under strong scaling, which
    keeps the global batch constant."""
    batch_scaling: Literal["weak", "strong"] = "weak"
    """`weak`: constant batch per device, learning rate scaled linearly with the devices; `strong`: constant
    global batch."""
    num_epochs: Annotated[int, Field(ge=1)] = 10
    """Passes over the training split."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty; decoupled for `adamw`, and for `muon`, which takes it off everything but filters."""
    schedule: Literal["constant", "piecewise", "cosine", "onecycle"] = "cosine"
    """Course of the learning rate over the steps."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs of linear warm-up before the schedule, at most half of all; `onecycle`: length of its rising part."""
    drop_epochs: Annotated[int, Field(ge=1)] = 50
    """`piecewise`: the rate is multiplied by `drop_factor` after every so many epochs."""
    drop_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`piecewise`: factor of each drop."""
    label_smoothing: Fraction = 0.0
    """Label smoothing of the cross-entropy."""
    angle_weight: Annotated[float, Field(ge=0)] = 0.1
    """`twohead`: weight of the mean squared angle error (degrees squared) beside the cross-entropy."""
    augment: Augment = "none"
    """`shift`: random translations by up to `shift_pixels`; `flip_shift`: with random left-right flips too;
    `alternating_flip_shift`: with each sample flipped in every second epoch, by a coin in odd or in even ones."""
    noise: Annotated[float, Field(gt=0, le=255)] = 25.0
    """`dncnn`: standard deviation of the Gaussian noise that each image gets anew in each epoch, of 255."""
    shift_pixels: Annotated[int, Field(ge=0, le=64)] = 4
    """Largest random translation in each direction, pixels."""
    vary: Vary = Vary()
    """Random crops, colours and mixtures of images; for classes of whole images."""
    shuffle_mib: Annotated[int, Field(ge=1)] = 256
    """Size of what is shuffled as one, MiB; larger sets are shuffled in blocks of 4 MiB, then within windows of this
    size. `execution.loading=streaming` holds at most two windows in memory."""


class Workload(Section):
    """What is learned: data, model, recipe and seed. Runs are comparable only when their workloads match."""

    data: Data
    model: Model
    recipe: Recipe
    seed: int


class Execution(Section):
    """How a workload is run; free to differ between compared runs."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device; `auto` takes the GPUs where there are any."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Hosts to train on."""
    num_devices: Annotated[int, Field(ge=1)] = 1
    """Devices on each host, one rank each. On CPUs a device is an equal share of the host's cores."""
    precision: Literal["auto", "32-true", "64-true", "bf16-mixed", "16-mixed"] = "auto"
    """Arithmetic of the training step; `16-mixed` needs a GPU."""
    compile: Literal["auto", "off", "step", "graph"] = "auto"
    """`step` compiles the network with `torch.compile`; `graph` launches the whole step, update included, as one CUDA
    graph, on one GPU, which frees small networks from the host's pace."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of image tensors."""
    loading: Literal["auto", "resident", "streaming", "foreground"] = "auto"
    """`resident`: the set in device memory; `streaming`: background threads; `foreground`: sample by sample, in
    the step's way."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How ranks share the work; one rank needs none. `ddp`: each holds the whole network; `fsdp`: a part of every
    weight, gradient and optimizer state, for networks that do not fit. Probes and evaluation hold whole weights."""
    gradient_compression: Compression = "off"
    """`bf16`: ranks exchange gradients rounded to 16 bits, half the bytes, for links that are slower than computing."""
    worker_load: Literal["equal", "measured"] | tuple[float, ...] = "equal"
    """How each batch is shared among the ranks. `equal`: evenly; `measured`: in proportion to their speeds, which are
    timed before training; or relative speeds, one number per rank, such as [2,1]. The gradient stays the mean over
    samples."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto", "off"] = "auto"
    """Samples that a rank computes on at once. A larger share of a batch is taken in several passes, whose gradients
    add up to one step: recipe, samples and their order stay as they are. Batch norms take their statistics over a pass.
    `auto`: the whole share, until a GPU's memory does not suffice: then the group goes on from its newest checkpoint
    with half of it, and says so; `off`: the whole share."""
    num_threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """CPU threads of each rank; `auto`: the host's cores divided by its ranks."""
    checkpoint_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints inside an epoch; a checkpoint is written at each epoch's end in any case."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times that a training which lost a rank, a worker or a host is begun again from its newest checkpoint without
    having made progress in between, before it is given up."""

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return self.num_nodes * self.num_devices

    @model_validator(mode="after")
    def _sharding_fits(self) -> Self:
        if self.strategy != "fsdp":
            return self
        settings: dict[str, tuple[object, tuple[str, ...]]] = {
            "gradient_compression": (self.gradient_compression, ("off",)),
            "compile": (self.compile, ("auto", "off")),
            "precision": (self.precision, ("auto", "32-true", "bf16-mixed")),
            "micro_batch": (self.micro_batch, ("auto", "off")),
        }
        for name, (value, possible) in settings.items():
            if value not in possible:
                raise ValueError(
                    f"execution.{name}={value} does not go with execution.strategy=fsdp; "
                    f"use {name}={' or '.join(possible)}, or ddp"
                )
        return self

    @model_validator(mode="after")
    def _loads_fit(self) -> Self:
        if isinstance(self.worker_load, str):
            return self
        if len(self.worker_load) != self.world_size or min(self.worker_load) <= 0:
            given = ",".join(f"{load:g}" for load in self.worker_load)
            raise ValueError(
                f"execution.worker_load=[{given}] is not one positive number for each of {self.world_size} ranks "
                f"({self.num_nodes} node x {self.num_devices} devices); give as many, or use equal or measured"
            )
        return self


class Cluster(Section):
    """Where the Dask workers come from."""

    kind: Literal["local", "local_cuda", "ssh", "slurm", "address"] = "local"
    """`local`: workers on this machine for this run; `local_cuda`: one worker of dask-cuda for each GPU to be used;
    `ssh`: workers on `hosts`; `slurm`: one job per host; `address`: join a running scheduler."""
    num_workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """`local`: worker processes; `auto`: one per core, and at least one per rank. The other kinds start one worker for
    each device that is trained on."""
    address: Text | None = None
    """`address`: the scheduler's address, such as tcp://host:8786, or tls:// where it wants certificates."""
    hosts: tuple[Text, ...] = ()
    """`ssh`: hosts by the names under which `ssh` knows them; the scheduler runs on the first one too."""
    interface: Text | None = None
    """`ssh`, `slurm`: network interface that Dask listens on, such as eth0; None for the one that leads outwards."""
    partition: Text | None = None
    """`slurm`: partition of the jobs; None for Slurm's default."""
    account: Text | None = None
    """`slurm`: account that the jobs are charged to."""
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """`slurm`: time limit of the jobs, such as 2:00:00 or 1-12 (a day and a half)."""
    cores_per_host: Annotated[int, Field(ge=1)] | None = None
    """`slurm`: CPU cores that a job asks for; needed there."""
    memory_per_host: Annotated[str, Field(pattern=r"^[1-9]\d*[MGT]$")] | None = None
    """`slurm`: memory that a job asks for, such as 64G; needed there."""
    sbatch: tuple[Text, ...] = ()
    """`slurm`: further options of sbatch, such as --constraint=a100."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Whether the Dask parts talk TLS, with the certificates in PACELINE_TLS, and refuse everybody else; `auto`: beyond
    this host's loopback, and there with a certificate that is made for the run."""
    wait_seconds: Annotated[float, Field(gt=0)] = 300.0
    """`ssh`, `slurm`: how long to wait for the workers, seconds; the time in Slurm's queue counts."""
    min_workers: Annotated[int, Field(ge=1)] | None = None
    """Fewest workers with which a training goes on when it has lost others, until they are back; None for all.
    Batch and learning rate follow `recipe.batch_scaling`: weak, and each device's batch stays, the learning rate falls
    with the number of devices; strong, and the workers that are left take larger shares of the same batches."""

    @model_validator(mode="after")
    def _address_where_needed(self) -> Self:
        if (self.kind == "address") != (self.address is not None):
            raise ValueError(
                f"cluster.address={self.address} does not fit cluster.kind={self.kind}; "
                "give an address exactly with kind=address"
            )
        if self.address is not None and self.tls != "auto" and (self.tls == "on") != self.address.startswith("tls://"):
            raise ValueError(
                f"cluster.tls={self.tls} does not fit cluster.address={self.address}; "
                "an address begins with tls:// where the scheduler wants certificates, with tcp:// where not"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        for name, kinds in _KINDS_OF_SETTING.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"cluster.{name}={getattr(self, name)} has no use with cluster.kind={self.kind}; "
                    f"drop it or choose kind={' or '.join(kinds)}"
                )
        if self.kind == "ssh" and not self.hosts:
            raise ValueError("cluster.kind=ssh needs the hosts; name them, as in cluster.hosts=[node1,node2]")
        if self.kind == "slurm" and (self.cores_per_host is None or self.memory_per_host is None):
            raise ValueError(
                "cluster.kind=slurm needs what each job asks for; "
                "for example cluster.cores_per_host=16 cluster.memory_per_host=64G"
            )
        return self


_KINDS_OF_SETTING = {
    "num_workers": ("local",),
    "hosts": ("ssh",),
    "interface": ("ssh", "slurm"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time_limit": ("slurm",),
    "cores_per_host": ("slurm",),
    "memory_per_host": ("slurm",),
    "sbatch": ("slurm",),
}


class Speedup(Section):
    """How the speedup of the run is measured."""

    baseline: Literal["probe", "matched", "none"] | Annotated[Text, Field(pattern=r"^[0-9a-f]{32}$")] = "probe"
    """What the run is divided by. `probe`: one device, 32-true, contiguous, eager, foreground, in a paired measurement;
    `matched`: the newest runs of the experiment that did the same work so, with an interval from three on; a run's id:
    that run, if it did the same work; `none`: nothing."""
    num_blocks: Annotated[int, Field(ge=3, le=1000)] = 24
    """Largest number of paired blocks."""
    steps_per_block: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Training steps of one arm in a block; `auto`: enough for a block of a quarter of a second."""
    max_seconds: Annotated[float, Field(gt=0)] = 25.0
    """Time limit of the measured blocks, seconds."""
    target_half_width: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The probe stops early once the relative half-width of the 95 % interval is below this."""
    diagnose: bool = False
    """Measure what limits the step with further arms of the probe: on input that is there already, without exchange of
    gradients, on one device at the same batch, and at half the batch."""
    price_per_device_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one device for one hour, in any currency; gives the cost per epoch."""


with warnings.catch_warnings():
    # `register` is also a method of the metaclass, which no instance has and nobody calls.
    warnings.filterwarnings("ignore", 'Field name "register"')

    class Track(Section):
        """Where the run is recorded, and what is made of it there."""

        experiment: Annotated[Text, Field(min_length=1)] = "paceline"
        """MLflow experiment."""
        register: Annotated[str, Field(pattern=r"^[\w.\- ]+$")] | None = None
        """Name in MLflow's model registry. A model that passes the gate becomes its newest version and gets the alias
        `champion`: at least `min_accuracy`, no worse than the champion nor than itself in 32-true without folding (by
        more than `max_accuracy_loss`), and no regression. None: nothing is registered."""
        min_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
        """Test score (accuracy, mean IoU or SSIM) that a model needs to be registered; None: whatever the champion
        has."""
        on_regression: Literal["mark", "fail", "off"] = "mark"
        """What happens when the run is worse than the runs of the same settings before it. `mark`: tags, a Prefect
        artifact and an event tell it; `fail`: the flow and the command fail as well, with everything recorded; `off`:
        nobody looks."""
        max_throughput_loss: Annotated[float, Field(gt=0, lt=1)] = 0.05
        """A loss of training throughput up to this share is no regression; of a single run up to twice as much."""
        max_accuracy_loss: Annotated[float, Field(gt=0, lt=1)] = 0.01
        """A loss of the test score up to this is no regression; of a single run up to twice as much."""
        max_data_wait_rise: Annotated[float, Field(gt=0, lt=1)] = 0.05
        """The share of time spent waiting for data may rise by this; in a single run by twice as much."""


Seconds = Annotated[float, Field(gt=0)]


class Limits(Section):
    """How long a stage may take, and how often one that was failed from outside is tried.

    Over its limit a stage ends all that it has started and the run is FAILED; what was finished is kept: shards of the
    set, checkpoints, predicted parts. `paceline run --resume RUN_ID limits.train_seconds=...` goes on.
    """

    prepare_seconds: Seconds | None = None
    """Time limit of listing and preparing the data, seconds, waits between tries left out; None for none."""
    train_seconds: Seconds | None = None
    """Time limit of the training, seconds; the wait for its devices, the probe and restarts count. A study's hold for
    each of its trainings."""
    evaluate_seconds: Seconds | None = None
    """Time limit of the evaluation, seconds; predictions on the test split are part of the training."""
    predict_seconds: Seconds | None = None
    """Time limit of `paceline predict`, seconds."""
    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Further tries of preparation and prediction when a source, a file system or the cluster fails them. A training
    has its own: `execution.max_restarts`."""
    retry_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Wait before each further try, seconds."""


class Config(Section):
    """Everything a run can be told."""

    name: Text = "run"
    """Name of the run; presets set it to their own."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of initial weights, sample order and augmentation."""
    data: Data = Data()
    model: Model = Model()
    recipe: Recipe = Recipe()
    execution: Execution = Execution()
    cluster: Cluster = Cluster()
    speedup: Speedup = Speedup()
    track: Track = Track()
    limits: Limits = Limits()

    @property
    def workload(self) -> Workload:
        """The part that two compared runs must share."""
        return Workload(data=self.data, model=self.model, recipe=self.recipe, seed=self.seed)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if not self._names_own:
            self._check_task()
        world_size = self.execution.world_size
        if self.recipe.batch_scaling == "strong" and self.recipe.batch_size % world_size:
            raise ValueError(
                f"recipe.batch_size={self.recipe.batch_size} does not divide over {world_size} ranks "
                f"({self.execution.num_nodes} node x {self.execution.num_devices} devices); "
                f"use a multiple of {world_size}"
            )
        if self.execution.accelerator == "cpu" and self.execution.precision == "16-mixed":
            raise ValueError(
                "execution.precision=16-mixed is for GPUs, and execution.accelerator=cpu; use bf16-mixed or 32-true"
            )
        self._check_network()
        self._check_mirrors()
        self._check_transfer()
        self._check_cluster()
        fewest = self.cluster.min_workers
        if fewest is not None and fewest > world_size:
            raise ValueError(
                f"cluster.min_workers={fewest} exceeds the {world_size} ranks of execution.num_nodes x num_devices; "
                f"use at most {world_size}"
            )
        if self.recipe.shift_pixels >= self.data.image_size and self.recipe.augment != "none":
            raise ValueError(
                f"recipe.shift_pixels={self.recipe.shift_pixels} is not below data.image_size={self.data.image_size}; "
                "use smaller shifts"
            )
        return self

    @property
    def packages(self) -> tuple[Plugin, ...]:
        """The user's packages that it names; each process that prepares or trains needs them.

        Raises:
            PluginError: nobody offers one.
        """
        return tuple(plugin for plugin in (self.data.plugin, self.model.plugin) if plugin is not None)

    @property
    def _names_own(self) -> bool:
        return not (self.data.source in plugins.EMBEDDED_SOURCES and self.model.name in plugins.EMBEDDED_MODELS)

    def check_own(self) -> None:
        """Check what the packages of the user's own source and model alone can tell; imports them.

        No validator does it: a configuration is also read by processes that have no use for the packages, such as the
        Dask worker that starts a rank.

        Raises:
            ValueError: nobody offers one, or they do not fit each other; one line.
        """
        if self._names_own:
            self.data.check_root()
            self._check_task()

    def _check_task(self) -> None:
        """What the network is to tell must be in the data."""
        name, source = self.model.name, self.data.source
        model, data = plugins.model_facts(name), plugins.source_facts(source)
        wrong = f"model.name={name} does not fit data.source={source}"
        if model.takes_targets != bool(data.target_names):
            lack = "needs angles, and the source has none" if model.takes_targets else "has no use for the angles there"
            raise ValueError(f"{wrong}: it {lack}; twohead and rotated_digits go together")
        if model.takes_clips != data.has_clips:
            lack = (
                "takes clips, and the source has images" if model.takes_clips else "takes images, and there are clips"
            )
            raise ValueError(f"{wrong}: it {lack}; sequence goes with clips or motions")
        if (model.task == "segment") != data.has_masks:
            lack = "has no use for the masks there" if data.has_masks else "needs masks, and the source has none"
            raise ValueError(f"{wrong}: it {lack}; unet goes with pairs or shapes")
        self.recipe.vary.check(model.task, has_targets=model.takes_targets, channels=data.channels, source=source)
        views, side = self.model.test_views, self.data.image_size
        if model.task != "classify" and views > 1:
            raise ValueError(f"model.test_views={views} is for classes of whole images; use test_views=1 with {name}")
        if model.takes_targets and views > 1:
            raise ValueError(
                f"model.test_views={views} does not go with model.name={name}: a mirror image has another angle; "
                "use test_views=1"
            )
        if name == "unet" and side % 2**self.model.depth:
            raise ValueError(
                f"data.image_size={side} cannot be halved model.depth={self.model.depth} times; "
                f"use a multiple of {2**self.model.depth}, or a smaller depth"
            )
        if name == "dncnn" and self.model.depth < MIN_DNCNN_DEPTH:
            raise ValueError(f"model.depth={self.model.depth} is too small for dncnn; use {MIN_DNCNN_DEPTH} or more")

    def _check_network(self) -> None:
        name, side = self.model.name, self.data.image_size
        if name == "whitened" and side < WHITENED_MIN_SIZE:
            raise ValueError(
                f"data.image_size={side} is too small for model.name=whitened, which halves images three times; "
                f"use at least {WHITENED_MIN_SIZE}, or convblocks"
            )
        if self.recipe.optimizer == "muon" and self.execution.strategy == "fsdp":
            raise ValueError(
                "recipe.optimizer=muon does not go with execution.strategy=fsdp: it takes whole filters, and each rank "
                "would have a part of them; use ddp, or another optimizer"
            )

    def _check_mirrors(self) -> None:
        """A mirror image of a sound is played backwards, that of a motion goes the other way."""
        source = self.data.source
        if source in SIGNAL_SOURCES:
            mirrored = f"mirrors images, and those of data.source={source} have time from left to right"
        elif source == "motions":
            mirrored = "mirrors clips, and data.source=motions has their directions as classes"
        else:
            return
        if self.recipe.augment in FLIPPING:
            raise ValueError(f"recipe.augment={self.recipe.augment} {mirrored}; use shift or none")
        if self.model.test_views > 1:
            raise ValueError(f"model.test_views={self.model.test_views} {mirrored}; use test_views=1")

    def _check_transfer(self) -> None:
        if self.model.freeze != "none" and self.model.pretrained is None:
            raise ValueError(
                f"model.freeze={self.model.freeze} without model.pretrained would keep random weights; name weights, "
                "or drop it"
            )
        rate = self.recipe.backbone_rate
        if rate == 1:
            return
        if self.model.freeze == "backbone":
            raise ValueError(
                f"recipe.backbone_rate={rate:g} has no use with model.freeze=backbone, which trains the head alone; "
                "drop one of them"
            )
        if self.recipe.optimizer == "muon":
            raise ValueError(
                f"recipe.backbone_rate={rate:g} does not go with recipe.optimizer=muon, whose rates are for filters, "
                "biases and dense layers; use another optimizer"
            )

    def _check_cluster(self) -> None:
        kind, accelerator = self.cluster.kind, self.execution.accelerator
        if kind == "local_cuda" and accelerator == "cpu":
            raise ValueError(
                "cluster.kind=local_cuda is for GPUs, and execution.accelerator=cpu; use cluster.kind=local"
            )
        if kind == "slurm" and accelerator == "auto":
            raise ValueError(
                "cluster.kind=slurm and execution.accelerator=auto; what to ask Slurm for must be known before: "
                "set execution.accelerator to cpu or gpu"
            )
        if kind == "ssh" and len(self.cluster.hosts) < self.execution.num_nodes:
            raise ValueError(
                f"execution.num_nodes={self.execution.num_nodes} exceeds the {len(self.cluster.hosts)} hosts of "
                "cluster.hosts; name more hosts or train on fewer"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size_over(self.execution.world_size)

    def batch_size_over(self, num_ranks: int) -> int:
        """Samples per step over a number of ranks."""
        return self.recipe.batch_size * (num_ranks if self.recipe.batch_scaling == "weak" else 1)

    def learning_rate_over(self, num_ranks: int) -> float:
        """Peak learning rate after batch scaling: linear in the number of ranks when the global batch grows with it.

        Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), the linear scaling rule.
        """
        return self.recipe.learning_rate * (num_ranks if self.recipe.batch_scaling == "weak" else 1)
