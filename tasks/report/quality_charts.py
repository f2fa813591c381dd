"""Pictures of quality: the confusion matrix, the score of each class, examples, and the worst mistakes."""

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
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.report import plotting as plot
from paceline.tasks.report.page import upper_first
from paceline.tasks.scores import class_scores

CLASS_COLOURS = np.array(
    [to_rgb("black"), to_rgb("lightgrey"), *(to_rgb(f"C{number}") for number in range(10)), to_rgb("white")]
)
"""Of no class, of the first one, which is mostly the background, of the next ten, and of all others."""
MAX_COLOUR = len(CLASS_COLOURS) - 1
MAX_LEGEND_NAME = 10  # three longer names do not fit next to each other below the pictures
MAX_NAMED_CLASSES = 40  # more classes are numbered on some ticks instead of named on all
MAX_COUNTED_CLASSES = 15  # more classes have no room for counts in the cells
MAX_LARGE_COUNTS = 6
MAX_LARGE_NAMES = 20  # up to so many classes counts, or names, are in full size
MAX_LEVEL_NAME = 2  # longer names stand upright below the picture
DARK_SHARE = 0.5  # cells of a larger share are dark and take light numbers
MAX_BARS = 30  # of more classes, only the worst are drawn


def quality_figures(
    result: EvaluateResult, train: TrainResult, prepared: PreparedSet, spectrogram: str | None = None
) -> dict[str, Figure]:
    """Draw all pictures of quality by name, with examples and mistakes; arguments as of `draw_mistakes`."""
    figures = {"examples": draw_examples(train, prepared), "mistakes": draw_mistakes(train, prepared, spectrogram)}
    return draw_quality(result) | {name: figure for name, figure in figures.items() if figure is not None}


def draw_quality(result: EvaluateResult) -> dict[str, Figure]:
    """Draw what the result alone shows, by name."""
    confusion, (word, scores) = result.confusion, class_scores(result)
    figures = {"confusion": draw_confusion(confusion, tuple(result.per_class_accuracy))} if confusion else {}
    bars = draw_classes(scores, word)
    return figures if bars is None else figures | {f"class_{word.lower()}": bars}


def draw_confusion(confusion: Sequence[Sequence[int]], class_names: Sequence[str]) -> Figure:
    """Draw true classes as rows, predicted ones as columns. Colour: share of the true class; numbers: samples."""
    counts = np.asarray(confusion, dtype=np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, (axis,) = plot.new_figure(4.4, "Confusion")
    # Colour by opacity, so that the picture fits a light and a dark page.
    picture = np.empty((*shares.shape, 4))
    picture[..., :3] = to_rgb(plot.BLUE)
    picture[..., 3] = np.sqrt(shares)  # square root: single confusions stay visible next to the diagonal
    axis.imshow(picture, interpolation="nearest", aspect="equal")
    axis.spines[:].set_visible(False)
    if len(class_names) <= MAX_COUNTED_CLASSES:
        size = plot.FONT_POINTS if len(counts) <= MAX_LARGE_COUNTS else plot.FONT_POINTS - 2
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = plot.WHITE if shares[row, column] > DARK_SHARE else plot.INK
                axis.text(column, row, str(count), ha="center", va="center", fontsize=size, color=colour)
    _name_classes(axis, class_names)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    return figure


def _name_classes(axis: Axes, class_names: Sequence[str]) -> None:
    places = range(len(class_names))
    if len(places) > MAX_NAMED_CLASSES:
        axis.set_xticks(places[::10])
        axis.set_yticks(places[::10])
        return
    size = plot.FONT_POINTS - 1 if len(places) <= MAX_LARGE_NAMES else 5.5
    names = [plot.shorten(name, 12) for name in class_names]
    is_steep = max(len(name) for name in names) > MAX_LEVEL_NAME
    axis.set_xticks(places, names, rotation=90 if is_steep else 0, fontsize=size, parse_math=False)
    axis.set_yticks(places, names, fontsize=size, parse_math=False)


def draw_classes(scores: Mapping[str, float | None], word: str = "accuracy") -> Figure | None:
    """Draw bars, the worst first; classes without samples are left out; None if no class is left."""
    measured = sorted(((name, value) for name, value in scores.items() if value is not None), key=lambda it: it[1])
    if not measured:
        return None
    shown = measured[:MAX_BARS]
    fewer = f", worst {len(shown)} of {len(measured)}" if len(shown) < len(measured) else ""
    mean = float(np.mean([value for _, value in measured]))
    title = f"{upper_first(word)} per class (mean {mean:.1%}{fewer})"
    figure, (axis,) = plot.new_figure(0.7 + 0.23 * len(shown), title)
    values = [value for _, value in shown]
    plot.draw_bars(axis, [plot.shorten(name, 18) for name, _ in shown], values, [f"{value:.1%}" for value in values])
    axis.set_xlim(0, 1.2)
    axis.set_ylim(-0.7, len(shown) - 0.3)
    return figure


def draw_examples(train: TrainResult, prepared: PreparedSet) -> Figure | None:
    """Draw some test samples, each in a row: the network's input, its prediction, the truth; None without any."""
    if train.examples is None:
        return None
    with np.load(train.examples, allow_pickle=False) as arrays:
        inputs, predicted, truth = (arrays[name] for name in ("seen", "told", "there"))
    if len(inputs) == 0:
        return None
    channels = prepared.picture_shape[2]
    mean, std = prepared.mean[:channels], prepared.std[:channels]
    columns = {"input": inputs, "predicted": predicted, "truth": truth}
    figure, axes = plot.new_grid(len(inputs), len(columns))
    for column, (title, values) in enumerate(columns.items()):
        for row, picture in enumerate(_to_rgb(values, mean, std)):
            axes[row][column].imshow(picture, interpolation="nearest")
        axes[0][column].set_title(title, fontsize=plot.FONT_POINTS, color=plot.INK)
    if predicted.ndim == 3:  # noqa: PLR2004  classes, not pictures
        _name_colours(figure, np.union1d(predicted, truth).round().astype(int).tolist(), prepared.class_names)
    return figure


def _name_colours(figure: Figure, classes: Sequence[int], class_names: Sequence[str]) -> None:
    names = {0: "no class"} | dict(enumerate(class_names, start=1))
    shown = {min(number, MAX_COLOUR): plot.shorten(names[number], 14) for number in classes if number in names}
    if MAX_COLOUR in shown:
        shown[MAX_COLOUR] = "any other"
    patches = [
        Patch(facecolor=CLASS_COLOURS[colour], edgecolor=plot.GREY, linewidth=0.5, label=name)
        for colour, name in sorted(shown.items())
    ]
    num_columns = 2 if any(len(name) > MAX_LEGEND_NAME for name in shown.values()) else 3
    lengths = {"handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.0}
    legend = figure.legend(handles=patches, loc="outside lower center", ncols=num_columns, **plot.LEGEND, **lengths)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _to_rgb(values: npt.NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> npt.NDArray[np.float64]:
    """Convert normalised images (n, C, H, W), or classes (n, H, W), to red, green and blue from 0 to 1."""
    if values.ndim == 3:  # noqa: PLR2004
        colours: npt.NDArray[np.float64] = CLASS_COLOURS[np.minimum(np.round(values).astype(int), MAX_COLOUR)]
        return colours
    scale, offset = (np.asarray(moments).reshape(1, -1, 1, 1) for moments in (std, mean))
    pixels = np.moveaxis(values * np.where(scale > 0, scale, 1.0) + offset, 1, -1).clip(0, 1)
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3)) if pixels.shape[-1] == 1 else pixels


NUM_SHOWN, NUM_COLUMNS = 8, 4
STRIP, NUM_STRIPS = 4, 2  # frames shown of a clip, in a strip, and strips next to each other
SEAM = 0.04  # between frames, relative to their size
HEAD, GAP = 0.36, 0.08  # room above a picture and next to it, relative to its height
HEAD_OF_STRIP, GAP_OF_STRIP = 0.7, 0.24  # the same for a strip, which is drawn lower
MAX_SIDE = 128
FULL_SCALE = 255.0
NAME_LENGTH = 12
SPECTROGRAM = "magma"  # perceptually even, for pictures whose greys are levels


class Mistake(NamedTuple):
    """One test sample with its prediction."""

    image_HWC: npt.NDArray[np.uint8]
    predicted: str
    truth: str
    probability: float  # of the predicted class


def worst_mistakes(train: TrainResult, prepared: PreparedSet, number: int = NUM_SHOWN) -> list[Mistake]:
    """Find the samples with the largest cross-entropy, the worst first; includes right ones where few are wrong.

    Raises RunError: the predictions do not fit the split, or its pixels cannot be read.
    """
    path = Path(prepared.path)
    labels_N = read_test_split(path, prepared.class_names).labels_N
    log_NK = log_softmax(read_predictions(train.predictions, len(labels_N)).outputs, axis=1)
    chosen = np.argsort(log_NK[np.arange(len(labels_N)), labels_N], kind="stable")[:number]
    predicted_N = log_NK.argmax(axis=1)
    images = _test_images(prepared, chosen)
    names = prepared.class_names
    return [
        Mistake(image_HWC, names[predicted_N[index]], names[labels_N[index]], float(np.exp(log_NK[index].max())))
        for image_HWC, index in zip(images, chosen, strict=True)
    ]


def _test_images(prepared: PreparedSet, chosen: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
    path = Path(prepared.path)
    if not prepared.has_squares:
        from paceline.tasks.data.loading.split_reader import open_split  # torch: more than a second

        photographs = open_split(prepared, "test")
        return [photographs.image(index) for index in chosen.tolist()]
    try:  # memory maps: only the chosen images are read
        files = sorted((path / "test").glob("*.images.npy"))
        shards = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
    except (OSError, ValueError) as error:
        raise RunError(f"{path / 'test'}: pixels cannot be read ({error}); prepare the set again") from error
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    places = np.searchsorted(starts, chosen, side="right") - 1
    return [np.array(shards[place][index - starts[place]]) for place, index in zip(places, chosen, strict=True)]


def draw_mistakes(train: TrainResult, prepared: PreparedSet, spectrogram: str | None = None) -> Figure | None:
    """Draw the worst mistakes in a grid; None where the model does not classify images."""
    if train.score_name != "accuracy" or not prepared.num_test:
        return None
    mistakes = worst_mistakes(train, prepared)
    tiles = [_tile(mistake.image_HWC, spectrogram is not None) for mistake in mistakes]
    height, width = tiles[0].shape[:2]
    are_clips = mistakes[0].image_HWC.shape[2] > NUM_COLOURS
    num_columns = NUM_STRIPS if are_clips else NUM_COLUMNS
    shares = (HEAD_OF_STRIP, GAP_OF_STRIP) if are_clips else (HEAD, GAP)
    head, gap = (max(1, round(share * height)) for share in shares)
    num_rows = -(-len(tiles) // num_columns)
    # One picture: separate axes for each sample take matplotlib three times as long.
    canvas = np.zeros((num_rows * (head + height), num_columns * (width + gap) - gap, 4))
    figure, (axis,) = plot.new_figure(0.35 + plot.WIDTH_INCHES * canvas.shape[0] / canvas.shape[1])
    axis.set_axis_off()
    for number, (mistake, tile) in enumerate(zip(mistakes, tiles, strict=True)):
        row, column = divmod(number, num_columns)
        top, left = row * (head + height) + head, column * (width + gap)
        canvas[top : top + height, left : left + width] = tile
        is_right = mistake.predicted == mistake.truth
        truth = "right" if is_right else f"is {plot.shorten(mistake.truth, NAME_LENGTH)}"
        axis.text(
            left + width / 2,
            top - 0.04 * height,
            f"{plot.shorten(mistake.predicted, NAME_LENGTH)} {mistake.probability:.0%}\n{truth}",
            ha="center",
            va="bottom",
            fontsize=plot.FONT_POINTS - 2,
            color=plot.INK if is_right else plot.ORANGE,
            parse_math=False,
        )
    axis.imshow(canvas, interpolation="nearest", extent=(0, canvas.shape[1], canvas.shape[0], 0))
    if spectrogram is not None:
        figure.supxlabel(spectrogram, fontsize=plot.FONT_POINTS - 2, color=plot.INK)
    return figure


def _tile(image_HWC: npt.NDArray[np.uint8], is_spectrogram: bool) -> npt.NDArray[np.float64]:
    """Convert to red, green, blue and opacity from 0 to 1; large images in a fraction of their size."""
    step = max(1, image_HWC.shape[0] // MAX_SIDE)
    image_HWC = image_HWC[::step, ::step]
    num_frames = image_HWC.shape[2] // NUM_COLOURS
    if num_frames > 1:
        shown = np.linspace(0, num_frames - 1, min(STRIP, num_frames)).round().astype(np.int64)
        frames = np.split(image_HWC, num_frames, axis=2)
        seam = np.zeros((len(image_HWC), max(1, round(SEAM * len(image_HWC))), 4))
        tiles = [_tile(frames[frame], is_spectrogram) for frame in shown]
        return np.hstack([part for tile in tiles for part in (seam, tile)][1:])
    if image_HWC.shape[2] == 1:
        colours: npt.NDArray[np.float64] = colormaps[SPECTROGRAM if is_spectrogram else "gray"](image_HWC[..., 0])
        return colours
    return np.dstack([image_HWC / FULL_SCALE, np.ones(image_HWC.shape[:2])])
