"""Pictures of a run's speed: the speedup with its interval, the course of training, the time budget."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import round_ratios
from paceline.tasks.records.training import ScoreName, TrainResult
from paceline.tasks.report import plotting as plot
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import format_ratio

MAX_NAME = 30  # characters of a line of a name
MAX_REACH = 1.25  # rounds with a larger ratio, relative to the interval's end, lie outside of the picture
MAX_POINTS = 2000  # points of a curve that are drawn; longer curves are thinned
MAX_MARKED_EPOCHS = 40  # more epochs have no room for a mark each
MIN_SHARE = 0.0005  # smaller shares of the time budget are summed into one item


def draw_speed(speedup: SpeedupResult, train: TrainResult, time_budget: Mapping[str, float]) -> dict[str, Figure]:
    """Draw all pictures of speed by name; those without data are left out."""
    rounds = round_ratios(train.probe.rounds) if train.probe else ()
    figures = {
        "speedup": draw_speedup(speedup, rounds),
        "training": draw_training(train.losses, train.first_step, train.validation_scores, train.score_name),
        "time_budget": draw_time_budget(time_budget),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_speedup(result: SpeedupResult, rounds: Sequence[float]) -> Figure | None:
    """Draw the baseline (1) and the candidate with its 95 % interval, a dot for each round; None if not measured."""
    if result.ratio is None:
        return None
    figure, (axis,) = plot.new_figure(1.75, "Throughput against the baseline")
    figure.set_label("speedup with its interval and rounds")
    axis.barh([1, 0], [1.0, result.ratio], height=0.62, color=[plot.GREY, plot.BLUE])
    spread = np.linspace(-0.2, 0.2, num=len(rounds)) if len(rounds) > 1 else np.zeros(len(rounds))
    axis.scatter(rounds, spread, s=14, color=plot.ORANGE, edgecolors=plot.PAPER, linewidths=0.5, zorder=3)
    if result.low is not None and result.high is not None:
        reach = [[result.ratio - result.low], [result.high - result.ratio]]
        axis.errorbar([result.ratio], [0], xerr=reach, color=plot.INK, capsize=4, linewidth=1.6, zorder=4)
    axis.axvline(1.0, **plot.DASHED)
    axis.set_yticks([1, 0], ["baseline", "this run"])
    # Room for the interval, for all but outrageous rounds, and for the label at the end of the bar.
    end = max(result.ratio, result.high or 0.0)
    end = max([end, *(ratio for ratio in rounds if ratio < MAX_REACH * end)])
    plot.add_text(axis, end, 0, f"  {format_ratio(result.ratio)} x", fontweight="bold")
    axis.set_xlim(0, 1.2 * max(1.0, end))
    axis.set_xlabel("throughput / baseline's (dots: single rounds)")
    return figure


def draw_ratios(
    ratios: Mapping[str, tuple[float, float | None, float | None]], base: str, unit: str, title: str
) -> Figure:
    """Draw bars from the top down, each with its number and, where it is known, its interval; a line at 1."""
    names = [plot.break_name(name, MAX_NAME) for name in ratios]
    lines = max(name.count("\n") + 1 for name in names)
    figure, (axis,) = plot.new_figure(0.9 + (0.2 + 0.17 * lines) * len(ratios), title)
    places = range(len(ratios))[::-1]
    colours = [plot.GREY if name == base else plot.BLUE for name in ratios]
    axis.barh(places, [ratio for ratio, _, _ in ratios.values()], height=0.55, color=colours)
    ends = [max(ratio, high or ratio) for ratio, _, high in ratios.values()]
    for place, end, (ratio, low, high) in zip(places, ends, ratios.values(), strict=True):
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=plot.INK, linewidth=1.0)
        plot.add_text(axis, end, place, f" {ratio:.2f}", fontsize=plot.FONT_POINTS - 1)
    axis.axvline(1.0, **plot.DASHED)
    axis.set_yticks(places, names, parse_math=False)
    axis.set_xlim(0, 1.12 * max(ends))
    axis.set_xlabel(unit, loc="right")
    return figure


def draw_training(
    losses: Sequence[float], first_step: int, validation_scores: Sequence[float], score_name: ScoreName = "accuracy"
) -> Figure | None:
    """Draw the loss of every step, smoothed over it, and below it the score after each epoch; None without steps."""
    if not losses:
        return None
    titles = ["Training loss"]
    if validation_scores:
        titles.append(f"Validation {SCORE_WORDS[score_name]} (best {max(validation_scores):.2%})")
    figure, axes = plot.new_figure(4.2 if validation_scores else 2.5, *titles)
    figure.set_label("loss and score over training")
    loss, course = np.asarray(losses, dtype=np.float64), axes[0]
    steps, width = np.arange(first_step, first_step + len(loss)), max(1, len(loss) // 50)
    drawn = np.unique(np.linspace(0, len(loss) - 1, num=min(len(loss), MAX_POINTS)).astype(int))
    course.plot(steps[drawn], loss[drawn], color=plot.GREY, alpha=0.45, linewidth=0.8)
    if width > 1:
        kernel = np.ones(width)
        smooth = np.convolve(loss, kernel, "same") / np.convolve(np.ones(len(loss)), kernel, "same")
        course.plot(steps[drawn], smooth[drawn], color=plot.BLUE, linewidth=1.8)
    course.grid(axis="y", color=plot.FAINT, linewidth=0.7)
    course.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    course.set_xlabel("step")
    if validation_scores:
        axis = axes[1]
        epochs = np.arange(1, len(validation_scores) + 1)
        mark_size = 4 * (len(epochs) <= MAX_MARKED_EPOCHS)
        axis.plot(epochs, validation_scores, color=plot.GREEN, linewidth=1.8, marker="o", markersize=mark_size)
        axis.grid(axis="y", color=plot.FAINT, linewidth=0.7)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_xlabel("epoch")
    return figure


def budget_items(time_budget: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """List (name, seconds, share of all), largest first; tiny items are summed at the end, so nothing is lost."""
    total = sum(time_budget.values())
    if total <= 0:
        return []
    items = sorted(((name, seconds, seconds / total) for name, seconds in time_budget.items()), key=lambda it: -it[1])
    tiny = [item for item in items if abs(item[2]) < MIN_SHARE]
    if len(tiny) <= 1:
        return items
    seconds = sum(item[1] for item in tiny)
    return [*(item for item in items if item not in tiny), (f"{len(tiny)} tiny items", seconds, seconds / total)]


def draw_time_budget(time_budget: Mapping[str, float]) -> Figure | None:
    """Draw sorted bars with their seconds and shares; None if the budget is empty."""
    items = budget_items(time_budget)
    if not items:
        return None
    title = f"Where {format_seconds(sum(time_budget.values()))} went"
    figure, (axis,) = plot.new_figure(0.7 + 0.27 * len(items), title)
    values = [max(seconds, 0.0) for _, seconds, _ in items]
    names = [plot.shorten(name.replace("_", " "), 24) for name, _, _ in items]
    plot.draw_bars(axis, names, values, [f"{format_seconds(seconds)}  {share:.1%}" for _, seconds, share in items])
    axis.set_xlim(0, max(values) * 1.55)
    return figure
