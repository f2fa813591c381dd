"""The settings of variations for larger images: crops, colours, and images that are mixed with others."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.conf.section import Section

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
            raise ValueError(
                f"recipe.vary cannot be used with a model that is to {task}; remove the settings recipe.vary.*"
            )
        if has_targets and (self.mixes or self.crop_scale is not None):
            raise ValueError(
                f"recipe.vary crops or mixes images, which would change the angles of data.source={source}; "
                "use only brightness and contrast"
            )
        if self.saturation and channels != COLOURS:
            raise ValueError(
                f"recipe.vary.saturation={self.saturation:g} cannot be used with data.source={source}, whose images "
                "are grey; remove recipe.vary.saturation"
            )
