"""Pictures of a sweep: the score of each trial, over its settings and its epochs, and which of them ran at once."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paceline.tasks.report import plotting as plot
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, text_of

HEIGHT_INCHES = 2.6
MAX_PARAMETERS = 8
MAX_LABEL = 12
BAR = 0.62  # height of a trial in the timeline, relative to its row
MIN_LABEL_SHARE = 0.04  # a trial that takes a smaller share of the timeline's width has no room for its number


def draw_sweep(result: SweepResult) -> dict[str, Figure]:
    """Draw all pictures of a sweep by name; those without data are left out."""
    figures: dict[str, Figure | None] = {"scores": draw_scores(result), "courses": draw_courses(result)}
    for parameter in result.parameters[:MAX_PARAMETERS]:
        figures[f"over-{parameter.setting}"] = draw_parameter(result, parameter)
    figures["timeline"] = draw_timeline(result)
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_scores(result: SweepResult) -> Figure | None:
    """Draw the score of each trial in the order of their numbers, and the best so far."""
    known = [trial for trial in result.trials if trial.score is not None]
    if not known:
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES)
    best: list[tuple[int, float]] = []
    for trial in (trial for trial in known if trial.status == "done"):
        best.append((trial.number, max([trial.score or 0.0, *(score for _, score in best[-1:])])))
    if best:
        numbers, scores = zip(*best, strict=True)
        axis.step(
            [*numbers, result.trials[-1].number], [*scores, scores[-1]], where="post", color=plot.FAINT, linewidth=2
        )
    _draw_dots(axis, result, known, [float(trial.number) for trial in known])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "trial", result)
    plot.set_title(axis, "Score of each trial; line: the best so far")
    return figure


def _draw_dots(axis: Axes, result: SweepResult, trials: Sequence[Trial], places: Sequence[float]) -> None:
    for trial, place in zip(trials, places, strict=True):
        colour = plot.ORANGE if trial == result.best else plot.BLUE
        fill = colour if trial.status == "done" else plot.PAPER
        y = trial.score or 0.0
        axis.plot([place], [y], "o", color=colour, markerfacecolor=fill, markersize=5.5, clip_on=False)


def _label(axis: Axes, name: str, result: SweepResult) -> None:
    axis.set_xlabel(name, loc="right")
    axis.set_ylabel(f"validation {SCORE_WORDS[result.score_name]}")


def draw_courses(result: SweepResult) -> Figure | None:
    """Draw the validation score of each trial over its epochs."""
    if all(len(trial.scores) < 2 for trial in result.trials):  # noqa: PLR2004  a course has two points
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES)
    for trial in sorted(result.trials, key=lambda trial: trial == result.best):
        colour, width = (plot.ORANGE, 2.0) if trial == result.best else (plot.GREY, 1.0)
        style = "-" if trial.status == "done" else (0, (2, 2))
        epochs = range(1, len(trial.scores) + 1)
        axis.plot(epochs, trial.scores, color=colour, linewidth=width, linestyle=style)
        axis.plot(epochs[-1:], trial.scores[-1:], "o", color=colour, markersize=3)  # a course of one epoch too
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "epoch", result)
    plot.set_title(axis, "Courses; the best in orange, pruned ones dotted")
    return figure


def draw_parameter(result: SweepResult, parameter: Parameter) -> Figure | None:
    """Draw the score of each trial over one of its settings."""
    known = [trial for trial in result.trials if trial.score is not None and parameter.setting in trial.values]
    if not known:
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES)
    if parameter.kind == "list":
        names = [plot.shorten(text_of(choice), MAX_LABEL) for choice in parameter.choices]
        places = [float(parameter.choices.index(trial.values[parameter.setting])) for trial in known]
        axis.set_xticks(range(len(names)), names, parse_math=False)
        axis.set_xlim(-0.5, len(names) - 0.5)
    else:
        places = [float(trial.values[parameter.setting] or 0.0) for trial in known]
        if parameter.kind == "log":
            axis.set_xscale("log")
        axis.set_xlim(parameter.low, parameter.high)
    _draw_dots(axis, result, known, places)
    _label(axis, parameter.setting, result)
    plot.set_title(axis, f"Over {parameter.short}; open: pruned")
    return figure


def draw_timeline(result: SweepResult) -> Figure | None:
    """Draw which trial ran when, those at the same time below each other."""
    trials = sorted(result.trials, key=lambda trial: trial.started)
    if not trials:
        return None
    start, end = trials[0].started, max(trial.end_time for trial in trials)
    rows = timeline_rows(trials)
    figure, (axis,) = plot.new_figure(0.9 + 0.3 * (max(rows) + 1))
    colours = {"done": plot.BLUE, "pruned": plot.GREY, "failed": plot.FAINT}
    for trial, row in zip(trials, rows, strict=True):
        left, colour = trial.started - start, plot.ORANGE if trial == result.best else colours[trial.status]
        axis.barh([row], [trial.seconds], left=[left], height=BAR, color=colour, edgecolor=plot.PAPER, linewidth=1)
        if trial.seconds > MIN_LABEL_SHARE * (end - start):
            ink = plot.INK if trial.status == "failed" else plot.PAPER
            middle = left + trial.seconds / 2
            plot.add_text(axis, middle, row, str(trial.number), ha="center", fontsize=plot.FONT_POINTS - 1, color=ink)
    axis.set_yticks([])
    axis.set_ylim(max(rows) + 0.5, -0.5)
    axis.set_xlim(0, max(end - start, 1e-9))
    axis.set_xlabel("seconds", loc="right")
    plot.set_title(axis, "Which trials ran at the same time")
    return figure


def timeline_rows(trials: Sequence[Trial]) -> list[int]:
    """Give each trial the first row that is free when it starts."""
    free_at: list[float] = []
    rows = []
    for trial in trials:
        row = next((row for row, until in enumerate(free_at) if until <= trial.started), len(free_at))
        free_at[row : row + 1] = [trial.end_time]
        rows.append(row)
    return rows
