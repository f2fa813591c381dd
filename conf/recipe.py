"""The settings of how the network is trained."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.conf.augmentation import Vary
from paceline.conf.section import Fraction, Section

Augment = Literal["none", "shift", "flip_shift", "alternating_flip_shift"]
FLIPPING: frozenset[Augment] = frozenset({"flip_shift", "alternating_flip_shift"})


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
