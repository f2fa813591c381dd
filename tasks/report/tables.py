"""Reports that put runs next to each other: the hardware table, and the comparison with the first run."""

from matplotlib.figure import Figure

from paceline.tasks.formatting import format_interval, number_text, seconds_text
from paceline.tasks.report.page import render_page
from paceline.tasks.report.plotting import draw_ratios
from paceline.tasks.speedup.compare import Comparison, compare_notes, compare_table
from paceline.tasks.speedup.hardware_table import HardwareTable, WorkTable
from paceline.tasks.speedup.limit_share import format_share

HEAD = ("hardware", "samples/s", "of limit", "speedup", "runs", "fixed", "memory", "energy", "price", "execution")


def hardware_rows(work: WorkTable) -> list[list[str]]:
    """Make the rows below `HEAD`."""
    has_prices = any(row.price_per_million_samples for row in work.rows)
    return [
        [
            row.label,
            f"{row.samples_per_second:,.0f}",
            format_share(row.of_limit) + ("" if row.mfu is None else f", MFU {row.mfu:.0%}"),
            format_interval(row.speedup, row.low, row.high),
            str(row.num_runs),
            seconds_text(row.fixed_seconds),
            number_text(row.peak_memory_bytes and row.peak_memory_bytes / 2**30, ".2f", " GiB"),
            number_text(row.joules_per_sample and 1000 * row.joules_per_sample, ",.2f", " mJ/sample"),
            number_text(row.price_per_million_samples if has_prices else None, ",.3f", " per million"),
            row.execution,
        ]
        for row in work.rows
    ]


def hardware_notes(table: HardwareTable) -> list[str]:
    """Explain the tables, and what is in none of them."""
    notes = [
        "Speedup is over the slowest hardware of the same work; of several executions the fastest stands for each. "
        "An interval (95 %, Welch) needs two runs on either side.",
        "Of limit: floating-point operations per second of a training step over those of a matrix product on the same "
        "device. MFU: over the peak in the data sheet.",
        "Fixed is what does not grow with the samples: start-up, setting up, evaluation, accounting; memory is the "
        "largest of one rank; energy and price are of the training.",
    ]
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(table.left_out.items()))
    return [*notes, f"Left out: {counts}."] if counts else notes


def render_hardware(table: HardwareTable) -> str:
    """Render the page as HTML."""
    figures = {
        f"{name}-{number}": figure
        for number, work in enumerate(table.tables)
        for name, figure in draw_hardware(work).items()
    }
    works = [(work, hardware_rows(work), f"speedups-{number}") for number, work in enumerate(table.tables)]
    return render_page("hardware", figures, head=HEAD, hardware=table, notes=hardware_notes(table), works=works)


def draw_hardware(work: WorkTable) -> dict[str, Figure]:
    """Draw the speedups by name; nothing for one row."""
    if len(work.rows) < 2:  # noqa: PLR2004  a comparison needs two
        return {}
    ratios = {row.label: (row.speedup, row.low, row.high) for row in work.rows}
    return {"speedups": draw_ratios(ratios, work.rows[0].label, "times the slowest", "Throughput of the same work")}


def render_compare(comparison: Comparison) -> str:
    """Render the page as HTML."""
    head, rows = compare_table(comparison)
    return render_page(
        "compare",
        draw_compare(comparison),
        comparison=comparison,
        head=["", *head[1:]],
        rows=rows,
        notes=compare_notes(comparison),
        settings=[(name, *values) for name, values in comparison.differing.items()],
    )


def draw_compare(comparison: Comparison) -> dict[str, Figure]:
    """Draw the ratios by name; nothing where nothing could be divided."""
    shown = [row for row in comparison.runs if row.ratio is not None or row.is_base]
    if len(shown) < 2:  # noqa: PLR2004  a base and one run
        return {}
    ratios = {row.label: (1.0 if row.ratio is None else row.ratio, None, None) for row in shown}
    base = next(row.label for row in shown if row.is_base)
    return {
        "ratios": draw_ratios(ratios, base, "times the first run; one run each", "Throughput against the first run")
    }
