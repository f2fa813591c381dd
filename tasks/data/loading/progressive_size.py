"""Progressive resizing: images that are small in the first epochs and grow to their full size.

Source: Howard, "Training Imagenet in 3 hours for 25 minutes" (fast.ai, 2018); Tan and Le, "EfficientNetV2" (2021),
section 4, for a growth in stages of equal length.
"""

import torch
from torch.nn import functional

from paceline.conf.recipe import Recipe
from paceline.tasks.model.batch import Batch

NUM_STAGES = 4
STEP_PIXELS = 4
"""Sizes are multiples of it: convolutional networks halve them, and few sizes need few compilations."""


def size_of_epoch(recipe: Recipe, image_size: int, epoch: int) -> int:
    """The side of the training images in an epoch (0-based), pixels; the full size in the last stage."""
    start = recipe.progressive_size
    stage = -(-NUM_STAGES * (epoch + 1) // recipe.num_epochs) - 1
    if start is None or stage >= NUM_STAGES - 1:
        return image_size
    return start + (image_size - start) * stage // ((NUM_STAGES - 1) * STEP_PIXELS) * STEP_PIXELS


def resize(batch: Batch, recipe: Recipe, epoch: int) -> Batch:
    """Scale a batch's images (N, C, H, W) to the size of the epoch, where that is another one."""
    images_NCHW = batch.images_NCHW
    size = size_of_epoch(recipe, images_NCHW.shape[-1], epoch)
    if images_NCHW.shape[-1] == size:
        return batch
    resized: torch.Tensor = functional.interpolate(images_NCHW, (size, size), mode="bilinear", antialias=True)
    return batch._replace(images_NCHW=resized)
