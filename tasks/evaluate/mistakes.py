"""The test samples of which a classification was furthest from the truth, as pictures: what it told, and what is there.

From what all ranks told of the whole split, and the pixels of the prepared set. Shapes: N samples, K classes, H height,
W width, C channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.special import log_softmax

from conf.data import NUM_COLOURS
from tasks.errors import RunError
from tasks.evaluate.metrics import read_predictions, read_test_split
from tasks.report.plotting import FONT_POINTS, INK, ORANGE, WIDTH_INCHES, new_figure, shorten
from tasks.records import PreparedSet, TrainResult

NUM_SHOWN, NUM_COLUMNS = 8, 4
STRIP, NUM_STRIPS = 4, 2
"""Frames shown of a clip, beside each other, and strips beside each other."""
SEAM = 0.04
"""Between frames, of their size."""
HEAD, GAP = 0.36, 0.08
"""Room above and beside a picture, of its height."""
HEAD_OF_STRIP, GAP_OF_STRIP = 0.7, 0.24
"""The same of a strip, which is shown lower."""
MAX_SIDE = 128
FULL_SCALE = 255.0
NAME_LENGTH = 12
SPECTROGRAM = "magma"
"""Perceptually even, for pictures whose greys are levels."""


class Mistake(NamedTuple):
    """One test sample."""

    image_HWC: npt.NDArray[np.uint8]
    told: str
    there: str
    probability: float
    """Of the class that was told."""


def worst(train: TrainResult, prepared: PreparedSet, number: int = NUM_SHOWN) -> list[Mistake]:
    """The samples with the largest cross-entropy, the worst first; right ones are among them where few are wrong.

    Raises:
        RunError: The predictions do not fit the split, or its pixels are gone.
    """
    path = Path(prepared.path)
    labels_N = read_test_split(path, prepared.class_names).labels_N
    log_NK = log_softmax(read_predictions(train.predictions, len(labels_N)).kept, axis=1)
    chosen = np.argsort(log_NK[np.arange(len(labels_N)), labels_N], kind="stable")[:number]
    told_N = log_NK.argmax(axis=1)
    images = _images(path, chosen)
    names = prepared.class_names
    return [
        Mistake(image, names[told_N[index]], names[labels_N[index]], float(np.exp(log_NK[index].max())))
        for image, index in zip(images, chosen, strict=True)
    ]


def _images(path: Path, chosen: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
    """Some images of the test split; nothing else of it is read."""
    try:
        shards = [
            np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted((path / "test").glob("*.images.npy"))
        ]
    except (OSError, ValueError) as error:
        raise RunError(f"{path / 'test'}: pixels cannot be read ({error}); prepare the set again") from error
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    places = np.searchsorted(starts, chosen, side="right") - 1
    return [np.array(shards[place][index - starts[place]]) for place, index in zip(places, chosen, strict=True)]


def draw_mistakes(train: TrainResult, prepared: PreparedSet, spectrogram: str | None = None) -> Figure | None:
    """The worst beside and below each other; None where no classes of images are told.

    One picture of all: axes of their own for each take matplotlib three times as long.

    Args:
        train: Names the ranks' files.
        prepared: The set.
        spectrogram: What the axes of its pictures are, where they have time and frequency.
    """
    if train.score_name != "accuracy" or not prepared.num_test:
        return None
    found = worst(train, prepared)
    tiles = [_coloured(mistake.image_HWC, spectrogram is not None) for mistake in found]
    height, width = tiles[0].shape[:2]
    are_clips = found[0].image_HWC.shape[2] > NUM_COLOURS
    num_columns = NUM_STRIPS if are_clips else NUM_COLUMNS
    shares = (HEAD_OF_STRIP, GAP_OF_STRIP) if are_clips else (HEAD, GAP)
    head, gap = (max(1, round(share * height)) for share in shares)
    num_rows = -(-len(tiles) // num_columns)
    canvas = np.zeros((num_rows * (head + height), num_columns * (width + gap) - gap, 4))
    figure, (axis,) = new_figure(0.35 + WIDTH_INCHES * canvas.shape[0] / canvas.shape[1])
    axis.set_axis_off()
    for number, (mistake, tile) in enumerate(zip(found, tiles, strict=True)):
        row, column = divmod(number, num_columns)
        top, left = row * (head + height) + head, column * (width + gap)
        canvas[top : top + height, left : left + width] = tile
        is_right = mistake.told == mistake.there
        truth = "right" if is_right else f"is {shorten(mistake.there, NAME_LENGTH)}"
        axis.text(
            left + width / 2,
            top - 0.04 * height,
            f"{shorten(mistake.told, NAME_LENGTH)} {mistake.probability:.0%}\n{truth}",
            ha="center",
            va="bottom",
            fontsize=FONT_POINTS - 2,
            color=INK if is_right else ORANGE,
            parse_math=False,
        )
    axis.imshow(canvas, interpolation="nearest", extent=(0, canvas.shape[1], canvas.shape[0], 0))
    if spectrogram is not None:
        figure.supxlabel(spectrogram, fontsize=FONT_POINTS - 2, color=INK)
    return figure


def _coloured(image_HWC: npt.NDArray[np.uint8], is_spectrogram: bool) -> npt.NDArray[np.float64]:
    """Red, green, blue and opacity from 0 to 1; large images in a fraction of their size."""
    step = max(1, image_HWC.shape[0] // MAX_SIDE)
    image_HWC = image_HWC[::step, ::step]
    num_frames = image_HWC.shape[2] // NUM_COLOURS
    if num_frames > 1:
        shown = np.linspace(0, num_frames - 1, min(STRIP, num_frames)).round().astype(np.int64)
        frames = np.split(image_HWC, num_frames, axis=2)
        seam = np.zeros((len(image_HWC), max(1, round(SEAM * len(image_HWC))), 4))
        tiles = [_coloured(frames[frame], is_spectrogram) for frame in shown]
        return np.hstack([part for tile in tiles for part in (seam, tile)][1:])
    if image_HWC.shape[2] == 1:
        colours: npt.NDArray[np.float64] = colormaps[SPECTROGRAM if is_spectrogram else "gray"](image_HWC[..., 0])
        return colours
    return np.dstack([image_HWC / FULL_SCALE, np.ones(image_HWC.shape[:2])])
