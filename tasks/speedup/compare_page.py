"""The page of a comparison: what each run gave against the first, compared with what, and where they differ."""

from __future__ import annotations

from matplotlib.figure import Figure

from tasks.figures import BLUE, FONT_POINTS, GREY, INK, break_name, new_figure, set_title, svg_text
from tasks.redact import redact
from tasks.speedup.compare import Comparison, compare_notes, compare_table
from tasks.speedup.page import Html, bullets, columns, join, page, paragraph, section, table, tag, text

MAX_NAME = 30


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
    names = [break_name(row.label, MAX_NAME) for row in shown]
    lines = max(name.count("\n") + 1 for name in names)
    figure, (axis,) = new_figure(0.9 + (0.2 + 0.17 * lines) * len(shown))
    places = range(len(shown))[::-1]
    values = [1.0 if row.ratio is None else row.ratio for row in shown]
    axis.barh(places, values, height=0.55, color=[GREY if row.is_base else BLUE for row in shown])
    for place, value in zip(places, values, strict=True):
        axis.text(value, place, f" {value:.2f}", va="center", fontsize=FONT_POINTS - 1, color=INK)
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_yticks(places, names, parse_math=False)
    axis.set_xlim(0, 1.12 * max(values))
    axis.set_xlabel("times the first run; one run each", fontsize=FONT_POINTS, color=INK, loc="right")
    set_title(axis, "Throughput against the first run")
    return {"ratios": figure}
