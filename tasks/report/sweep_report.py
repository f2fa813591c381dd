"""Report of a sweep: one page that says which trial is best, what each setting did, and where the time went."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paceline.tasks.formatting import DASH, format_seconds
from paceline.tasks.report import plotting as plot
from paceline.tasks.report.page import interval_text, render_page
from paceline.tasks.scores import is_share, score_text, score_word
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, Scalar, text_of

NEAR_SHARE = 0.05  # distance from an end of a range that is at its end, relative to the range
NEAR_FACTOR = 1.25  # the same on a logarithmic scale
HEIGHT_INCHES = 2.6
MAX_PARAMETERS = 8
MAX_LABEL = 12
BAR = 0.62  # height of a trial in the timeline, relative to its row
MIN_LABEL_SHARE = 0.04  # a trial that takes a smaller share of the timeline's width has no room for its number


def render_sweep(result: SweepResult, environment: Mapping[str, Any]) -> str:
    """Render the page as HTML; the environment (versions, hosts, commit) is anything that JSON can hold."""
    return render_page(
        "sweep",
        draw_sweep(result),
        result=result,
        word=score_word([result.score_name]),
        score_of=lambda trial: score_text(result.score_name, trial.score),
        epochs_of=lambda trial: _epochs(result, trial),
        notes=_setting_notes(result),
        trials=sorted(result.trials, key=lambda trial: (trial.status != "done", -result.sign * (trial.score or 0.0))),
        values_of=lambda trial: _values(result, trial),
        colocation_notes=list(_colocation_notes(result)),
        environment=dict(environment),
    )


def _value_text(value: Scalar) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _values(result: SweepResult, trial: Trial) -> list[str]:
    settings = [parameter.setting for parameter in result.parameters]
    return [_value_text(trial.values[setting]) if setting in trial.values else DASH for setting in settings]


def _colocation_notes(result: SweepResult) -> Iterator[str]:
    colocation, speedup = result.colocation, result.speedup
    if colocation is None:
        return
    if speedup is not None:
        yield (
            f"{interval_text(speedup)} times as fast as one trial after the other on one such device: the steps' ratio "
            f"{interval_text(colocation.over_alone)} times the {result.occupancy or 0:.0%} of the places that were "
            "taken. That neighbours slow down start-up as much as steps is assumed, not measured."
        )
    best = interval_text(colocation.over_best)
    yield {
        "one model per device": f"One model per device: {best} times the samples of one model on all devices.",
        "one model on all devices": f"One model on all devices is better here: one per device has {best} times its "
        "samples; run the trials with --at-once 1.",
        "no certain difference": f"One model per device, or one on all: no measurable difference ({best}).",
    }[colocation.layout]
    if colocation.contaminated:
        yield f"It was measured while others used the machine ({'; '.join(colocation.reasons)}): do not trust it."


def _epochs(result: SweepResult, trial: Trial) -> str:
    """Epochs with a score; of own code, one score stands for the training."""
    return DASH if result.objective else f"{len(trial.scores)}/{result.num_epochs}"


def trial_line(trial: Trial, score_name: str) -> str:
    """Describe the outcome of a trial in a few words."""
    if trial.status == "done":
        epochs = f" after {len(trial.scores)} epochs" if is_share(score_name) else ""
        return f"{score_text(score_name, trial.score)}{epochs}, {format_seconds(trial.seconds)}"
    return trial.error or trial.status


def sweep_table(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Make the head and rows for the terminal."""
    head = ["trial", *(parameter.short for parameter in result.parameters), "score", "epochs", "time", ""]
    rows = [
        [
            str(trial.number),
            *_values(result, trial),
            score_text(result.score_name, trial.score),
            _epochs(result, trial),
            format_seconds(trial.seconds),
            "best" if trial == result.best else "" if trial.status == "done" else trial.status,
        ]
        for trial in result.trials
    ]
    return head, rows


def sweep_notes(result: SweepResult) -> list[str]:
    """Write a few sentences: what to take, and what the sweep cannot say."""
    return [*_setting_notes(result), *_colocation_notes(result)]


def _setting_notes(result: SweepResult) -> list[str]:
    best, word = result.best, score_word([result.score_name])
    notes = []
    if best is None or best.score is None:
        notes.append("No trial was done, so nothing can be said.")
    else:
        command = f"paceline run {result.preset} {' '.join(result.overrides(best))}"
        notes.append(f"Best: `{command}`, with the sweep's other settings.")
        if best.test_score is not None:
            notes.append(
                f"Its {word} is {best.score:.2%} on the validation split, by which it was chosen and which flatters "
                f"it, and {best.test_score:.2%} on the test split."
            )
    if failed := [f"trial {trial.number}, {trial.error}" for trial in result.trials if trial.status == "failed"]:
        notes.append(f"Failed: {'; '.join(failed)}.")
    for parameter in result.parameters if best else ():
        value = best.values.get(parameter.setting) if best else None
        if parameter.kind != "list" and isinstance(value, int | float) and _is_at_an_end(parameter, value):
            notes.append(f"{parameter.setting}={_value_text(value)} lies at an end of the range: try a wider range.")
    return notes


def _is_at_an_end(parameter: Parameter, value: float) -> bool:
    if parameter.kind == "log":
        return value < parameter.low * NEAR_FACTOR or value > parameter.high / NEAR_FACTOR
    near = NEAR_SHARE * (parameter.high - parameter.low)
    return value <= parameter.low + near or value >= parameter.high - near


def draw_sweep(result: SweepResult) -> dict[str, Figure]:
    """Draw all pictures of a sweep by name; those without data are left out."""
    figures: dict[str, Figure | None] = {"scores": draw_scores(result), "courses": draw_courses(result)}
    for parameter in result.parameters[:MAX_PARAMETERS]:
        figures[f"over-{parameter.setting}"] = draw_parameter(result, parameter)
    figures["timeline"] = draw_timeline(result)
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_scores(result: SweepResult) -> Figure | None:
    """Draw the score of each trial in the order of their numbers, and the best so far."""
    scored = [trial for trial in result.trials if trial.score is not None]
    if not scored:
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES, "Score of each trial; line: the best so far")
    if done := [trial for trial in scored if trial.status == "done"]:
        numbers = [trial.number for trial in (*done, result.trials[-1])]
        best = list(itertools.accumulate((trial.score or 0.0 for trial in done), max if result.sign > 0 else min))
        axis.step(numbers, [*best, best[-1]], where="post", color=plot.FAINT, linewidth=2)
    _draw_dots(axis, result, scored, [float(trial.number) for trial in scored])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "trial", result)
    return figure


def _draw_dots(axis: Axes, result: SweepResult, trials: Sequence[Trial], places: Sequence[float]) -> None:
    for trial, place in zip(trials, places, strict=True):
        colour = plot.ORANGE if trial == result.best else plot.BLUE
        fill = colour if trial.status == "done" else plot.PAPER
        y = trial.score or 0.0
        axis.plot([place], [y], "o", color=colour, markerfacecolor=fill, markersize=5.5, clip_on=False)


def _label(axis: Axes, name: str, result: SweepResult) -> None:
    axis.set_xlabel(name, loc="right")
    word = score_word([result.score_name])
    axis.set_ylabel(word if result.objective else f"validation {word}")


def draw_courses(result: SweepResult) -> Figure | None:
    """Draw the validation score of each trial over its epochs."""
    if all(len(trial.scores) < 2 for trial in result.trials):  # noqa: PLR2004  a course has two points
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES, "Courses; the best in orange, pruned ones dotted")
    for trial in sorted(result.trials, key=lambda trial: trial == result.best):
        colour, width = (plot.ORANGE, 2.0) if trial == result.best else (plot.GREY, 1.0)
        style = "-" if trial.status == "done" else (0, (2, 2))
        epochs = range(1, len(trial.scores) + 1)
        axis.plot(epochs, trial.scores, color=colour, linewidth=width, linestyle=style)
        axis.plot(epochs[-1:], trial.scores[-1:], "o", color=colour, markersize=3)  # a course of one epoch too
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axis, "epoch", result)
    return figure


def draw_parameter(result: SweepResult, parameter: Parameter) -> Figure | None:
    """Draw the score of each trial over one of its settings."""
    scored = [trial for trial in result.trials if trial.score is not None and parameter.setting in trial.values]
    if not scored:
        return None
    figure, (axis,) = plot.new_figure(HEIGHT_INCHES, f"Over {parameter.short}; open: pruned")
    if parameter.kind == "list":
        names = [plot.shorten(text_of(choice), MAX_LABEL) for choice in parameter.choices]
        places = [float(parameter.choices.index(trial.values[parameter.setting])) for trial in scored]
        axis.set_xticks(range(len(names)), names, parse_math=False)
        axis.set_xlim(-0.5, len(names) - 0.5)
    else:
        places = [float(trial.values[parameter.setting] or 0.0) for trial in scored]
        if parameter.kind == "log":
            axis.set_xscale("log")
        axis.set_xlim(parameter.low, parameter.high)
    _draw_dots(axis, result, scored, places)
    _label(axis, parameter.setting, result)
    return figure


def draw_timeline(result: SweepResult) -> Figure | None:
    """Draw which trial ran when, those at the same time below each other."""
    trials = sorted(result.trials, key=lambda trial: trial.started)
    if not trials:
        return None
    start, end = trials[0].started, max(trial.end_time for trial in trials)
    rows = timeline_rows(trials)
    figure, (axis,) = plot.new_figure(0.9 + 0.3 * (max(rows) + 1), "Which trials ran at the same time")
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
