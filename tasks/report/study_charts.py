"""Pictures of a study: ratios with intervals, scaling with its bounds, the ladder, and who wins where."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.report import plotting as plot
from paceline.tasks.speedup.study.analysis import winner
from paceline.tasks.speedup.study.records import ArmSummary, BudgetDifference, Scaling, StudyResult
from paceline.tasks.speedup.study.scaling import law

MAX_NAME, MAX_TITLE = 26, 52  # characters
MAX_DIFFERENCES, MAX_ITEMS = 6, 8
LAW_COLOURS = {"Amdahl": plot.GREEN, "Universal Scalability": plot.ORANGE}


def draw_study(result: StudyResult) -> dict[str, Figure]:
    """Draw all pictures of a study by name; those without data are left out."""
    figures: dict[str, Figure | None] = {"ratios": draw_ratios(result.arms), "prediction": draw_prediction(result.arms)}
    for number, scaling in enumerate(result.scalings):
        figures[f"scaling-{number}"] = draw_scaling(scaling)
    figures["ladder"] = draw_ladder(result)
    figures["winners"] = draw_winners(result.arms)
    for number, difference in enumerate(result.differences[:MAX_DIFFERENCES]):
        figures[f"budget-{number}"] = draw_difference(difference)
    return {name: figure for name, figure in figures.items() if figure is not None}


def reason_without_ratio(arm: ArmSummary) -> str:
    """Say in two words why an arm has no ratio."""
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
    """Draw one line per arm: steady state with its interval, end to end as a ring; baselines stand at 1."""
    if not any(arm.ratio for arm in arms):
        return None
    names = [plot.break_name(arm.arm.name, MAX_NAME) for arm in arms]
    lines = max(name.count("\n") + 1 for name in names)
    height = 0.9 + (0.27 + 0.17 * lines) * len(arms)
    figure, (axis,) = plot.new_figure(height, "How much faster, with 95 % intervals")
    places = range(len(arms))[::-1]
    for place, arm in zip(places, arms, strict=True):
        if arm.ratio is None:
            plot.add_text(axis, 1.03, place, reason_without_ratio(arm), color=plot.GREY)
            continue
        low, high = arm.ratio.low, arm.ratio.high
        colour = plot.BLUE if arm.significant else plot.GREY
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        axis.plot([arm.ratio.value], [place], "o", markersize=5, color=colour, zorder=3)
        if arm.end_to_end_ratio is not None:
            axis.plot(
                [arm.end_to_end_ratio.value], [place], "o", markersize=6, markerfacecolor="none", color=plot.ORANGE
            )
        note = f"  {arm.ratio.value:.2f}" + ("" if arm.significant else ", not significant")
        plot.add_text(
            axis, max(high or 0.0, arm.ratio.value), place + 0.26, note, ha="right", fontsize=plot.FONT_POINTS - 1
        )
    axis.axvline(1.0, **plot.DASHED)
    axis.set_yticks(places, names, parse_math=False)
    axis.set_ylim(-0.7, len(arms) - 0.3)
    axis.set_xlim(left=0)
    axis.set_xlabel("times the baseline; ring: end to end", loc="right")
    return figure


def draw_prediction(arms: Sequence[ArmSummary]) -> Figure | None:
    """Draw training and prediction of each arm as bars, times the baseline's, with their intervals."""
    shown = [arm for arm in arms if arm.ratio is not None and arm.prediction_ratio is not None]
    if not shown:
        return None
    figure, (axis,) = plot.new_figure(1.2 + 0.75 * len(shown), "Training and prediction")
    for number, arm in enumerate(shown):
        bars = (("training", arm.ratio, 0.19, plot.BLUE), ("prediction", arm.prediction_ratio, -0.19, plot.GREEN))
        for label, ratio, offset, colour in bars:
            assert ratio is not None
            place = -number + offset
            axis.barh(place, ratio.value, height=0.34, color=colour, label=label if number == 0 else "")
            ends = [end for end in (ratio.low, ratio.high) if end is not None]
            axis.plot(ends, [place] * len(ends), color=plot.INK, linewidth=1.2)
            plot.add_text(axis, max([ratio.value, *ends]), place, f" {ratio.value:.2f}", fontsize=plot.FONT_POINTS - 1)
    axis.axvline(1.0, **plot.DASHED)
    axis.set_yticks(
        range(0, -len(shown), -1), [plot.break_name(arm.arm.name, MAX_NAME) for arm in shown], parse_math=False
    )
    axis.set_ylim(-len(shown) + 0.4, 0.9)
    axis.legend(loc="upper right", ncols=2, **plot.LEGEND)
    axis.set_xlabel("times the baseline", loc="right")
    return figure


def draw_scaling(scaling: Scaling) -> Figure | None:
    """Draw the speedup over the number of devices with the ideal line and the laws, and efficiency below it."""
    numbers = [point.num_devices for point in scaling.points]
    if len(numbers) < 2:  # noqa: PLR2004  a line needs two points
        return None
    group = ", ".join(part.partition(".")[2] for part in scaling.group.split(", ") if part)
    title = plot.shorten(f"Speedup, {scaling.kind} scaling" + (f"; {group}" if group else ""), MAX_TITLE)
    figure, (speed, efficiency) = plot.new_figure(4.4, title, "Parallel efficiency")
    largest = max(numbers)
    speed.plot([1, largest], [1, largest], label="ideal", **plot.IDEAL)
    curve = np.linspace(1, largest, 200)
    for fit in scaling.fits:
        values = [law(fit, number) for number in curve]
        speed.plot(curve, values, color=LAW_COLOURS[fit.law], linewidth=1.3, label=fit.law)
    for axis, name in ((speed, "speedup"), (efficiency, "efficiency")):
        for point in scaling.points:
            interval: Interval = getattr(point, name)
            if interval.low is not None and interval.high is not None:
                axis.plot([point.num_devices] * 2, [interval.low, interval.high], color=plot.BLUE, linewidth=2.0)
            axis.plot([point.num_devices], [interval.value], "o", markersize=5, color=plot.BLUE, zorder=3)
        axis.set_xticks(numbers)
        axis.grid(axis="y", color=plot.FAINT, linewidth=0.7)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    speed.legend(loc="upper left", **plot.LEGEND)
    efficiency.axhline(1.0, **plot.IDEAL)
    efficiency.yaxis.set_major_formatter(PercentFormatter(1.0))
    efficiency.set_xlabel("devices")
    return figure


def draw_ladder(result: StudyResult) -> Figure | None:
    """Draw how each factor multiplies the throughput of the rungs below it; equal factors are equally long."""
    steps = [(rung.factor, rung.contribution.value) for rung in result.rungs if rung.contribution is not None]
    if not steps or len(steps) < len(result.rungs):
        return None
    interaction = f", interaction x {result.interaction.value:.2f}" if result.interaction else ""
    figure, (axis,) = plot.new_figure(1.2 + 0.4 * (len(steps) + 1), f"What each factor adds{interaction}")
    total = 1.0
    for place, (_, factor) in enumerate(steps):
        left, right = sorted((total, total * factor))
        axis.barh(-place, right - left, left=left, height=0.6, color=plot.BLUE if factor >= 1 else plot.ORANGE)
        plot.add_text(axis, right * 1.02, -place, f"x {factor:.2f}")
        total *= factor
    axis.barh(-len(steps), abs(total - 1), left=min(1.0, total), height=0.6, color=plot.GREEN)
    plot.add_text(axis, max(1.0, total) * 1.02, -len(steps), f"{total:.2f}")
    axis.set_xscale("log")
    axis.set_xlim(min(1.0, total) / 1.1, max(1.0, total, *(factor for _, factor in steps)) * 1.5)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    names = [f"+ {plot.shorten(factor, MAX_NAME - 2)}" for factor, _ in steps] + ["together"]
    axis.set_yticks(range(0, -len(names), -1), names, parse_math=False)
    axis.axvline(1.0, **plot.DASHED)
    return figure


def draw_difference(difference: BudgetDifference) -> Figure | None:
    """Draw the seconds that each item of the time budget saved (left) or cost (right)."""
    items = [item for item in difference.items if item.difference][:MAX_ITEMS]
    if not items:
        return None
    title = plot.shorten(f"{difference.arm}: {_signed_seconds(difference.difference)}", MAX_TITLE)
    figure, (axis,) = plot.new_figure(0.9 + 0.3 * len(items), title)
    places = range(len(items))[::-1]
    values = [item.difference for item in items]
    axis.barh(places, values, height=0.62, color=[plot.GREEN if value < 0 else plot.ORANGE for value in values])
    reach = max(abs(value) for value in values)
    for place, value in zip(places, values, strict=True):
        side = 1 if value >= 0 else -1
        x = value + side * 0.03 * reach
        plot.add_text(axis, x, place, _signed_seconds(value), ha="left" if value >= 0 else "right")
    axis.axvline(0.0, color=plot.INK, linewidth=0.8)
    axis.set_xlim(-1.45 * reach, 1.45 * reach)
    plot.hide_x_axis(axis)
    axis.set_yticks(places, [item.item.replace("_", " ") for item in items])
    return figure


def _signed_seconds(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def draw_winners(arms: Sequence[ArmSummary]) -> Figure | None:
    """Draw one cell per group of work: the fastest arm that matches, and its factor over the group's baseline."""
    groups = list(dict.fromkeys(arm.arm.group for arm in arms))
    if len(groups) < 2:  # noqa: PLR2004  a map has several places
        return None
    firsts = [next(arm for arm in arms if arm.arm.group == group) for group in groups]
    settings = [{key: value for key, value in arm.execution.items() if _is_of_group(arm, key)} for arm in firsts]
    fields = list(settings[0])
    if len(fields) > 2:  # noqa: PLR2004  paper has two directions
        return None
    columns = list(dict.fromkeys(setting[fields[0]] for setting in settings))
    rows = list(dict.fromkeys(setting[fields[1]] for setting in settings)) if len(fields) > 1 else [""]
    figure, (axis,) = plot.new_figure(1.1 + 0.75 * len(rows), "Which execution wins where")
    for group, setting in zip(groups, settings, strict=True):
        best, column = winner(arms, group), columns.index(setting[fields[0]])
        row = rows.index(setting[fields[1]]) if len(fields) > 1 else 0
        factor = best.ratio.value if best is not None and best.ratio is not None else 1.0
        alpha, corner = 0.08 + 0.5 * min(1.0, max(0.0, np.log2(factor) / 2)), (column - 0.5, row - 0.5)
        axis.add_patch(Rectangle(corner, 1, 1, facecolor=plot.BLUE, alpha=alpha, edgecolor=plot.PAPER, linewidth=2))
        parts = ("nothing ran" if best is None else execution_name(best)).split(", ")
        lines = "\n".join([*(plot.shorten(part, 18) for part in parts[:2]), f"{factor:.2f} x"])
        plot.add_text(axis, column, row, lines, ha="center", fontsize=plot.FONT_POINTS - 1.5)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(fields[0])
    axis.set_ylabel(fields[1] if len(fields) > 1 else "")
    return figure


def execution_name(arm: ArmSummary) -> str:
    """Name an arm by its execution settings alone."""
    chosen = {key: value for key, value in arm.execution.items() if not _is_of_group(arm, key)}
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
    return ", ".join(parts) or arm.arm.name


def _is_of_group(arm: ArmSummary, key: str) -> bool:
    return f"{key}={arm.execution[key]}" in arm.arm.group
