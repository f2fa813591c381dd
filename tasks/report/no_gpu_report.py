"""The study "no GPU?" for people: its table, in the terminal and on a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from paceline.tasks.formatting import format_seconds
from paceline.tasks.redact import redact
from paceline.tasks.report.html import (
    Html,
    bullets,
    columns,
    folded,
    join,
    page,
    paragraph,
    section,
    table,
    tag,
    text,
    tiles,
)
from paceline.tasks.report.plotting import svg_text
from paceline.tasks.report.run_charts import draw_ratios
from paceline.tasks.report.study_report import DASH, ratio_text
from paceline.tasks.speedup.study.no_gpu import SCRATCH, Approach, NoGpuResult, ReportedValue

HEAD = ("way", "on", "accuracy", "to the target", "speedup", "whole", "speedup", "energy", "predicts", "eager", "basis")
DIGITS_OF_ESTIMATES = 2
SHORTEST_SECONDS = 1e-3
"""Below, one digit is told."""


def no_gpu_table(result: NoGpuResult) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows."""
    return HEAD, [_row(way) for way in result.ways]


def _row(way: Approach) -> list[str]:
    return [
        way.name,
        way.device,
        _score(way),
        _to_target(way),
        _speedup(way, "target"),
        _seconds(way.whole_seconds),
        _speedup(way, "whole"),
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


def _to_target(way: Approach) -> str:
    some = f" ({way.num_reached} of {way.num_judged})" if 0 < way.num_reached < way.num_judged else ""
    return _seconds(way.target_seconds) + some


def _speedup(way: Approach, what: str) -> str:
    if not way.is_measured:
        return DASH
    if way.name == SCRATCH:
        return "1"
    return ratio_text(way.target_ratio if what == "target" else way.whole_ratio)


def _seconds(cell: ReportedValue) -> str:
    if cell.value is None:
        return cell.kind
    is_short = cell.value < SHORTEST_SECONDS
    return _prefix(cell) + (f"{1000 * cell.value:.1g} ms" if is_short else format_seconds(cell.value))


def _cell(cell: ReportedValue, form: str) -> str:
    if cell.value is None:
        return cell.kind
    value = cell.value if cell.kind == "measured" else float(f"{cell.value:.{DIGITS_OF_ESTIMATES}g}")
    return _prefix(cell) + form.format(value)


def _prefix(cell: ReportedValue) -> str:
    return "" if cell.kind == "measured" else f"{cell.kind} "


def render_no_gpu(result: NoGpuResult, environment: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        result: what the study found.
        environment: versions, hosts, commit: anything that JSON can hold.
    """
    svgs = [Html(svg_text(figure, name)) for name, figure in draw_no_gpu(result).items()]
    header = tag(
        "header",
        join(
            [
                tag("h1", text(f"{result.experiment} / {result.preset} without a GPU")),
                paragraph(f"run {result.run_id} · {result.hardware}"),
            ]
        ),
    )
    figures = [
        ("repeats of each way", str(result.num_repeats)),
        ("whole study", format_seconds(result.seconds)),
        ("trainings on a busy machine", str(sum(way.contaminated for way in result.ways))),
        ("failed trainings", str(sum(way.num_failed for way in result.ways))),
    ]
    body = join(
        [
            header,
            tag("div", join([paragraph(result.verdict, "verdict"), tiles(figures)]), "hero"),
            section("What does each way give?", _measured_tables(result), columns(*svgs)),
            section("How fast does the trained network predict, and what would a GPU change?", _gpu_table(result)),
            section("What do the numbers mean?", bullets(result.notes)),
            section("What do the estimates rest on?", bullets(_grounds(result))),
            section("Every training", _runs(result)),
            folded("Environment", json.dumps(dict(environment), indent=2, default=str)),
        ]
    )
    return redact(page(f"{result.preset} without a GPU", body))


def _measured_tables(result: NoGpuResult) -> Html:
    head = ("", "accuracy", "to the target", "speedup", "whole", "speedup", "energy")
    rows = [
        (row[0], *row[2:8]) for row, way in zip(no_gpu_table(result)[1], result.ways, strict=True) if way.is_measured
    ]
    note = paragraph(
        f"All began with {result.pretrained}, but the one from scratch. Accuracy on the test split: mean over the "
        "repeats, their spread, the difference to training from scratch in points with its 95 % interval. Speedups are "
        "ratios of times in the same repeat, with 95 % intervals over the repeats where there are enough of them.",
        "note",
    )
    return join([table(head, rows), note])


def _gpu_table(result: NoGpuResult) -> Html:
    head = ("", "on", "predicts", "eager", "to the target", "whole", "basis")
    rows = [(row[0], row[1], row[8], row[9], row[3], row[5], row[10]) for row in (_row(way) for way in result.ways)]
    return join([table(head, rows), bullets(_prediction_notes(result))])


def _prediction_notes(result: NoGpuResult) -> Iterator[str]:
    if result.prediction_ratio is not None:
        yield (
            f"On this CPU the network predicts {ratio_text(result.prediction_ratio)} times as fast as it is executed "
            "(folded, reduced precision, channels last) than eager in float32, timed in turn."
        )
    if result.cost is not None:
        yield (
            f"Counted on the network: {result.cost.forward_flops / 1e6:,.3g} Mflop for a prediction, "
            f"{result.cost.training_flops / 1e6:,.3g} Mflop for a sample in training, "
            f"{result.cost.num_parameters:,} parameters."
        )


def _grounds(result: NoGpuResult) -> Iterator[str]:
    for way in result.ways:
        for name, cell in _cells(way):
            if cell.basis and cell.kind != "not measured":
                yield f"{way.name} on {way.device}, {name}: {cell.kind}; {cell.basis}."
    missing = [
        f"{way.name} on {way.device}: {name} ({cell.basis})"
        for way in result.ways
        for name, cell in _cells(way)
        if cell.kind == "not measured"
    ]
    if missing:
        yield "Not measured, and not estimated: " + "; ".join(missing) + "."


def _cells(way: Approach) -> tuple[tuple[str, ReportedValue], ...]:
    return (
        ("time to the target", way.target_seconds),
        ("whole time", way.whole_seconds),
        ("energy", way.joules),
        ("prediction", way.executed),
        ("eager prediction", way.eager),
    )


def _runs(result: NoGpuResult) -> Html:
    head = ("", "done", "failed", "contaminated", "runs", "last error")
    rows = [
        (
            way.name,
            way.num_done,
            way.num_failed,
            way.contaminated,
            ", ".join(run_id[:8] for run_id in way.run_ids),
            way.error or DASH,
        )
        for way in result.ways
        if way.is_measured
    ]
    return table(head, rows)


def draw_no_gpu(result: NoGpuResult) -> dict[str, Figure]:
    """Pictures by name; those without data are left out."""
    found = {}
    for name, title in (("target", "Time to the target, as a speedup"), ("whole", "Whole time, as a speedup")):
        ratios: dict[str, tuple[float, float | None, float | None]] = {SCRATCH: (1.0, None, None)}
        for way in result.ways:
            ratio = way.target_ratio if name == "target" else way.whole_ratio
            if way.is_measured and ratio is not None:
                ratios[way.name] = (ratio.value, ratio.low, ratio.high)
        if len(ratios) > 1:
            found[name] = draw_ratios(ratios, SCRATCH, "times training from scratch", title)
    return found
