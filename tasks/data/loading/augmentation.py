"""Batched augmentation on the device: random crops, colour jitter, mixup and CutMix.

Every number is a function of the seed, the epoch and the sample's place in its order, so all loaders, any number of
passes and a resumed run have the same.

Shapes: N samples, C channels, H height, W width, U random numbers of a sample.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from paceline.conf.augmentation import COLOURS, Vary
from paceline.tasks.data.loading.batch import set_layout
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.noise import uniform

Floats = npt.NDArray[np.float64]

NUM_TRIES = 10  # tries for a crop that fits into the image; the fallback is the largest central crop, as in torchvision
GREY = (0.299, 0.587, 0.114)  # Luma of red, green and blue: ITU-R BT.601, as Pillow and torchvision have it
_CROPS, _PLACE, _COLOUR, _MIX = (slice(0, 2 * NUM_TRIES), slice(20, 22), slice(22, 25), slice(25, 29))
_NUM_UNIFORM = 29  # U. Each use has its own ones, so that switching one on leaves the others as they were.


class Variation:
    """Augments batches whose images were normalised by `mean` and `std` (0 for a channel without variance)."""

    def __init__(self, settings: Vary, mean: Sequence[float], std: Sequence[float], seed: int) -> None:
        self._settings = settings
        self._mean_C = torch.tensor(mean).view(1, -1, 1, 1)
        self._std_C = torch.tensor([deviation or 1.0 for deviation in std]).view(1, -1, 1, 1)
        self._seed = seed

    def __call__(self, batch: Batch, draw_N: npt.NDArray[np.int64], *, channels_last: bool) -> Batch:
        """Augment a normalised batch, where `draw_N` is another number for each sample and epoch."""
        settings, images_NCHW = self._settings, batch.images_NCHW
        if not settings.is_on or not len(draw_N):
            return batch
        uniform_NU = uniform(torch.from_numpy(draw_N), _NUM_UNIFORM, self._seed).numpy()
        if settings.crop_scale is not None:
            images_NCHW = resize_boxes(images_NCHW, boxes(settings, uniform_NU, images_NCHW.shape[2:]))
        if settings.colours:
            images_NCHW = self._vary_colours(images_NCHW, uniform_NU[:, _COLOUR])
        batch = batch._replace(images_NCHW=images_NCHW)
        if settings.mixes:
            batch = mix(batch, settings, uniform_NU[:, _MIX])
        return batch._replace(images_NCHW=set_layout(batch.images_NCHW, channels_last=channels_last))

    def _vary_colours(self, images_NCHW: Tensor, uniform_N3: Floats) -> Tensor:
        device = images_NCHW.device
        mean, std = self._mean_C.to(device), self._std_C.to(device)
        strengths = (self._settings.brightness, self._settings.contrast, self._settings.saturation)
        factors_N3 = 1 + np.array(strengths) * (2 * uniform_N3 - 1)
        bright, contrast, saturation = (_column(factors_N3[:, which], device) for which in range(3))
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
    weights = torch.tensor(GREY, device=pixels_NCHW.device).view(1, 1, -1, 1, 1)
    frames_NTCHW: Tensor = pixels_NCHW.unflatten(1, (-1, COLOURS))
    return (frames_NTCHW * weights).sum(dim=2, keepdim=True).expand_as(frames_NTCHW).flatten(1, 2)


def _apart(pixels_NCHW: Tensor, centre: Tensor, factor: Tensor) -> Tensor:
    return (centre + (pixels_NCHW - centre) * factor).clamp_(0, 1)


def boxes(settings: Vary, uniform_NU: Floats, shape: Sequence[int]) -> npt.NDArray[np.int64]:
    """Crops (N, 4): top, left, height and width, whole pixels.

    As torchvision's RandomResizedCrop: areas are uniform, ratios in their logarithm, places uniform among those inside.
    `uniform_NU` is in [0, 1), `shape` the height and width of the images.
    """
    assert settings.crop_scale is not None
    tall, wide = shape
    tries_NK2 = uniform_NU[:, _CROPS].reshape(-1, NUM_TRIES, 2)
    least, largest = settings.crop_scale
    area_NK = tall * wide * (least + (largest - least) * tries_NK2[..., 0])
    low, high = np.log(settings.crop_ratio)
    ratio_NK = np.exp(low + (high - low) * tries_NK2[..., 1])
    height_NK = np.rint(np.sqrt(area_NK / ratio_NK)).astype(np.int64)
    width_NK = np.rint(np.sqrt(area_NK * ratio_NK)).astype(np.int64)
    fits_NK = (height_NK > 0) & (height_NK <= tall) & (width_NK > 0) & (width_NK <= wide)
    first_N = fits_NK.argmax(axis=1)[:, np.newaxis]
    fits_N = fits_NK.any(axis=1)
    ratio = min(max(wide / tall, settings.crop_ratio[0]), settings.crop_ratio[1])
    height_N = np.where(fits_N, np.take_along_axis(height_NK, first_N, 1)[:, 0], min(tall, round(wide / ratio)))
    width_N = np.where(fits_N, np.take_along_axis(width_NK, first_N, 1)[:, 0], min(wide, round(tall * ratio)))
    place_N2 = np.where(fits_N[:, np.newaxis], uniform_NU[:, _PLACE], 0.5)
    top_N = (place_N2[:, 0] * (tall - height_N + fits_N)).astype(np.int64)
    left_N = (place_N2[:, 1] * (wide - width_N + fits_N)).astype(np.int64)
    return np.stack([top_N, left_N, height_N, width_N], axis=1)


def resize_boxes(images_NCHW: Tensor, boxes_N4: npt.NDArray[np.int64]) -> Tensor:
    """Scale one box of each image to the size of the image, bilinearly, without pixels from outside of the box."""
    tall, wide = images_NCHW.shape[2:]
    top, left, height, width = (torch.from_numpy(column).to(images_NCHW.device) for column in boxes_N4.T)
    rows_NH, columns_NW = _places(top, height, tall), _places(left, width, wide)
    grid_NHW2 = torch.stack(
        [columns_NW[:, None, :].expand(-1, tall, -1), rows_NH[:, :, None].expand(-1, -1, wide)], dim=-1
    )
    return functional.grid_sample(images_NCHW, grid_NHW2, mode="bilinear", padding_mode="border", align_corners=False)


def _places(start_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """Where each of `size` pixels looks, as `grid_sample` counts: from -1 to 1 over the whole image."""
    start, length = start_N[:, None].float(), length_N[:, None].float()
    steps = torch.arange(size, device=start_N.device, dtype=torch.float32)[None]
    pixels = start + ((steps + 0.5) * length / size - 0.5).clamp(min=torch.zeros_like(length), max=length - 1)
    return (2 * pixels + 1) / size - 1


def mix(batch: Batch, settings: Vary, uniform_N4: Floats) -> Batch:
    """Mix each sample with its mirror position in the batch; the order of a batch is random already.

    `uniform_N4` decides on the kind of mixture, the share, and a box's row and column. The samples have no targets.
    """
    images_NCHW = batch.images_NCHW
    others_NCHW = images_NCHW.flip(0)
    cut_N = uniform_N4[:, 0] < (0.5 if settings.mixup else 1.0) if settings.cutmix else np.zeros(len(uniform_N4), bool)
    blend_N = np.where(cut_N, 1.0, beta(settings.mixup, uniform_N4[:, 1])) if settings.mixup else np.ones(len(cut_N))
    blend = _column(blend_N, images_NCHW.device)
    mixed_NCHW = torch.where(blend == 1, images_NCHW, images_NCHW * blend + others_NCHW * (1 - blend))
    share_N = blend_N
    if settings.cutmix:
        inside_NHW, inside_N = _cut(cut_N, beta(settings.cutmix, uniform_N4[:, 1]), uniform_N4[:, 2:], images_NCHW)
        mixed_NCHW = torch.where(inside_NHW[:, None], others_NCHW, mixed_NCHW)
        share_N = np.where(cut_N, 1 - inside_N, blend_N)
    shares = torch.from_numpy(share_N.astype(np.float32)).to(images_NCHW.device)
    return batch._replace(images_NCHW=mixed_NCHW, mixed_labels_N=batch.labels_N.flip(0), mix_weights_N=shares)


def beta(alpha: float, uniform_N: Floats) -> Floats:
    """Draws from Beta(alpha, alpha), as the inverse of its distribution."""
    from scipy.special import betaincinv  # 0.2 s that few trainings need

    drawn: Floats = betaincinv(alpha, alpha, uniform_N)
    return drawn


def _cut(cut_N: npt.NDArray[np.bool_], share_N: Floats, place_N2: Floats, images_NCHW: Tensor) -> tuple[Tensor, Floats]:
    """Mask (N, H, W) of the CutMix boxes, clipped to the image, and their share (N,) of the area."""
    tall, wide = images_NCHW.shape[2:]
    side_N = np.sqrt(1 - share_N) * cut_N
    edges = []
    for place_N, size in ((place_N2[:, 0], tall), (place_N2[:, 1], wide)):
        centre_N, length_N = np.floor(place_N * size), np.floor(side_N * size)
        start_N = np.clip(centre_N - length_N // 2, 0, size)
        stop_N = np.where(cut_N, np.clip(centre_N - length_N // 2 + length_N, 0, size), start_N)
        edges.append((start_N, stop_N))
    (top_N, bottom_N), (left_N, right_N) = edges
    device = images_NCHW.device
    rows_NH = _between(top_N, bottom_N, tall, device)
    columns_NW = _between(left_N, right_N, wide, device)
    return rows_NH[:, :, None] & columns_NW[:, None, :], (bottom_N - top_N) * (right_N - left_N) / (tall * wide)


def _between(start_N: Floats, stop_N: Floats, size: int, device: torch.device) -> Tensor:
    places = torch.arange(size, device=device)[None]
    start, stop = (torch.from_numpy(edge_N).to(device)[:, None] for edge_N in (start_N, stop_N))
    return (places >= start) & (places < stop)


def _column(values_N: Floats, device: torch.device) -> Tensor:
    return torch.from_numpy(values_N.astype(np.float32)).to(device).view(-1, 1, 1, 1)
