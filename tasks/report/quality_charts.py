"""Pictures of quality: the confusion matrix, the score of each class, and what is told of some pictures.

Each function returns a matplotlib Figure; `tasks.report.plotting` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tasks.evaluate.mistakes import draw_mistakes
from tasks.report.plotting import BLUE, FONT_POINTS, GREY, INK, WHITE, new_figure, new_grid, set_title, shorten, svg_text
from tasks.scores import class_scores
from tasks.records import EvaluateResult, PreparedSet, TrainResult

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
