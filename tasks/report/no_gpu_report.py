"""Report of the study "no GPU?": its table in the terminal, and its page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from paceline.tasks.formatting import DASH, format_seconds
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.report.page import interval_text, render_page
from paceline.tasks.report.plotting import draw_ratios
from paceline.tasks.speedup.study.no_gpu import SCRATCH, Approach, NoGpuResult, ReportedValue

HEAD = ("way", "on", "accuracy", "to the target", "speedup", "whole", "speedup", "energy", "predicts", "eager", "basis")
DIGITS_OF_ESTIMATES = 2
SHORTEST_SECONDS = 1e-3  # shorter times are shown with one digit


def no_gpu_table(result: NoGpuResult) -> tuple[Sequence[str], list[list[str]]]:
    """Make the head and rows."""
    return HEAD, [_row(way) for way in result.ways]


def _row(way: Approach) -> list[str]:
    is_partial = 0 < way.num_reached < way.num_judged
    return [
        way.name,
        way.device,
        _score(way),
        _cell(way.target_seconds) + (f" ({way.num_reached} of {way.num_judged})" if is_partial else ""),
        _speedup(way, way.target_ratio),
        _cell(way.whole_seconds),
        _speedup(way, way.whole_ratio),
        _cell(way.joules, "{:,.0f} J"),
        _cell(way.executed, "{:,.0f}/s"),
        _cell(way.eager, "{:,.0f}/s"),
        way.basis,
    ]


def _score(way: Approach) -> str:
    if way.score is None:
        return DASH
    spread = "" if way.least_score == way.best_score else f" ({way.least_score:.2%} to {way.best_score:.2%})"
    if way.difference is None or way.difference.low is None or way.difference.high is None:
        return f"{way.score:.2%}{spread}"
    points = [100 * value for value in (way.difference.value, way.difference.low, way.difference.high)]
    return f"{way.score:.2%}{spread}, {points[0]:+.1f} [{points[1]:+.1f}, {points[2]:+.1f}] points, {way.parity}"


def _speedup(way: Approach, ratio: Interval | None) -> str:
    if not way.is_measured:
        return DASH
    return "1" if way.name == SCRATCH else interval_text(ratio)


def _cell(cell: ReportedValue, form: str = "") -> str:
    """A value in a format, seconds without one, after what it is unless it was measured."""
    if cell.value is None:
        return cell.kind
    prefix = "" if cell.kind == "measured" else f"{cell.kind} "
    if form:
        rounded = cell.value if cell.kind == "measured" else float(f"{cell.value:.{DIGITS_OF_ESTIMATES}g}")
        return prefix + form.format(rounded)
    is_short = cell.value < SHORTEST_SECONDS
    return prefix + (f"{1000 * cell.value:.1g} ms" if is_short else format_seconds(cell.value))


def render_no_gpu(result: NoGpuResult, environment: Mapping[str, Any]) -> str:
    """Render the page as HTML; the environment (versions, hosts, commit) is anything that JSON can hold."""
    return render_page(
        "no_gpu",
        draw_no_gpu(result),
        result=result,
        ways=[(way, _row(way)) for way in result.ways],
        grounds=list(_grounds(result)),
        environment=dict(environment),
    )


def _grounds(result: NoGpuResult) -> Iterator[str]:
    missing = []
    for way in result.ways:
        cells = {
            "time to the target": way.target_seconds,
            "whole time": way.whole_seconds,
            "energy": way.joules,
            "prediction": way.executed,
            "eager prediction": way.eager,
        }
        for name, cell in cells.items():
            if cell.kind == "not measured":
                missing.append(f"{way.name} on {way.device}: {name} ({cell.basis})")
            elif cell.basis:
                yield f"{way.name} on {way.device}, {name}: {cell.kind}; {cell.basis}."
    if missing:
        yield "Not measured, and not estimated: " + "; ".join(missing) + "."


def draw_no_gpu(result: NoGpuResult) -> dict[str, Figure]:
    """Draw the speedups by name; those without data are left out."""
    figures = {}
    for name, title in (("target", "Time to the target, as a speedup"), ("whole", "Whole time, as a speedup")):
        ratios: dict[str, tuple[float, float | None, float | None]] = {SCRATCH: (1.0, None, None)}
        for way in result.ways:
            ratio = way.target_ratio if name == "target" else way.whole_ratio
            if way.is_measured and ratio is not None:
                ratios[way.name] = (ratio.value, ratio.low, ratio.high)
        if len(ratios) > 1:
            figures[name] = draw_ratios(ratios, SCRATCH, "times training from scratch", title)
    return figures
