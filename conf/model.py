"""The settings of the network."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.conf import plugins
from paceline.conf.section import Section, Shape, Text

ModelName = Literal["convblocks", "twohead", "whitened", "unet", "dncnn", "resnet18", "resnet50", "sequence"]
LayerName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.\w+)*$", max_length=200)]
"""Of a part of a network, as its parameters have it: `layer1`, `features.4`."""


class Model(Section):
    """The network."""

    name: ModelName | Annotated[Text, Shape(r"(timm/)?[A-Za-z][\w.-]{0,63}", "is not a name")] = "convblocks"
    """Network. `convblocks`: three blocks of convolutions. `twohead`: a small residual net with a class and an angle
    head. `whitened`: three blocks of two convolutions behind a fixed layer that whitens patches; it learns fastest.
    `unet`: the class of each pixel, from data with masks. `dncnn`: the image without its noise, from any images.
    `resnet18`, `resnet50`: residual networks as published, with the parameters' common names; their stem halves images
    twice, small ones too. `sequence`: features of each frame of a clip, then a head over the frames. `timm/NAME`:
    a network of the package timm (`paceline[timm]`), whose mean and deviation normalise the images. Or the name of a
    model that an installed package offers; it may use `width` and `depth` in its own way."""
    width: Annotated[int, Field(ge=1, le=1024)] = 32
    """Filters of the first block; the following blocks have twice as many each. `twohead`: of its first
    convolution. `whitened`: the second and the third block have four times as many. `dncnn`: of all convolutions.
    `resnet18` and `resnet50` ignore `width` and `depth`."""
    depth: Annotated[int, Field(ge=1, le=32)] = 4
    """`convblocks`, `sequence`: convolutions per block; `unet`: times that it halves an image; `dncnn`: convolutions,
    2 or more."""
    test_views: Literal[1, 2, 6] = 1
    """Views of an image over which evaluation and prediction take the mean. 1: the image itself; 2: with its mirror
    image; 6: both, also shifted by a pixel up and left, and down and right. They cost so many times the work."""
    pretrained: Text | None = None
    """Weights to start from: a file (`.safetensors`, or a state dict or checkpoint of torch, of which no code is
    executed), the id of a run, `runs:/RUN_ID/model`, `models:/NAME@ALIAS`, or a directory with a model. A head for
    other classes starts from random weights; all other parts must fit. null: random weights from the seed."""
    freeze: Literal["none", "backbone"] | LayerName = "none"
    """What stays as `pretrained` has it, and works as in evaluation: batch norms keep their statistics, nothing is
    dropped. `backbone`: all but the head; the name of a layer: it and all that the network lists before it. What stays
    at its beginning needs no backward pass, so that a step takes less time."""

    @property
    def task(self) -> plugins.Task:
        """Task of the network: classify, segment or denoise."""
        return plugins.model_facts(self.name).task

    @property
    def plugin(self) -> plugins.Plugin | None:
        """The user's package that offers the model; null for one of Paceline's."""
        return None if self.name in plugins.EMBEDDED_MODELS else plugins.find("model", self.name)
