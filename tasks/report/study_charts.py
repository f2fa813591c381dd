"""Pictures of a study: ratios with intervals, scaling with its bounds, the ladder, and who wins where.

Each function returns a matplotlib Figure, or None without data; `paceline.tasks.report.plotting` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import Interval
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
from paceline.tasks.speedup.study.records import ArmSummary, BudgetDifference, Scaling, StudyResult
from paceline.tasks.speedup.study.scaling import law

MAX_NAME = 26
MAX_TITLE = 52
MAX_DIFFERENCES = 6
MAX_ITEMS = 8
LAW_COLOURS = {"Amdahl": GREEN, "Universal Scalability": ORANGE}


def draw_study(result: StudyResult) -> dict[str, Figure]:
    """All pictures of a study by name; those without data are left out."""
    figures: dict[str, Figure | None] = {
        "ratios": draw_ratios(result.arms),
        "prediction": draw_prediction(result.arms),
    }
    for number, scaling in enumerate(result.scalings):
        figures[f"scaling-{number}"] = draw_scaling(scaling)
    figures["ladder"] = draw_ladder(result)
    figures["winners"] = draw_winners(result.arms)
    for number, difference in enumerate(result.differences[:MAX_DIFFERENCES]):
        figures[f"budget-{number}"] = draw_difference(difference)
    return {name: figure for name, figure in figures.items() if figure is not None}


def why_no_ratio(arm: ArmSummary) -> str:
    """In two words, for an arm without a ratio."""
    if arm.arm.is_baseline:
        return "baseline"
    if arm.num_done == 0:
        return "failed" if arm.num_failed else "not run"
    if arm.match is not None and not arm.match.matches:
        return "not comparable"
    if arm.match is None:
        return "no baseline"
    return "baseline contaminated" if arm.num_pairs == 0 else "not measured"


def draw_ratios(arms: Sequence[ArmSummary]) -> Figure | None:
    """One line per arm: steady state with its interval, end to end as a ring; baselines stand at 1."""
    if not any(arm.ratio for arm in arms):
        return None
    names = [break_name(arm.arm.name, MAX_NAME) for arm in arms]
    lines = max(name.count("\n") + 1 for name in names)
    figure, (axis,) = new_figure(0.9 + (0.27 + 0.17 * lines) * len(arms))
    places = np.arange(len(arms))[::-1]
    for place, arm in zip(places, arms, strict=True):
        _draw_arm(axis, float(place), arm)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_yticks(places, names, parse_math=False)
    axis.set_ylim(-0.7, len(arms) - 0.3)
    axis.set_xlim(left=0)
    axis.set_xlabel("times the baseline; ring: end to end", fontsize=FONT_POINTS, color=INK, loc="right")
    set_title(axis, "How much faster, with 95 % intervals")
    return figure


def _draw_arm(axis: Axes, place: float, arm: ArmSummary) -> None:
    if arm.ratio is None:
        axis.text(1.03, place, why_no_ratio(arm), va="center", fontsize=FONT_POINTS, color=GREY)
        return
    colour = BLUE if arm.significant else GREY
    _errorbar(axis, arm.ratio, place, colour)
    if arm.end_to_end_ratio is not None:
        axis.plot([arm.end_to_end_ratio.value], [place], "o", markersize=6, markerfacecolor="none", color=ORANGE)
    ends = [value for value in (arm.ratio.high, arm.ratio.value) if value is not None]
    note = f"  {arm.ratio.value:.2f}" + ("" if arm.significant else ", not significant")
    axis.text(max(ends), place + 0.26, note, va="center", ha="right", fontsize=FONT_POINTS - 1, color=INK)


def _errorbar(axis: Axes, interval: Interval, place: float, colour: str) -> None:
    if interval.low is not None and interval.high is not None:
        axis.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
    axis.plot([interval.value], [place], "o", markersize=5, color=colour, zorder=3)


def draw_prediction(arms: Sequence[ArmSummary]) -> Figure | None:
    """Training and prediction of each arm as bars, times the baseline's, with their intervals."""
    shown = [arm for arm in arms if arm.ratio is not None and arm.prediction_ratio is not None]
    if not shown:
        return None
    names = [break_name(arm.arm.name, MAX_NAME) for arm in shown]
    figure, (axis,) = new_figure(1.2 + 0.75 * len(shown))
    for number, arm in enumerate(shown):
        _draw_bar(axis, -number + 0.19, arm.ratio, BLUE, "training" if number == 0 else "")
        _draw_bar(axis, -number - 0.19, arm.prediction_ratio, GREEN, "prediction" if number == 0 else "")
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_yticks([-number for number in range(len(shown))], names, parse_math=False)
    axis.set_ylim(-len(shown) + 0.4, 0.9)
    axis.legend(frameon=False, fontsize=FONT_POINTS - 1, labelcolor=INK, loc="upper right", ncols=2)
    axis.set_xlabel("times the baseline", fontsize=FONT_POINTS, color=INK, loc="right")
    set_title(axis, "Training and prediction")
    return figure


def _draw_bar(axis: Axes, place: float, interval: Interval | None, colour: str, label: str) -> None:
    if interval is None:
        return
    axis.barh(place, interval.value, height=0.34, color=colour, label=label)
    ends = [value for value in (interval.low, interval.high) if value is not None]
    if ends:
        axis.plot(ends, [place] * len(ends), color=INK, linewidth=1.2)
    axis.text(
        max([interval.value, *ends]), place, f" {interval.value:.2f}", va="center", fontsize=FONT_POINTS - 1, color=INK
    )


def draw_scaling(scaling: Scaling) -> Figure | None:
    """Speedup over the number of devices with the ideal line and the laws, and efficiency below it."""
    numbers = [point.num_devices for point in scaling.points]
    if len(numbers) < 2:  # noqa: PLR2004  a line needs two points
        return None
    figure, (speed, efficiency) = new_figure(4.4, num_rows=2)
    largest = max(numbers)
    axis_numbers = np.linspace(1, largest, 200)
    speed.plot([1, largest], [1, largest], color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), label="ideal")
    for fit in scaling.fits:
        curve = [law(fit, number) for number in axis_numbers]
        speed.plot(axis_numbers, curve, color=LAW_COLOURS[fit.law], linewidth=1.3, label=fit.law)
    for axis, name in ((speed, "speedup"), (efficiency, "efficiency")):
        for point in scaling.points:
            _vertical(axis, point.num_devices, getattr(point, name))
        axis.set_xticks(numbers)
        axis.grid(axis="y", color=FAINT, linewidth=0.7)
        axis.set_ylim(bottom=0)
    speed.legend(frameon=False, fontsize=FONT_POINTS - 1, labelcolor=INK, loc="upper left")
    efficiency.axhline(1.0, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    efficiency.yaxis.set_major_formatter(PercentFormatter(1.0))
    efficiency.set_xlabel("devices", fontsize=FONT_POINTS, color=INK)
    group = ", ".join(part.partition(".")[2] for part in scaling.group.split(", ") if part)
    set_title(speed, shorten(f"Speedup, {scaling.kind} scaling" + (f"; {group}" if group else ""), MAX_TITLE))
    set_title(efficiency, "Parallel efficiency")
    return figure


def _vertical(axis: Axes, number: int, interval: Interval) -> None:
    if interval.low is not None and interval.high is not None:
        axis.plot([number, number], [interval.low, interval.high], color=BLUE, linewidth=2.0)
    axis.plot([number], [interval.value], "o", markersize=5, color=BLUE, zorder=3)


def draw_ladder(result: StudyResult) -> Figure | None:
    """Each factor multiplies the throughput of the rungs below it; a logarithmic axis makes equal factors equal."""
    known = [(rung.factor, rung.contribution.value) for rung in result.rungs if rung.contribution is not None]
    if not known or len(known) < len(result.rungs):
        return None
    figure, (axis,) = new_figure(1.2 + 0.4 * (len(known) + 1))
    reached = 1.0
    for place, (_, factor) in enumerate(known):
        left, right = sorted((reached, reached * factor))
        axis.barh(-place, right - left, left=left, height=0.6, color=BLUE if factor >= 1 else ORANGE)
        axis.text(right * 1.02, -place, f"x {factor:.2f}", va="center", fontsize=FONT_POINTS, color=INK)
        reached *= factor
    axis.barh(-len(known), abs(reached - 1), left=min(1.0, reached), height=0.6, color=GREEN)
    axis.text(max(1.0, reached) * 1.02, -len(known), f"{reached:.2f}", va="center", fontsize=FONT_POINTS, color=INK)
    axis.set_xscale("log")
    low, high = min(1.0, reached), max(1.0, reached, *(factor for _, factor in known))
    axis.set_xlim(low / 1.1, high * 1.5)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    names = [f"+ {shorten(factor, MAX_NAME - 2)}" for factor, _ in known] + ["together"]
    axis.set_yticks([-place for place in range(len(names))], names, parse_math=False)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    interaction = f", interaction x {result.interaction.value:.2f}" if result.interaction else ""
    set_title(axis, f"What each factor adds{interaction}")
    return figure


def draw_difference(difference: BudgetDifference) -> Figure | None:
    """Seconds that each item of the time budget gave (left) or took (right)."""
    items = [item for item in difference.items if item.difference][:MAX_ITEMS]
    if not items:
        return None
    figure, (axis,) = new_figure(0.9 + 0.3 * len(items))
    places = np.arange(len(items))[::-1]
    values = [item.difference for item in items]
    axis.barh(places, values, height=0.62, color=[GREEN if value < 0 else ORANGE for value in values])
    reach = max(abs(value) for value in values)
    for place, value in zip(places, values, strict=True):
        side = 1 if value >= 0 else -1
        axis.text(
            value + side * 0.03 * reach,
            place,
            f"{'+' if value > 0 else '-'}{format_seconds(abs(value))}",
            va="center",
            ha="left" if value >= 0 else "right",
            fontsize=FONT_POINTS,
            color=INK,
        )
    axis.axvline(0.0, color=INK, linewidth=0.8)
    axis.set_xlim(-1.45 * reach, 1.45 * reach)
    axis.set_xticks([])
    axis.spines[["bottom"]].set_visible(False)
    axis.set_yticks(places, [item.item.replace("_", " ") for item in items])
    sign = "+" if difference.difference > 0 else "-"
    total = f"{sign}{format_seconds(abs(difference.difference))}"
    set_title(axis, shorten(f"{difference.arm}: {total}", MAX_TITLE))
    return figure


def draw_winners(arms: Sequence[ArmSummary]) -> Figure | None:
    """One cell per group of work: the fastest arm that matches, and its factor over the group's baseline."""
    groups = list(dict.fromkeys(arm.arm.group for arm in arms))
    if len(groups) < 2:  # noqa: PLR2004  a map is of several places
        return None
    settings = [dict(part.split("=", 1) for part in group.split(", ")) for group in groups]
    fields = list(settings[0])
    if len(fields) > 2:  # noqa: PLR2004  paper has two directions
        return None
    columns = list(dict.fromkeys(setting[fields[0]] for setting in settings))
    rows = list(dict.fromkeys(setting[fields[1]] for setting in settings)) if len(fields) > 1 else [""]
    figure, (axis,) = new_figure(1.1 + 0.75 * len(rows))
    for group, setting in zip(groups, settings, strict=True):
        column = columns.index(setting[fields[0]])
        row = rows.index(setting[fields[1]]) if len(fields) > 1 else 0
        _draw_cell(axis, column, row, winner(arms, group))
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(fields[0], fontsize=FONT_POINTS, color=INK)
    axis.set_ylabel(fields[1] if len(fields) > 1 else "", fontsize=FONT_POINTS, color=INK)
    set_title(axis, "Which execution wins where")
    return figure


def winner(arms: Sequence[ArmSummary], group: str) -> ArmSummary | None:
    """The fastest arm of a group that certainly beats its baseline, else the baseline; None when that did not run."""
    members = [arm for arm in arms if arm.arm.group == group]
    faster = [arm for arm in members if arm.ratio is not None and arm.significant and arm.ratio.value > 1]
    baseline = next((arm for arm in members if arm.arm.is_baseline and arm.num_done), None)
    return max(faster, key=lambda arm: arm.ratio.value if arm.ratio else 0.0, default=baseline)


def execution_name(arm: ArmSummary) -> str:
    """An arm by its axes of execution alone."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in arm.execution.items() if "execution." in key]
    return ", ".join(parts) or arm.arm.name


def _draw_cell(axis: Axes, column: int, row: int, best: ArmSummary | None) -> None:
    factor = best.ratio.value if best is not None and best.ratio is not None else 1.0
    strength = min(1.0, max(0.0, np.log2(factor) / 2))
    axis.add_patch(_cell(column, row, 0.08 + 0.5 * strength))
    name = "nothing ran" if best is None else execution_name(best)
    lines = [shorten(part, 18) for part in name.split(", ")][:2]
    axis.text(
        column,
        row,
        "\n".join([*lines, f"{factor:.2f} x"]),
        ha="center",
        va="center",
        fontsize=FONT_POINTS - 1.5,
        color=INK,
        parse_math=False,
    )


def _cell(column: int, row: int, alpha: float) -> Rectangle:
    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=BLUE, alpha=alpha, edgecolor=PAPER, linewidth=2)
