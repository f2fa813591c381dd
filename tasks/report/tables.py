"""The hardware table for people: in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from paceline.tasks.formatting import format_seconds
from paceline.tasks.redact import redact
from paceline.tasks.report.html import Html, bullets, columns, join, page, paragraph, section, table, tag, text
from paceline.tasks.report.plotting import svg_text
from paceline.tasks.report.run_charts import draw_ratios
from paceline.tasks.speedup.compare import DASH, Comparison, compare_notes, compare_table
from paceline.tasks.speedup.hardware_table import HardwareRow, HardwareTable, WorkTable

HEAD = ("hardware", "samples/s", "speedup", "runs", "fixed", "memory", "energy", "price", "execution")


def rows_of(work: WorkTable) -> list[list[str]]:
    """Cells below `HEAD`."""
    priced = any(row.price_per_million_samples for row in work.rows)
    return [_cells(row, priced) for row in work.rows]


def _cells(row: HardwareRow, priced: bool) -> list[str]:
    interval = f" [{row.low:.2f}, {row.high:.2f}]" if row.low is not None and row.high is not None else ""
    price = row.price_per_million_samples
    return [
        row.label,
        f"{row.samples_per_second:,.0f}",
        f"{row.speedup:.2f}{interval}",
        str(row.num_runs),
        DASH if row.fixed_seconds is None else format_seconds(row.fixed_seconds),
        DASH if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f} GiB",
        DASH if row.joules_per_sample is None else f"{1000 * row.joules_per_sample:,.2f} mJ/sample",
        DASH if price is None or not priced else f"{price:,.3f} per million",
        row.execution,
    ]


def notes_of(found: HardwareTable) -> list[str]:
    """What the tables mean, and what is in none of them."""
    return list(_notes(found))


def _notes(found: HardwareTable) -> Iterator[str]:
    yield (
        "Speedup is over the slowest hardware of the same work; of several executions the fastest stands for each. "
        "An interval (95 %, Welch) needs two runs on either side."
    )
    yield (
        "Fixed is what does not grow with the samples: start-up, setting up, evaluation, accounting; memory is the "
        "largest of one rank; energy and price are of the training."
    )
    if found.left_out:
        counts = ", ".join(f"{number} {reason}" for reason, number in sorted(found.left_out.items()))
        yield f"Left out: {counts}."


def render_hardware(found: HardwareTable) -> str:
    """The page as HTML."""
    parts = [
        tag("header", join([tag("h1", text("Hardware")), paragraph(f"{found.num_runs} runs")])),
        section("What do the numbers mean?", bullets(notes_of(found))),
    ]
    for work in found.tables:
        pictures = [Html(svg_text(figure, name)) for name, figure in draw_hardware(work).items()]
        parts.append(
            section(
                work.work,
                table(HEAD, rows_of(work)),
                columns(*pictures),
                bullets([one.sentence for one in work.break_evens]),
            )
        )
    return redact(page("Hardware", join(parts)))


def draw_hardware(work: WorkTable) -> dict[str, Figure]:
    """Pictures by name; none of one row."""
    if len(work.rows) < 2:  # noqa: PLR2004  there is nothing to hold it against
        return {}
    ratios = {row.label: (row.speedup, row.low, row.high) for row in work.rows}
    return {"speedups": draw_ratios(ratios, work.rows[0].label, "times the slowest", "Throughput of the same work")}


def render_compare(comparison: Comparison) -> str:
    """The page as HTML."""
    base = comparison.runs[0]
    head, rows = compare_table(comparison)
    svgs = [Html(svg_text(figure, name)) for name, figure in draw_compare(comparison).items()]
    settings = [(name, *values) for name, values in comparison.differing.items()]
    body = join(
        [
            tag("header", join([tag("h1", text(f"{len(comparison.runs)} runs compared")), paragraph(base.run_id)])),
            section("How much faster?", table(["", *head[1:]], rows), columns(*svgs)),
            section("Compared with what?", bullets([f"`{base.label}` is the base.", *compare_notes(comparison)])),
            section(
                "What differs?",
                table(["", *(row.label for row in comparison.runs)], settings)
                if settings
                else paragraph("Nothing that is known of the runs: same data, workload, execution, code and versions."),
            ),
        ]
    )
    return redact(page(f"{len(comparison.runs)} runs compared", body))


def draw_compare(comparison: Comparison) -> dict[str, Figure]:
    """Pictures by name; none where nothing could be divided."""
    shown = [row for row in comparison.runs if row.ratio is not None or row.is_base]
    if len(shown) < 2:  # noqa: PLR2004  a base and one run
        return {}
    ratios = {row.label: (1.0 if row.ratio is None else row.ratio, None, None) for row in shown}
    base = next(row.label for row in shown if row.is_base)
    return {
        "ratios": draw_ratios(ratios, base, "times the first run; one run each", "Throughput against the first run")
    }
