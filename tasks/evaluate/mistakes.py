"""The test samples of which a classification was furthest from the truth, as pictures: what it told, and what is there.

From what all ranks told of the whole split, and the pixels of the prepared set. Shapes: N samples, K classes, H height,
W width, C channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy.special import log_softmax

from tasks.errors import RunError
from tasks.evaluate.metrics import read_predictions, read_test_split
from tasks.figures import FONT_POINTS, INK, ORANGE, new_grid, shorten
from tasks.records import PreparedSet, TrainResult

NUM_SHOWN, NUM_COLUMNS = 8, 4
INCHES, TITLE_INCHES = 1.15, 0.4
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
    """A grid of the worst; None where no classes of images are told.

    Args:
        train: Names the ranks' files.
        prepared: The set.
        spectrogram: What the axes of its pictures are, where they have time and frequency.
    """
    if train.score_name != "accuracy" or not prepared.num_test:
        return None
    found = worst(train, prepared)
    num_rows = -(-len(found) // NUM_COLUMNS)
    figure, axes = new_grid(num_rows, NUM_COLUMNS, INCHES)
    figure.set_figheight(0.25 + num_rows * (INCHES + TITLE_INCHES))
    for number, (image_HWC, told, there, probability) in enumerate(found):
        axis = axes[number // NUM_COLUMNS][number % NUM_COLUMNS]
        if image_HWC.shape[2] == 1:
            colours = "gray" if spectrogram is None else SPECTROGRAM
            axis.imshow(image_HWC[..., 0], cmap=colours, vmin=0, vmax=255, interpolation="nearest")
        else:
            axis.imshow(image_HWC, interpolation="nearest")
        is_right = told == there
        truth = "right" if is_right else f"is {shorten(there, NAME_LENGTH)}"
        axis.set_title(
            f"{shorten(told, NAME_LENGTH)} {probability:.0%}\n{truth}",
            fontsize=FONT_POINTS - 2,
            color=INK if is_right else ORANGE,
            parse_math=False,
        )
    if spectrogram is not None:
        figure.supxlabel(spectrogram, fontsize=FONT_POINTS - 2, color=INK)
    return figure
