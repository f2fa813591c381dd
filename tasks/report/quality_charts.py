"""Pictures of quality: the confusion matrix, the score of each class, and what is told of some pictures.

Each function returns a matplotlib Figure; `paceline.tasks.report.plotting` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy.special import log_softmax

from paceline.conf.data import NUM_COLOURS
from paceline.tasks.errors import RunError
from paceline.tasks.evaluate.metrics import read_predictions, read_test_split
from paceline.tasks.records import EvaluateResult, PreparedSet, TrainResult
from paceline.tasks.report.plotting import (
    BLUE,
    FONT_POINTS,
    GREY,
    INK,
    ORANGE,
    WHITE,
    WIDTH_INCHES,
    new_figure,
    new_grid,
    set_title,
    shorten,
    svg_text,
)
from paceline.tasks.scores import class_scores

CLASS_COLOURS = np.array(
    [to_rgb("black"), to_rgb("lightgrey"), *(to_rgb(f"C{number}") for number in range(10)), to_rgb("white")]
)
"""Of no class, of the first one, which is mostly the background, of the next ten, and of all others."""
MAX_COLOUR = len(CLASS_COLOURS) - 1
MAX_LEGEND_NAME = 10
"""Of longer names three do not stand side by side below the pictures."""
MAX_NAMED_CLASSES = 40
"""More classes than these are numbered on some ticks instead of named on all."""
MAX_COUNTED_CLASSES = 15
"""More classes than these have no room for counts in the cells."""
MAX_LARGE_COUNTS = 6
"""Up to so many classes the counts are in full size."""
MAX_LARGE_NAMES = 20
"""Up to so many classes their names are."""
MAX_LEVEL_NAME = 2
"""Longer names stand upright below the picture."""
DARK_SHARE = 0.5
"""Cells of a larger share are dark and take light numbers."""
MAX_BARS = 30
"""More classes than these: only the worst are drawn."""


def draw_confusion(confusion: Sequence[Sequence[int]], class_names: Sequence[str]) -> Figure:
    """Rows: true class; columns: predicted. Colour: share of the true class; numbers: samples, where they fit.

    Args:
        confusion: Square, `num_classes` each way.
        class_names: One per class.
    """
    counts = np.asarray(confusion, dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, (axis,) = new_figure(4.4)
    # Colour by opacity, so that the picture fits a light and a dark page.
    picture = np.empty((*shares.shape, 4))
    picture[..., :3] = to_rgb(BLUE)
    picture[..., 3] = np.sqrt(shares)  # square root: single confusions stay visible beside the diagonal
    axis.imshow(picture, interpolation="nearest", aspect="equal")
    axis.spines[:].set_visible(False)
    if len(class_names) <= MAX_COUNTED_CLASSES:
        _write_counts(axis, counts, shares)
    _name_classes(axis, class_names)
    axis.set_xlabel("predicted", fontsize=FONT_POINTS, color=INK)
    axis.set_ylabel("true", fontsize=FONT_POINTS, color=INK)
    set_title(axis, "Confusion")
    return figure


def _write_counts(axis: Axes, counts: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> None:
    size = FONT_POINTS if len(counts) <= MAX_LARGE_COUNTS else FONT_POINTS - 2
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = WHITE if shares[row, column] > DARK_SHARE else INK
            axis.text(column, row, str(count), ha="center", va="center", fontsize=size, color=colour)


def _name_classes(axis: Axes, class_names: Sequence[str]) -> None:
    num_classes = len(class_names)
    if num_classes > MAX_NAMED_CLASSES:
        ticks = list(range(0, num_classes, 10))
        axis.set_xticks(ticks)
        axis.set_yticks(ticks)
        return
    size = FONT_POINTS - 1 if num_classes <= MAX_LARGE_NAMES else 5.5
    names = [shorten(name, 12) for name in class_names]
    steep = max(len(name) for name in names) > MAX_LEVEL_NAME
    places = range(num_classes)
    axis.set_xticks(places, names, rotation=90 if steep else 0, fontsize=size, parse_math=False)
    axis.set_yticks(places, names, fontsize=size, parse_math=False)


def draw_classes(scores: Mapping[str, float | None], word: str = "accuracy") -> Figure | None:
    """Bars, the worst first; classes without samples are left out; None if there is no class."""
    known = sorted(((name, value) for name, value in scores.items() if value is not None), key=lambda it: it[1])
    if not known:
        return None
    shown = known[:MAX_BARS]
    figure, (axis,) = new_figure(0.7 + 0.23 * len(shown))
    places = np.arange(len(shown))[::-1]
    mean = float(np.mean([value for _, value in known]))
    axis.barh(places, [value for _, value in shown], height=0.66, color=BLUE)
    for place, (_, value) in zip(places, shown, strict=True):
        axis.text(value + 0.015, place, f"{value:.1%}", va="center", fontsize=FONT_POINTS, color=INK)
    axis.set_yticks(places, [shorten(name, 18) for name, _ in shown], parse_math=False)
    axis.set_xlim(0, 1.2)
    axis.set_xticks([])
    axis.spines[["bottom"]].set_visible(False)
    axis.set_ylim(-0.7, len(shown) - 0.3)
    fewer = f", worst {len(shown)} of {len(known)}" if len(shown) < len(known) else ""
    set_title(axis, f"{word[0].upper()}{word[1:]} per class (mean {mean:.1%}{fewer})")
    return figure


def draw_quality(result: EvaluateResult) -> dict[str, Figure]:
    """All pictures of quality by name."""
    figures = {}
    if result.confusion:
        figures["confusion"] = draw_confusion(result.confusion, tuple(result.per_class_accuracy))
    word, scores = class_scores(result)
    bars = draw_classes(scores, word)
    return figures if bars is None else figures | {f"class_{word.lower()}": bars}


def draw_examples(train: TrainResult, prepared: PreparedSet) -> Figure | None:
    """Some test samples, each in a row: what the network saw, what it told, what is there; None without any."""
    if train.examples is None:
        return None
    with np.load(train.examples, allow_pickle=False) as arrays:
        seen, told, there = (arrays[name] for name in ("seen", "told", "there"))
    channels = prepared.picture_shape[2]
    shown = [_pictures(values, prepared.mean[:channels], prepared.std[:channels]) for values in (seen, told, there)]
    if len(seen) == 0:
        return None
    figure, axes = new_grid(len(seen), len(shown))
    for column, (title, pictures) in enumerate(zip(("seen", "told", "there"), shown, strict=True)):
        for row, picture in enumerate(pictures):
            axes[row][column].imshow(picture, interpolation="nearest")
        axes[0][column].set_title(title, fontsize=FONT_POINTS, color=INK)
    if told.ndim == 3:  # noqa: PLR2004  classes, not pictures
        _name_colours(figure, np.union1d(told, there).round().astype(int).tolist(), prepared.class_names)
    return figure


def _name_colours(figure: Figure, classes: Sequence[int], class_names: Sequence[str]) -> None:
    """Below the pictures, the colours that are in them."""
    names = {0: "no class"} | dict(enumerate(class_names, start=1))
    shown = {min(number, MAX_COLOUR): shorten(names[number], 14) for number in classes if number in names}
    if MAX_COLOUR in shown:
        shown[MAX_COLOUR] = "any other"
    patches = [
        Patch(facecolor=CLASS_COLOURS[colour], edgecolor=GREY, linewidth=0.5, label=name)
        for colour, name in sorted(shown.items())
    ]
    legend = figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=2 if any(len(name) > MAX_LEGEND_NAME for name in shown.values()) else 3,
        fontsize=FONT_POINTS - 1,
        frameon=False,
        handlelength=1.0,
        handletextpad=0.4,
        columnspacing=1.0,
    )
    for text in legend.get_texts():
        text.set_color(INK)
        text.set_parse_math(False)


def _pictures(values: npt.NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> npt.NDArray[np.float64]:
    """As red, green and blue from 0 to 1: images (n, C, H, W) that were normalised, or classes (n, H, W)."""
    if values.ndim == 3:  # noqa: PLR2004
        colours: npt.NDArray[np.float64] = CLASS_COLOURS[np.minimum(np.round(values).astype(int), MAX_COLOUR)]
        return colours
    scale, offset = (np.asarray(moments).reshape(1, -1, 1, 1) for moments in (std, mean))
    pixels = np.moveaxis(values * np.where(scale > 0, scale, 1.0) + offset, 1, -1).clip(0, 1)
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3)) if pixels.shape[-1] == 1 else pixels


def quality_figures(
    result: EvaluateResult, train: TrainResult, prepared: PreparedSet, spectrogram: str | None = None
) -> dict[str, Figure]:
    """All pictures of quality by name, examples and mistakes among them; the arguments as those of `draw_mistakes`."""
    examples, mistakes = draw_examples(train, prepared), draw_mistakes(train, prepared, spectrogram)
    found = {"examples": examples, "mistakes": mistakes}
    return draw_quality(result) | {name: figure for name, figure in found.items() if figure is not None}


def quality_svgs(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Pictures as <svg> elements for a page, by name."""
    return {name: svg_text(figure, name.replace("_", " ")) for name, figure in figures.items()}


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
