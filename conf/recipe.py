"""The settings of how the network is trained, and how its images are varied."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.conf.section import Fraction, Section

Augment = Literal["none", "shift", "flip_shift", "alternating_flip_shift"]
FLIPPING: frozenset[Augment] = frozenset({"flip_shift", "alternating_flip_shift"})
Strength = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(gt=0, le=10)]
COLOURS = 3  # channels of an image that has a saturation


class Vary(Section):
    """How each image is varied in each epoch, after flips and shifts."""

    crop_scale: tuple[Share, Share] | None = None
    """Random crops that are scaled back to the full size: smallest and largest share of an image's area. [0.08,1] is
    that of Szegedy et al. (2015) and of torchvision's RandomResizedCrop. null: no crops. With crops, use
    recipe.shift_pixels=0."""
    crop_ratio: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    """Smallest and largest ratio of width to height of a crop. The default is torchvision's."""
    brightness: Strength = 0.0
    """Random brightness: pixels are multiplied by a factor between 1 - brightness and 1 + brightness."""
    contrast: Strength = 0.0
    """Random contrast: distances from the image's mean grey are multiplied by 1 - contrast to 1 + contrast."""
    saturation: Strength = 0.0
    """Random saturation of colour images: distances from each pixel's grey are multiplied by 1 - saturation to
    1 + saturation."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Each image becomes a mean of itself and another of the rank's batch, weighted by a draw from Beta(mixup, mixup),
    and the loss that of both classes: Zhang et al. (2018), who use 0.2 on ImageNet. 0 for off."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Each image gets a box of another of the rank's batch, whose share of the area is drawn from Beta(cutmix, cutmix),
    and the loss is that of both classes by their areas: Yun et al. (2019), who use 1. 0 for off; with `mixup` too, one
    of the two is drawn for each image."""

    @property
    def mixes(self) -> bool:
        """Whether an image has two classes."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def colours(self) -> bool:
        """Whether pixels change their values where they stand."""
        return max(self.brightness, self.contrast, self.saturation) > 0

    @property
    def is_on(self) -> bool:
        """Whether anything is varied."""
        return self.crop_scale is not None or self.colours or self.mixes

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for name, pair in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            if pair is not None and pair[0] > pair[1]:
                raise ValueError(f"recipe.vary.{name}=[{pair[0]:g},{pair[1]:g}] falls; write [{pair[1]:g},{pair[0]:g}]")
        return self

    def check(self, task: str, *, has_targets: bool, channels: int, source: str) -> None:
        """Raise ValueError for a task, or images with these channels of this source, that cannot be varied."""
        if not self.is_on:
            return
        if task != "classify":
            fault = f"recipe.vary cannot be used with a model that is to {task}"
            raise ValueError(f"{fault}; remove the settings recipe.vary.*")
        if has_targets and (self.mixes or self.crop_scale is not None):
            fault = f"recipe.vary crops or mixes images, which would change the angles of data.source={source}"
            raise ValueError(f"{fault}; use only brightness and contrast")
        if self.saturation and channels != COLOURS:
            raise ValueError(
                f"recipe.vary.saturation={self.saturation:g} cannot be used with data.source={source}, whose images "
                "are grey; remove recipe.vary.saturation"
            )


class Recipe(Section):
    """How the network is trained; part of the workload."""

    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
    """Optimizer; `sgd` is with momentum; `muon` takes orthogonal steps for the filters of convolutions, whose rate is
    `learning_rate`, and those of `sgd` for the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate of one device; multiplied by the number of devices under weak batch scaling."""
    backbone_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate for all parts but the head, for example for pretrained weights."""
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
    ema: Annotated[float, Field(ge=0, le=1)] | None = None
    """Decay per step, between 0 and 1, of an exponential moving average of the weights. 0.999 is an average over some
    1,000 steps. Validation, test and prediction use the average, and it is what is saved; floating-point
    buffers, such as the statistics of batch norms, are averaged in the same way. null: the weights of the last step."""
    label_smoothing: Fraction = 0.0
    """Label smoothing of the cross-entropy."""
    angle_weight: Annotated[float, Field(ge=0)] = 0.1
    """`twohead`: weight of the mean squared angle error (degrees squared), added to the cross-entropy."""
    augment: Augment = "none"
    """`shift`: random translations by up to `shift_pixels`; `flip_shift`: with random left-right flips too;
    `alternating_flip_shift`: with each sample flipped in every second epoch, by a coin in odd or in even ones."""
    noise: Annotated[float, Field(gt=0, le=255)] = 25.0
    """`dncnn`: standard deviation of the Gaussian noise that each image gets in each epoch, in grey levels of 255."""
    shift_pixels: Annotated[int, Field(ge=0, le=64)] = 4
    """Largest random translation in each direction, pixels."""
    progressive_size: Annotated[int, Field(ge=8, multiple_of=4)] | None = None
    """Side of the images at the start of the training, pixels; they grow to `data.image_size`. The epochs have four
    parts of equal length: the size grows evenly from part to part, in multiples of 4 pixels, and is `data.image_size`
    in the last part. The device scales the augmented images. Evaluation and probes use images of full size. null: all
    epochs train at `data.image_size`."""
    vary: Vary = Vary()
    """Random crops, colours and mixtures of images; for classes of whole images."""
    shuffle_mib: Annotated[int, Field(ge=1)] = 256
    """Size of what is shuffled as one, MiB; larger sets are shuffled in blocks of 4 MiB, then within windows of this
    size. `execution.loading=streaming` holds at most two windows in memory."""
