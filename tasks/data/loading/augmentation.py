"""Batched augmentation on the device: random crops, colour jitter, mixup, CutMix and progressive resizing.

Every number is a function of the seed, the epoch and the sample's place in its order, so all loaders, any number of
passes and a resumed run have the same. Shapes: N samples, C channels, H height, W width, U random numbers of a sample.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from paceline.conf.recipe import COLOURS, Recipe, Vary
from paceline.tasks.data.loading.batch import Array, set_layout
from paceline.tasks.data.loading.sampling import Int64s
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.noise import uniform

Floats = npt.NDArray[np.float64]

NUM_TRIES = 10  # tries for a crop that fits into the image; the fallback is the largest central crop, as in torchvision
NUM_STAGES = 4  # of progressive resizing
STEP_PIXELS = 4  # sizes are multiples of it: convolutional networks halve them, and few sizes need few compilations
GREY = (0.299, 0.587, 0.114)  # Luma of red, green and blue: ITU-R BT.601, as Pillow and torchvision have it
_CROPS, _PLACE, _COLOUR, _MIX = slice(0, 2 * NUM_TRIES), slice(20, 22), slice(22, 25), slice(25, 29)
_NUM_UNIFORM = 29  # U. Each use has its own ones, so that switching one on leaves the others as they were.


class Variation:
    """Augments batches whose images were normalised by `mean` and `std` (0 for a channel without variance).

    `draw` computes what varies on the host; applying it to a batch needs the same arrays on the batch's device.
    """

    def __init__(
        self, settings: Vary, mean: Sequence[float], std: Sequence[float], seed: int, device: torch.device
    ) -> None:
        self._settings, self._seed = settings, seed
        self._mean_C = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._std_C = torch.tensor([deviation or 1.0 for deviation in std], device=device).view(1, -1, 1, 1)

    def draw(self, draw_N: Int64s, shape: tuple[int, int]) -> dict[str, Array]:
        """Draw for images of a height and width, where `draw_N` is another number for each sample and epoch."""
        settings, drawn = self._settings, dict[str, Array]()
        if not settings.is_on or not len(draw_N):
            return {}
        uniform_NU = uniform(torch.from_numpy(draw_N), _NUM_UNIFORM, self._seed).numpy()
        if settings.crop_scale is not None:
            drawn["boxes_N4"] = boxes(settings, uniform_NU, shape)
        if settings.colours:
            strengths = np.array((settings.brightness, settings.contrast, settings.saturation))
            drawn["factors_N3"] = (1 + strengths * (2 * uniform_NU[:, _COLOUR] - 1)).astype(np.float32)
        return drawn | (draw_mix(settings, uniform_NU[:, _MIX], shape) if settings.mixes else {})

    def __call__(self, batch: Batch, drawn: Mapping[str, Tensor], *, channels_last: bool) -> Batch:
        """Augment a normalised batch."""
        settings, images_NCHW = self._settings, batch.images_NCHW
        if not settings.is_on or not len(images_NCHW):
            return batch
        if settings.crop_scale is not None:
            images_NCHW = resize_boxes(images_NCHW, drawn["boxes_N4"])
        if settings.colours:
            images_NCHW = self._vary_colours(images_NCHW, drawn["factors_N3"])
        batch = batch._replace(images_NCHW=images_NCHW)
        if settings.mixes:
            batch = mix(batch, drawn)
        return batch._replace(images_NCHW=set_layout(batch.images_NCHW, channels_last=channels_last))

    def _vary_colours(self, images_NCHW: Tensor, factors_N3: Tensor) -> Tensor:
        mean, std = self._mean_C, self._std_C
        bright, contrast, saturation = (column_N.view(-1, 1, 1, 1) for column_N in factors_N3.unbind(1))
        pixels_NCHW = (images_NCHW * std + mean).mul_(bright).clamp_(0, 1)
        if self._settings.contrast:
            pixels_NCHW = _apart(pixels_NCHW, grey(pixels_NCHW).mean(dim=(1, 2, 3), keepdim=True), contrast)
        if self._settings.saturation:
            pixels_NCHW = _apart(pixels_NCHW, grey(pixels_NCHW), saturation)
        return (pixels_NCHW - mean) / std


def grey(pixels_NCHW: Tensor) -> Tensor:
    """Luma of each pixel, repeated in each channel (N, C, H, W), frame by frame for clips."""
    if pixels_NCHW.shape[1] % COLOURS:
        return pixels_NCHW
    frames_NTCHW: Tensor = pixels_NCHW.unflatten(1, (-1, COLOURS))
    grey_NT1HW = (frames_NTCHW * _grey_weights(pixels_NCHW.device)).sum(dim=2, keepdim=True)
    return grey_NT1HW.expand_as(frames_NTCHW).flatten(1, 2)


@lru_cache
def _grey_weights(device: torch.device) -> Tensor:
    """On the device once: each copy would wait for it."""
    return torch.tensor(GREY, device=device).view(1, 1, -1, 1, 1)


def _apart(pixels_NCHW: Tensor, centre: Tensor, factor: Tensor) -> Tensor:
    return (centre + (pixels_NCHW - centre) * factor).clamp_(0, 1)


def crops(settings: Vary, draw_N: Int64s, seed: int, sizes_N2: Int64s) -> Int64s:
    """The crops (N, 4) of images of these heights and widths, by the numbers that `Variation` draws."""
    return boxes(settings, uniform(torch.from_numpy(draw_N), _NUM_UNIFORM, seed).numpy(), sizes_N2.T)


def boxes(settings: Vary, uniform_NU: Floats, shape: Sequence[int] | Int64s) -> Int64s:
    """Crops (N, 4): top, left, height and width, whole pixels.

    As torchvision's RandomResizedCrop: areas are uniform, ratios in their logarithm, places uniform among those inside.
    `uniform_NU` is in [0, 1), `shape` the height and width of the images, or those of each.
    """
    assert settings.crop_scale is not None
    tall_N1, wide_N1 = np.array(shape).reshape(2, -1, 1)
    tall, wide = tall_N1[:, 0], wide_N1[:, 0]
    tries_NK2 = uniform_NU[:, _CROPS].reshape(-1, NUM_TRIES, 2)
    least, largest = settings.crop_scale
    area_NK = tall_N1 * wide_N1 * (least + (largest - least) * tries_NK2[..., 0])
    low, high = np.log(settings.crop_ratio)
    ratio_NK = np.exp(low + (high - low) * tries_NK2[..., 1])
    height_NK = np.rint(np.sqrt(area_NK / ratio_NK)).astype(np.int64)
    width_NK = np.rint(np.sqrt(area_NK * ratio_NK)).astype(np.int64)
    fits_NK = (height_NK > 0) & (height_NK <= tall_N1) & (width_NK > 0) & (width_NK <= wide_N1)
    first, fits_N = (np.arange(len(fits_NK)), fits_NK.argmax(axis=1)), fits_NK.any(axis=1)
    ratio = np.clip(wide / tall, *settings.crop_ratio)
    height_N = np.where(fits_N, height_NK[first], np.minimum(tall, np.rint(wide / ratio)))
    width_N = np.where(fits_N, width_NK[first], np.minimum(wide, np.rint(tall * ratio)))
    place_N2 = np.where(fits_N[:, np.newaxis], uniform_NU[:, _PLACE], 0.5)
    top_N = (place_N2[:, 0] * (tall - height_N + fits_N)).astype(np.int64)
    left_N = (place_N2[:, 1] * (wide - width_N + fits_N)).astype(np.int64)
    return np.stack([top_N, left_N, height_N, width_N], axis=1).astype(np.int64)


def resize_boxes(images_NCHW: Tensor, boxes_N4: Tensor) -> Tensor:
    """Scale one box of each image to the size of the image, bilinearly, without pixels from outside of the box."""
    tall, wide = images_NCHW.shape[2:]
    top, left, height, width = boxes_N4.unbind(1)
    rows_NH, columns_NW = _places(top, height, tall), _places(left, width, wide)
    places = columns_NW[:, None, :].expand(-1, tall, -1), rows_NH[:, :, None].expand(-1, -1, wide)
    grid_NHW2 = torch.stack(places, dim=-1)
    return functional.grid_sample(images_NCHW, grid_NHW2, mode="bilinear", padding_mode="border", align_corners=False)


def _places(start_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """Where each of `size` pixels looks, as `grid_sample` counts: from -1 to 1 over the whole image."""
    start, length = start_N[:, None].float(), length_N[:, None].float()
    steps = torch.arange(size, device=start_N.device, dtype=torch.float32)[None]
    pixels = start + ((steps + 0.5) * length / size - 0.5).clamp(min=torch.zeros_like(length), max=length - 1)
    return (2 * pixels + 1) / size - 1


def draw_mix(settings: Vary, uniform_N4: Floats, shape: tuple[int, int]) -> dict[str, Array]:
    """Draw mixtures: `blend_N` of two images, `edges_N4` of CutMix boxes, and the images' own `shares_N` in both.

    `uniform_N4` decides on the kind of mixture, the share, and a box's row and column.
    """
    cut_N = uniform_N4[:, 0] < (0.5 if settings.mixup else 1.0) if settings.cutmix else np.zeros(len(uniform_N4), bool)
    blend_N = np.where(cut_N, 1.0, beta(settings.mixup, uniform_N4[:, 1])) if settings.mixup else np.ones(len(cut_N))
    drawn: dict[str, Array] = {"blend_N": blend_N.astype(np.float32)}
    share_N = blend_N
    if settings.cutmix:
        edges_N4 = _cut_edges(cut_N, beta(settings.cutmix, uniform_N4[:, 1]), uniform_N4[:, 2:], shape)
        top_N, bottom_N, left_N, right_N = edges_N4.T
        inside_N = (bottom_N - top_N) * (right_N - left_N) / (shape[0] * shape[1])
        share_N = np.where(cut_N, 1 - inside_N, blend_N)
        drawn["edges_N4"] = edges_N4
    return drawn | {"shares_N": share_N.astype(np.float32)}


def mix(batch: Batch, drawn: Mapping[str, Tensor]) -> Batch:
    """Mix samples without targets with their mirror positions in the batch, whose order is random already."""
    images_NCHW = batch.images_NCHW
    others_NCHW = images_NCHW.flip(0)
    blend = drawn["blend_N"].view(-1, 1, 1, 1)
    mixed_NCHW = torch.where(blend == 1, images_NCHW, images_NCHW * blend + others_NCHW * (1 - blend))
    if "edges_N4" in drawn:
        tall, wide = images_NCHW.shape[2:]
        top_N, bottom_N, left_N, right_N = drawn["edges_N4"].unbind(1)
        rows_NH, columns_NW = _between(top_N, bottom_N, tall), _between(left_N, right_N, wide)
        inside_NHW = rows_NH[:, :, None] & columns_NW[:, None, :]
        mixed_NCHW = torch.where(inside_NHW[:, None], others_NCHW, mixed_NCHW)
    others_N, shares_N = batch.labels_N.flip(0), drawn["shares_N"]
    return batch._replace(images_NCHW=mixed_NCHW, mixed_labels_N=others_N, mix_weights_N=shares_N)


def beta(alpha: float, uniform_N: Floats) -> Floats:
    """Draws from Beta(alpha, alpha), as the inverse of its distribution."""
    from scipy.special import betaincinv  # 0.2 s that few trainings need

    return np.asarray(betaincinv(alpha, alpha, uniform_N))


def _cut_edges(cut_N: npt.NDArray[np.bool_], share_N: Floats, place_N2: Floats, shape: tuple[int, int]) -> Floats:
    """Top, bottom, left and right (N, 4) of the CutMix boxes, clipped to the image; empty boxes where none is cut."""
    side_N = np.sqrt(1 - share_N) * cut_N
    edges = []
    for place_N, size in zip(place_N2.T, shape, strict=True):
        centre_N, length_N = np.floor(place_N * size), np.floor(side_N * size)
        start_N = np.clip(centre_N - length_N // 2, 0, size)
        edges += [start_N, np.where(cut_N, np.clip(centre_N - length_N // 2 + length_N, 0, size), start_N)]
    return np.stack(edges, axis=1)


def _between(start_N: Tensor, stop_N: Tensor, size: int) -> Tensor:
    """Mask (N, size) of the places from start to stop."""
    places = torch.arange(size, device=start_N.device)[None]
    return (places >= start_N[:, None]) & (places < stop_N[:, None])


def size_of_epoch(recipe: Recipe, image_size: int, epoch: int) -> int:
    """The side of the training images in an epoch (0-based), pixels: small at first, the full size in the last stage.

    Source: Howard, "Training Imagenet in 3 hours for 25 minutes" (fast.ai, 2018); Tan and Le, "EfficientNetV2" (2021),
    section 4, for a growth in stages of equal length.
    """
    start = recipe.progressive_size
    stage = -(-NUM_STAGES * (epoch + 1) // recipe.num_epochs) - 1
    if start is None or stage >= NUM_STAGES - 1:
        return image_size
    return start + (image_size - start) * stage // ((NUM_STAGES - 1) * STEP_PIXELS) * STEP_PIXELS


def resize_for_epoch(batch: Batch, recipe: Recipe, epoch: int) -> Batch:
    """Scale a batch's images (N, C, H, W) to the size of the epoch, where that is another one."""
    images_NCHW = batch.images_NCHW
    size = size_of_epoch(recipe, images_NCHW.shape[-1], epoch)
    if images_NCHW.shape[-1] == size:
        return batch
    resized: Tensor = functional.interpolate(images_NCHW, (size, size), mode="bilinear", antialias=True)
    return batch._replace(images_NCHW=resized)
