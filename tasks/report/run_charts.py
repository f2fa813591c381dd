"""Pictures of speed: the speedup with its interval, the course of training, the time budget.

Each function returns a matplotlib Figure; `paceline.tasks.report.plotting` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import round_ratios
from paceline.tasks.records import ScoreName, TrainResult
from paceline.tasks.report.plotting import (
    BLUE,
    FAINT,
    FONT_POINTS,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    break_name,
    new_figure,
    set_title,
    shorten,
)
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.speedup.records import SpeedupResult

MAX_NAME = 30
"""Characters of a line of a name."""
MAX_POINTS = 2000
"""Points of a curve that are drawn; more of them are thinned out."""
MAX_MARKED_EPOCHS = 40
"""More epochs than these have no room for a mark each."""
MIN_SHARE = 0.0005
"""Smaller shares of the time budget are summed into one item."""


def draw_speedup(result: SpeedupResult, rounds: Sequence[float]) -> Figure | None:
    """Bars of the baseline (1) and the candidate with its 95 % interval, a dot for each round; None if not measured.

    Args:
        result: What the probe gave.
        rounds: Candidate's throughput over the baseline's in each round.
    """
    if result.ratio is None:
        return None
    figure, (axis,) = new_figure(1.75)
    axis.barh([1, 0], [1.0, result.ratio], height=0.62, color=[GREY, BLUE])
    spread = np.linspace(-0.2, 0.2, num=len(rounds)) if len(rounds) > 1 else np.zeros(len(rounds))
    axis.scatter(rounds, spread, s=14, color=ORANGE, edgecolors=PAPER, linewidths=0.5, zorder=3)
    if result.low is not None and result.high is not None:
        reach = [[result.ratio - result.low], [result.high - result.ratio]]
        axis.errorbar([result.ratio], [0], xerr=reach, color=INK, capsize=4, linewidth=1.6, zorder=4)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_yticks([1, 0], ["baseline", "this run"])
    axis.set_xlim(0, _right_edge(result, rounds))
    axis.set_xlabel("throughput / baseline's (dots: single rounds)", fontsize=FONT_POINTS, color=INK)
    set_title(axis, f"{result.ratio:.2f} x")
    return figure


def _right_edge(result: SpeedupResult, rounds: Sequence[float]) -> float:
    """Room for the interval and for all but outrageous rounds."""
    seen = float(np.quantile(rounds, 0.95)) if rounds else 0.0
    return 1.1 * max(1.0, result.ratio or 0.0, result.high or 0.0, seen)


def draw_ratios(
    ratios: Mapping[str, tuple[float, float | None, float | None]], base: str, unit: str, title: str
) -> Figure:
    """Bars from the top down, each with its number and, where it is known, its interval; a line at 1.

    Args:
        ratios: By name, (ratio, low, high).
        base: Name of what the others were divided by.
        unit: What the numbers are.
        title: Of the picture.
    """
    names = [break_name(name, MAX_NAME) for name in ratios]
    lines = max(name.count("\n") + 1 for name in names)
    figure, (axis,) = new_figure(0.9 + (0.2 + 0.17 * lines) * len(ratios))
    places = range(len(ratios))[::-1]
    ends = [max(ratio, high or ratio) for ratio, _, high in ratios.values()]
    axis.barh(
        places,
        [ratio for ratio, _, _ in ratios.values()],
        height=0.55,
        color=[GREY if name == base else BLUE for name in ratios],
    )
    for place, end, (ratio, low, high) in zip(places, ends, ratios.values(), strict=True):
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=INK, linewidth=1.0)
        axis.text(end, place, f" {ratio:.2f}", va="center", fontsize=FONT_POINTS - 1, color=INK)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_yticks(places, names, parse_math=False)
    axis.set_xlim(0, 1.12 * max(ends))
    axis.set_xlabel(unit, fontsize=FONT_POINTS, color=INK, loc="right")
    set_title(axis, title)
    return figure


def draw_training(
    losses: Sequence[float], first_step: int, validation_scores: Sequence[float], score_name: ScoreName = "accuracy"
) -> Figure | None:
    """Loss of every step, smoothed over it, and below it the score after each epoch; None without steps.

    Args:
        losses: Training loss of every step.
        first_step: Number of the first of them.
        validation_scores: After each epoch, 0 to 1; may be empty.
        score_name: What they are.
    """
    if not losses:
        return None
    figure, axes = new_figure(4.2 if validation_scores else 2.5, num_rows=2 if validation_scores else 1)
    _draw_loss(axes[0], np.asarray(losses, dtype=np.float64), first_step)
    if validation_scores:
        _draw_scores(axes[1], validation_scores, SCORE_WORDS[score_name])
    return figure


def _draw_loss(axis: Axes, losses: npt.NDArray[np.float64], first_step: int) -> None:
    steps = np.arange(first_step, first_step + len(losses))
    keep = np.unique(np.linspace(0, len(losses) - 1, num=min(len(losses), MAX_POINTS)).astype(int))
    width = max(1, len(losses) // 50)
    axis.plot(steps[keep], losses[keep], color=GREY, alpha=0.45, linewidth=0.8)
    if width > 1:
        kernel = np.ones(width)
        smooth = np.convolve(losses, kernel, "same") / np.convolve(np.ones(len(losses)), kernel, "same")
        axis.plot(steps[keep], smooth[keep], color=BLUE, linewidth=1.8)
    axis.grid(axis="y", color=FAINT, linewidth=0.7)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.set_xlabel("step", fontsize=FONT_POINTS, color=INK)
    set_title(axis, "Training loss")


def _draw_scores(axis: Axes, scores: Sequence[float], name: str) -> None:
    epochs = np.arange(1, len(scores) + 1)
    axis.plot(epochs, scores, color=GREEN, linewidth=1.8, marker="o", markersize=4 * (len(scores) <= MAX_MARKED_EPOCHS))
    axis.grid(axis="y", color=FAINT, linewidth=0.7)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_xlabel("epoch", fontsize=FONT_POINTS, color=INK)
    set_title(axis, f"Validation {name} (best {max(scores):.2%})")


def budget_items(time_budget: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Items as (name, seconds, share of all), largest first; crumbs are summed at the end, nothing is dropped."""
    total = sum(time_budget.values())
    if total <= 0:
        return []
    items = sorted(((name, seconds, seconds / total) for name, seconds in time_budget.items()), key=lambda it: -it[1])
    crumbs = [item for item in items if abs(item[2]) < MIN_SHARE]
    if len(crumbs) <= 1:
        return items
    seconds = sum(item[1] for item in crumbs)
    return [*(item for item in items if item not in crumbs), (f"{len(crumbs)} tiny items", seconds, seconds / total)]


def draw_time_budget(time_budget: Mapping[str, float]) -> Figure | None:
    """Sorted bars with seconds and per cent beside them; None if the budget is empty."""
    items = budget_items(time_budget)
    if not items:
        return None
    figure, (axis,) = new_figure(0.7 + 0.27 * len(items))
    places = np.arange(len(items))[::-1]
    largest = max(item[1] for item in items)
    axis.barh(places, [max(item[1], 0.0) for item in items], height=0.66, color=BLUE)
    for place, (_, seconds, share) in zip(places, items, strict=True):
        text = f"{format_seconds(seconds)}  {share:.1%}"
        axis.text(max(seconds, 0.0) + largest * 0.02, place, text, va="center", fontsize=FONT_POINTS, color=INK)
    axis.set_yticks(places, [shorten(item[0].replace("_", " "), 24) for item in items], parse_math=False)
    axis.set_xlim(0, largest * 1.55)
    axis.set_xticks([])
    axis.spines[["bottom"]].set_visible(False)
    set_title(axis, f"Where {format_seconds(sum(time_budget.values()))} went")
    return figure


def draw_speed(speedup: SpeedupResult, train: TrainResult, time_budget: Mapping[str, float]) -> dict[str, Figure]:
    """All pictures of speed by name; those without data are left out."""
    rounds = round_ratios(train.probe.rounds) if train.probe else ()
    figures = {
        "speedup": draw_speedup(speedup, rounds),
        "training": draw_training(train.losses, train.first_step, train.validation_scores, train.score_name),
        "time_budget": draw_time_budget(time_budget),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}
