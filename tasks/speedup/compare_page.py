"""The page of a comparison: what each run gave against the first, compared with what, and where they differ."""

from __future__ import annotations

from matplotlib.figure import Figure

from tasks.report.plotting import svg_text
from tasks.redact import redact
from tasks.report.run_charts import draw_ratios
from tasks.speedup.compare import Comparison, compare_notes, compare_table
from tasks.report.html import Html, bullets, columns, join, page, paragraph, section, table, tag, text


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
