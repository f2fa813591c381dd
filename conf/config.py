"""The configuration of a run as frozen pydantic models; a value that follows from others is a property."""

import warnings
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.conf import plugins
from paceline.conf.cluster import Cluster
from paceline.conf.data import SIGNAL_SOURCES, Data
from paceline.conf.execution import CAPTURED, Execution
from paceline.conf.hints import typed
from paceline.conf.lightning import FIXED, NO_AVERAGES, Lightning
from paceline.conf.model import Model
from paceline.conf.recipe import FLIPPING, Recipe
from paceline.conf.section import Section, Text

SELF_CONTAINED_BASELINES = ("probe", "none")
WHITENED_MIN_SIZE = 9  # pixels of an image: whitening removes one, and the rest is halved three times
ANY_SIZE = ("convblocks", "resnet18", "resnet50", "sequence")  # networks for images of any size
MIN_DNCNN_DEPTH = 2  # convolutions: into the features, and out of them
RatioName = Literal["naive", "competent", "end_to_end", "of_limit"]
Overlap = Literal["queue", "skip", "cancel-oldest"]  # policy for a scheduled run whose predecessor has not ended


class Workload(Section):
    """What is learned: data, model, recipe and seed. Runs are comparable only when their workloads match."""

    data: Data
    model: Model
    recipe: Recipe
    seed: int


class Speedup(Section):
    """How the speedup of the run is measured."""

    baseline: Literal["probe", "matched", "none"] | Annotated[Text, Field(pattern=r"^[0-9a-f]{32}$")] = "probe"
    """Baseline of the speedup. `probe`: one device, 32-true, contiguous, eager, foreground, in a paired measurement.
    `matched`: the newest runs of the experiment that did the same work in this way, with an interval from three runs
    on. A run's id: that run, if it did the same work. `none`: no speedup."""
    num_blocks: Annotated[int, Field(ge=3, le=1000)] = 24
    """Largest number of paired blocks."""
    steps_per_block: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Training steps of one arm in a block; `auto`: enough for a block of a quarter of a second."""
    max_seconds: Annotated[float, Field(gt=0)] = 25.0
    """Time limit of the measured blocks, seconds."""
    starts: Annotated[int, Field(ge=0, le=20)] | Literal["auto"] = "auto"
    """Further fresh processes that probe again after the training, one after the other, to measure how starts differ.
    `auto`: 2 to 5, in at most a twentieth of the training's time, or none where two would take longer. 0: none. Their
    measured blocks together take at most `max_seconds`."""
    target_half_width: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The probe stops early once the relative half-width of the 95 % interval is below this."""
    diagnose: bool = False
    """Measure what limits the step with further arms of the probe: on input that is there already, without exchange of
    gradients, on one device at the same batch, without updating the weights, and at half the batch."""
    factors: Literal["auto", "ladder", "off"] = "auto"
    """Factor card. `ladder`: measure every combination of loading, layout and precision with further arms of the probe,
    as time allows, and show Shapley values. `off`: show one factor at a time, as far as it was measured anyway. `auto`:
    a ladder with `speedup.diagnose` where the networks of its arms fit into a tenth of the free memory."""
    competent_loop: bool = True
    """Also time a loop in plain PyTorch, with the workers of a DataLoader and the precision and layout of the run, in a
    process without Paceline. Needs `speedup.baseline=probe` and `speedup.max_seconds` of at least 10."""
    headline: RatioName = "competent"
    """Ratio in the headline of the report and of the summary. `competent`: over that loop; `naive`: over the baseline;
    `end_to_end`: time from cold start to result, of that loop over that of the run; `of_limit`: share of what the
    device was measured to do. Without the chosen ratio the next one in the order `competent`, `naive` takes its place,
    and is named."""
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
        """Name in MLflow's model registry. A model that passes the gate becomes its newest version, with the alias
        `champion`. The gate asks for at least `min_accuracy` and no regression. The score may be worse than that of the
        champion, and than the model's own in 32-true without folding, by `max_accuracy_loss`. null: no registration."""
        min_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
        """Test score (accuracy, mean IoU or SSIM) that a model needs to be registered; null: the score of
        the champion."""
        on_regression: Literal["mark", "confirm", "bisect", "fail", "off"] = "mark"
        """What happens when the run is worse than the runs of the same settings before it. `mark`: tags, a Prefect
        artifact and an event report it. `confirm`: the last good run is first rebuilt and timed against the new run;
        the alarm is sent in any case, with the result. `bisect`: as `confirm`; after a confirmed alarm, the
        rebuilt changes are searched for the cause, and a second alarm has the result. `fail`: the flow and the command
        fail as well, after everything is recorded. `off`: runs are not compared."""
        confirm_seconds: Annotated[float, Field(gt=0)] = 600.0
        """Time limit of a confirmation, seconds: rebuilding the last good run, and up to twelve short probes."""
        bisect_seconds: Annotated[float, Field(gt=0)] = 7200.0
        """Time limit of the search for the changes that made a run slower, seconds. A search over two changes
        takes at least 154 short probes, about half an hour. A round that has started may exceed the limit by 10 %."""
        max_throughput_loss: Annotated[float, Field(gt=0, lt=1)] = 0.05
        """Loss of training throughput that is to be found within three runs, as a share, relative to the baseline that
        was timed in the same run; twice as much is to be found in a single run."""
        max_accuracy_loss: Annotated[float, Field(gt=0, lt=1)] = 0.01
        """Largest tolerated loss of the test score, or of a metric of your own Lightning code as a share of its level;
        twice as much for a single run."""
        minimize: Annotated[Text, Field(min_length=1)] | None = None
        """Metric of your own Lightning code by which runs are judged in place of a score, smaller is better. null: the
        only metric with `val` and `loss` in its name."""
        maximize: Annotated[Text, Field(min_length=1)] | None = None
        """The same, larger is better."""
        max_data_wait_rise: Annotated[float, Field(gt=0, lt=1)] = 0.05
        """Largest tolerated rise of the share of time spent waiting for data; twice as much for a single run."""

        @property
        def confirms(self) -> bool:
            """Whether the last good run is timed before an alarm is sent."""
            return self.on_regression in ("confirm", "bisect")

        @model_validator(mode="after")
        def _one_goal(self) -> Self:
            if self.minimize is not None and self.maximize is not None:
                raise ValueError(f"minimize={self.minimize} and maximize={self.maximize} are given; remove one")
            return self


Seconds = Annotated[float, Field(gt=0)]


class Limits(Section):
    """How long a stage may take, how often one that was failed from outside is tried, and what a run leaves free.

    Over its limit a stage ends all that it has started and the run is FAILED; what was finished is kept: shards of the
    set, checkpoints, predicted parts. `paceline run --resume RUN_ID limits.train_seconds=7200` resumes it.
    """

    prepare_seconds: Seconds | None = None
    """Time limit of listing and preparing the data, seconds, waits between tries left out; null for none."""
    train_seconds: Seconds | None = None
    """Time limit of the training, seconds; the wait for its devices, the probe and restarts count. A study's hold for
    each of its trainings."""
    evaluate_seconds: Seconds | None = None
    """Time limit of the evaluation, seconds; predictions on the test split are part of the training."""
    predict_seconds: Seconds | None = None
    """Time limit of `paceline predict`, seconds."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1.0
    """Disk space below PACELINE_HOME that a run must leave free, GiB. A run that would leave less, after its prepared
    set and its checkpoints, is refused before it starts, and stopped between two stages. The checkpoints of own
    Lightning code are measured in its first update. A study or a sweep counts the checkpoints of all its trainings. A
    prediction is refused where less is free before it starts."""
    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Further tries of preparation and prediction when a source, a file system or the cluster fails them. A training
    has its own: `execution.max_restarts`."""
    retry_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Wait before each further try, seconds."""


class Config(Section):
    """All settings of a run."""

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
    lightning: Lightning = Lightning()

    @property
    def workload(self) -> Workload:
        """The part that two compared runs must share."""
        return Workload(data=self.data, model=self.model, recipe=self.recipe, seed=self.seed)

    @property
    def stored_size(self) -> tuple[int, str]:
        """Shorter side of the prepared images, pixels, and the reason."""
        return self.data.stored_for(self.recipe.vary.crop_scale)

    @property
    def stored_data(self) -> Data:
        """The settings of the data as preparation needs them, which knows no recipe."""
        return self.data.model_copy(update={"stored_size": self.stored_size[0]})

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.lightning.settings:
            _check_lightning(self)
            return self
        if named := self.track.minimize or self.track.maximize:
            goal = "minimize" if self.track.minimize else "maximize"
            raise ValueError(f"track.{goal}={named} is for your own Lightning code; remove track.{goal}")
        if not self._names_own:
            _check_task(self.data, self.model, self.recipe)
        world_size = self.execution.world_size
        if self.recipe.batch_scaling == "strong" and self.recipe.batch_size % world_size:
            raise ValueError(
                f"recipe.batch_size={self.recipe.batch_size} does not divide over {world_size} ranks "
                f"({self.execution.num_nodes} node x {self.execution.num_devices} devices); "
                f"use a multiple of {world_size}"
            )
        of_gpus = {"16-mixed": "bf16-mixed", "tf32": "32-true"}
        if self.execution.accelerator == "cpu" and self.execution.precision in of_gpus:
            fault = f"execution.precision={self.execution.precision} cannot be used with execution.accelerator=cpu"
            raise ValueError(f"{fault}; use execution.precision={of_gpus[self.execution.precision]}")
        _check_network(self.data, self.model, self.recipe, self.execution)
        _check_mirrors(self.data, self.model, self.recipe)
        _check_transfer(self.model, self.recipe)
        self.cluster.check_execution(self.execution)
        fewest = self.cluster.min_workers
        if fewest is not None and fewest > world_size:
            fault = f"cluster.min_workers={fewest} exceeds the {world_size} ranks of execution.num_nodes x num_devices"
            raise ValueError(f"{fault}; use at most {world_size}")
        pixels, side = self.recipe.shift_pixels, self.data.image_size
        if pixels >= side and self.recipe.augment != "none":
            fault = f"recipe.shift_pixels={pixels} is not below data.image_size={side}"
            raise ValueError(f"{fault}; use at most recipe.shift_pixels={side - 1}")
        return self

    @property
    def packages(self) -> tuple[plugins.Plugin, ...]:
        """The user's packages that it names; each process that prepares or trains needs them."""
        return tuple(plugin for plugin in (self.data.plugin, self.model.plugin) if plugin is not None)

    @property
    def _names_own(self) -> bool:
        return not (self.data.source in plugins.EMBEDDED_SOURCES and self.model.name in plugins.EMBEDDED_MODELS)

    def check_own(self) -> None:
        """Import the user's own source and model; raise ValueError if one is not installed or they do not fit.

        A validator would need the packages in each process that reads a configuration, such as a Dask worker.
        """
        if self._names_own:
            self.data.check_root()
            _check_task(self.data, self.model, self.recipe)

    def with_seed(self, seed: int) -> Self:
        """The same with another seed, which own Lightning code has as `seed_everything`."""
        own = self.lightning
        if own.settings:
            own = own.model_copy(update={"settings": own.settings | {"seed_everything": seed}})
        return self.model_copy(update={"seed": seed, "lightning": own})

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


def _check_lightning(config: Config) -> None:
    """Limits of the user's own Lightning code: only some settings have a meaning there, or work so far."""
    for name, default in (("data", Data()), ("model", Model()), ("recipe", Recipe())):
        if getattr(config, name) != default:
            fault = f"{name}: these settings are for presets, and your own Lightning code has its own"
            raise ValueError(f"{fault}; remove the section {name}")
    for section, values in FIXED.items():
        for name, value in values.items():
            if (given := getattr(getattr(config, section), name)) != value:
                fault = f"{section}.{name}={typed(given)} cannot be used with your own Lightning code so far"
                raise ValueError(f"{fault}; use {section}.{name}={typed(value)}")
    unversioned = [name for name, kind, *_ in map(str.split, config.lightning.packages) if kind == "(code"]
    if config.track.register is not None and (config.lightning.code or unversioned):
        what = f"--code {config.lightning.code}" if config.lightning.code else f"{unversioned[0]}, which has no version"
        fault = f"track.register={config.track.register} cannot be used with {what}"
        remedy = "install your code as a package, and leave out --code"
        raise ValueError(f"{fault}: a model is registered with the package of its code; {remedy}")
    if config.track.confirms:
        fault = f"track.on_regression={config.track.on_regression} cannot be used with your own Lightning code so far"
        raise ValueError(f"{fault}; use track.on_regression=mark")
    _check_own_execution(config.execution)
    if config.execution.strategy == "fsdp":
        _check_shards(config.lightning)
    config.cluster.check_execution(config.execution)


def _check_shards(own: Lightning) -> None:
    """Own code whose ranks share the weights."""
    given = own.settings.get("trainer", {}).get("strategy", "auto")
    if given != "auto":
        shown = given.get("class_path", typed(given)) if isinstance(given, dict) else given
        fault = f"trainer.strategy={shown} cannot be used next to execution.strategy=fsdp"
        raise ValueError(f"{fault}; remove trainer.strategy")
    if own.averages is not None:
        raise ValueError(NO_AVERAGES.format(own.averages))


def _check_own_execution(execution: Execution) -> None:
    precisions = (
        "auto",
        "32-true",
        "64-true",
        "bf16-mixed",
        *(("16-mixed",) if execution.accelerator != "cpu" else ()),
    )
    if execution.precision not in precisions:
        fault = f"execution.precision={execution.precision} cannot be used with your own Lightning code on this device"
        raise ValueError(f"{fault}; use {', '.join(precisions)}")
    if execution.compile in CAPTURED:
        fault = f"execution.compile={execution.compile} cannot be used with your own Lightning code"
        raise ValueError(f"{fault}; use execution.compile=step, auto or off")


def _check_task(data: Data, model: Model, recipe: Recipe) -> None:
    """The data must have the labels that the network learns."""
    name, source = model.name, data.source
    network, samples = plugins.model_facts(name), plugins.source_facts(source)
    wrong = f"model.name={name} does not fit data.source={source}"
    if network.takes_targets != bool(samples.target_names):
        lack = "needs angles" if network.takes_targets else "does not learn angles"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=twohead with data.source=rotated_digits")
    if network.takes_clips != samples.has_clips:
        lack = "takes clips" if network.takes_clips else "takes images"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=sequence with data.source=clips or motions")
    if (network.task == "segment") != samples.has_masks:
        lack = "does not learn masks" if samples.has_masks else "needs masks"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=unet with data.source=pairs or shapes")
    recipe.vary.check(network.task, has_targets=network.takes_targets, channels=samples.channels, source=source)
    views, side = model.test_views, data.image_size
    if views > 1 and (network.task != "classify" or network.takes_targets):
        why = ": a mirror image has another angle" if network.task == "classify" else ""
        raise ValueError(f"model.test_views={views} cannot be used with model.name={name}{why}; use model.test_views=1")
    if name == "unet" and side % 2**model.depth:
        fault = f"data.image_size={side} cannot be halved model.depth={model.depth} times"
        raise ValueError(f"{fault}; use a multiple of {2**model.depth}, or a smaller depth")
    if name == "dncnn" and model.depth < MIN_DNCNN_DEPTH:
        raise ValueError(f"model.depth={model.depth} is too small for dncnn; use {MIN_DNCNN_DEPTH} or more")


def _check_network(data: Data, model: Model, recipe: Recipe, execution: Execution) -> None:
    """Limits of networks and optimizers."""
    name, side = model.name, data.image_size
    if name == "whitened" and side < WHITENED_MIN_SIZE:
        fault = f"data.image_size={side} is too small for model.name=whitened, which halves images three times"
        raise ValueError(f"{fault}; use at least {WHITENED_MIN_SIZE}, or convblocks")
    if recipe.ema in (0, 1):
        outcome = "the weights of the last step, which null gives" if recipe.ema == 0 else "no weights at all"
        raise ValueError(f"recipe.ema={recipe.ema:g} would average {outcome}; use a decay such as 0.999, or null")
    start = recipe.progressive_size
    if start is not None and name not in ANY_SIZE:
        raise ValueError(
            f"recipe.progressive_size={start} cannot be used with model.name={name}: only {', '.join(ANY_SIZE)} take "
            "images of other sizes than data.image_size; use recipe.progressive_size=null"
        )
    if start is not None and start >= side:
        fault = f"recipe.progressive_size={start} is not below data.image_size={side}, up to which images grow"
        raise ValueError(f"{fault}; use a smaller recipe.progressive_size, or null")
    if recipe.optimizer == "muon" and execution.strategy == "fsdp":
        raise ValueError(
            "recipe.optimizer=muon cannot be used with execution.strategy=fsdp: it takes whole filters, and each rank "
            "would have a part of them; use ddp, or another optimizer"
        )


def _check_mirrors(data: Data, model: Model, recipe: Recipe) -> None:
    """Sounds and motions have a direction, which a mirror image reverses."""
    source = data.source
    if source in SIGNAL_SOURCES:
        mirrored = f"mirrors images, and those of data.source={source} have time from left to right"
    elif source == "motions":
        mirrored = "mirrors clips, and data.source=motions has their directions as classes"
    else:
        return
    if recipe.augment in FLIPPING:
        raise ValueError(f"recipe.augment={recipe.augment} {mirrored}; use shift or none")
    if model.test_views > 1:
        raise ValueError(f"model.test_views={model.test_views} {mirrored}; use model.test_views=1")


def _check_transfer(model: Model, recipe: Recipe) -> None:
    """Settings that depend on pretrained weights."""
    if model.freeze != "none" and model.pretrained is None:
        fault = f"model.freeze={model.freeze} without model.pretrained would freeze random weights"
        raise ValueError(f"{fault}; give weights, for example model.pretrained=RUN_ID")
    rate = recipe.backbone_rate
    if rate == 1:
        return
    if model.freeze == "backbone":
        fault = f"recipe.backbone_rate={rate:g} cannot be used with model.freeze=backbone, which trains the head alone"
        raise ValueError(f"{fault}; use model.freeze=none or recipe.backbone_rate=1")
    if recipe.optimizer == "muon":
        raise ValueError(
            f"recipe.backbone_rate={rate:g} cannot be used with recipe.optimizer=muon, whose rates are for filters, "
            "biases and dense layers; use another optimizer"
        )
