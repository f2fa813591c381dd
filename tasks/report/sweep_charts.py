"""Pictures of a sweep: what each trial reached, over its settings and its epochs, and which of them ran at once.

Each function returns a matplotlib Figure, or None without data; `paceline.tasks.report.plotting` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paceline.tasks.report.plotting import (
    BLUE,
    FAINT,
    FONT_POINTS,
    GREY,
    INK,
    ORANGE,
    PAPER,
    new_figure,
    set_title,
    shorten,
)
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, text_of

HEIGHT_INCHES = 2.6
MAX_PARAMETERS = 8
MAX_LABEL = 12
BAR = 0.62
"""Height of a trial in the timeline, of its row's."""
MIN_LABEL_SHARE = 0.04
"""Of the timeline's width; a shorter trial has no room for its number."""


def draw_sweep(result: SweepResult) -> dict[str, Figure]:
    """All pictures of a sweep by name; those without data are left out."""
    figures: dict[str, Figure | None] = {"scores": draw_scores(result), "courses": draw_courses(result)}
    for parameter in result.parameters[:MAX_PARAMETERS]:
        figures[f"over-{parameter.setting}"] = draw_parameter(result, parameter)
    figures["timeline"] = draw_timeline(result)
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_scores(result: SweepResult) -> Figure | None:
    """The score of each trial in the order of their numbers, and the best so far."""
    known = [trial for trial in result.trials if trial.score is not None]
    if not known:
        return None
    figure, (axis,) = new_figure(HEIGHT_INCHES)
    best: list[tuple[int, float]] = []
    for trial in (trial for trial in known if trial.status == "done"):
        best.append((trial.number, max([trial.score or 0.0, *(score for _, score in best[-1:])])))
    if best:
        numbers, scores = zip(*best, strict=True)
        axis.step([*numbers, result.trials[-1].number], [*scores, scores[-1]], where="post", color=FAINT, linewidth=2)
    _dots(axis, result, known, [float(trial.number) for trial in known])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "trial", result)
    set_title(axis, "What each trial reached; line: the best so far")
    return figure


def _dots(axis: Axes, result: SweepResult, trials: Sequence[Trial], places: Sequence[float]) -> None:
    """Filled for trials that were done, open for those that were pruned; the best in a colour of its own."""
    for trial, place in zip(trials, places, strict=True):
        colour = ORANGE if trial == result.best else BLUE
        inside = colour if trial.status == "done" else PAPER
        axis.plot(
            [place], [trial.score or 0.0], "o", color=colour, markerfacecolor=inside, markersize=5.5, clip_on=False
        )


def _label(axis: Axes, name: str, result: SweepResult) -> None:
    axis.set_xlabel(name, fontsize=FONT_POINTS, color=INK, loc="right")
    axis.set_ylabel(f"validation {SCORE_WORDS[result.score_name]}", fontsize=FONT_POINTS, color=INK)


def draw_courses(result: SweepResult) -> Figure | None:
    """The validation score of each trial over its epochs."""
    if all(len(trial.scores) < 2 for trial in result.trials):  # noqa: PLR2004  a course has two points
        return None
    figure, (axis,) = new_figure(HEIGHT_INCHES)
    for trial in sorted(result.trials, key=lambda trial: trial == result.best):
        colour, width = (ORANGE, 2.0) if trial == result.best else (GREY, 1.0)
        style = "-" if trial.status == "done" else (0, (2, 2))
        epochs = range(1, len(trial.scores) + 1)
        axis.plot(epochs, trial.scores, color=colour, linewidth=width, linestyle=style)
        axis.plot(epochs[-1:], trial.scores[-1:], "o", color=colour, markersize=3)  # a course of one epoch too
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "epoch", result)
    set_title(axis, "Courses; the best in orange, pruned ones dotted")
    return figure


def draw_parameter(result: SweepResult, parameter: Parameter) -> Figure | None:
    """The score of each trial over one of its settings."""
    known = [trial for trial in result.trials if trial.score is not None and parameter.setting in trial.values]
    if not known:
        return None
    figure, (axis,) = new_figure(HEIGHT_INCHES)
    if parameter.kind == "list":
        names = [shorten(text_of(choice), MAX_LABEL) for choice in parameter.choices]
        places = [float(parameter.choices.index(trial.values[parameter.setting])) for trial in known]
        axis.set_xticks(range(len(names)), names, parse_math=False)
        axis.set_xlim(-0.5, len(names) - 0.5)
    else:
        places = [float(trial.values[parameter.setting] or 0.0) for trial in known]
        if parameter.kind == "log":
            axis.set_xscale("log")
        axis.set_xlim(parameter.low, parameter.high)
    _dots(axis, result, known, places)
    _label(axis, parameter.setting, result)
    set_title(axis, f"Over {parameter.short}; open: pruned")
    return figure


def draw_timeline(result: SweepResult) -> Figure | None:
    """Which trial ran when, those at the same time below each other."""
    trials = sorted(result.trials, key=lambda trial: trial.started)
    if not trials:
        return None
    begin, end = trials[0].started, max(trial.end_time for trial in trials)
    rows = _rows(trials)
    num_rows = max(rows) + 1
    figure, (axis,) = new_figure(0.9 + 0.3 * num_rows)
    for trial, row in zip(trials, rows, strict=True):
        _draw_bar(axis, result, trial, row, begin, end)
    axis.set_yticks([])
    axis.set_ylim(num_rows - 0.5, -0.5)
    axis.set_xlim(0, max(end - begin, 1e-9))
    axis.set_xlabel("seconds", fontsize=FONT_POINTS, color=INK, loc="right")
    set_title(axis, "Which trials ran at the same time")
    return figure


def _rows(trials: Sequence[Trial]) -> list[int]:
    """The first row that is free when each trial starts."""
    free_at: list[float] = []
    rows = []
    for trial in trials:
        row = next((row for row, until in enumerate(free_at) if until <= trial.started), len(free_at))
        free_at[row : row + 1] = [trial.end_time]
        rows.append(row)
    return rows


def _draw_bar(axis: Axes, result: SweepResult, trial: Trial, row: int, begin: float, end: float) -> None:
    colour = ORANGE if trial == result.best else {"done": BLUE, "pruned": GREY, "failed": FAINT}[trial.status]
    start = trial.started - begin
    axis.barh([row], [trial.seconds], left=[start], height=BAR, color=colour, edgecolor=PAPER, linewidth=1)
    if trial.seconds > MIN_LABEL_SHARE * (end - begin):
        ink = INK if trial.status == "failed" else PAPER
        middle = start + trial.seconds / 2
        axis.text(middle, row, str(trial.number), ha="center", va="center", fontsize=FONT_POINTS - 1, color=ink)
