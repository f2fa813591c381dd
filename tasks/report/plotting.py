"""How pictures look and how they become bytes: one palette, one figure size, PNG and SVG.

A shared leaf for the stages that draw. Uses matplotlib's object interface only: no pyplot, no global state, no display.
Knows nothing of what is drawn.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import warnings
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common form of colour blindness (https://jfly.uni-koeln.de/color/).
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
GREY = "#8a94a0"
# Roles rather than colours: `svg_text` turns these into CSS variables so that a page can darken them.
INK = "#1b2530"
FAINT = "#d5dbe1"
PAPER = "#fefefe"
WHITE = "#ffffff"  # stays white on a dark page, for text on a filled cell
_ROLES: dict[str, str] = {INK: "--ink", FAINT: "--line", PAPER: "--paper", BLUE: "--accent", GREY: "--quiet"}

WIDTH_INCHES = 4.6
"""At 96 CSS pixels per inch a little over a phone's width, so that text keeps its size there."""
FONT_POINTS = 9.5


def new_figure(height_inches: float, num_rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with `num_rows` plain axes above each other."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(num_rows, 1, row + 1) for row in range(num_rows)]
    for axis in axes:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(FAINT)
        axis.tick_params(colors=INK, labelsize=FONT_POINTS, length=0)
        axis.set_axisbelow(True)
    return figure, axes


def new_grid(num_rows: int, num_columns: int, inches: float = 1.1) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of square axes for pictures, by row and column."""
    figure = Figure(figsize=(num_columns * inches, 0.25 + num_rows * inches), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = [
        [figure.add_subplot(num_rows, num_columns, row * num_columns + column + 1) for column in range(num_columns)]
        for row in range(num_rows)
    ]
    for axis in (axis for row in axes for axis in row):
        axis.set_axis_off()
    return figure, axes


def set_title(axis: Axes, text: str) -> None:
    """A left-aligned heading; of a figure's only axes it begins at the figure's edge, whatever the labels' width."""
    looks: dict[str, Any] = {"fontsize": FONT_POINTS + 1, "fontweight": "bold", "color": INK, "parse_math": False}
    figure = axis.get_figure(root=True)
    if figure is not None and len(figure.axes) == 1:
        figure.suptitle(text, x=0.01, ha="left", **looks)
    else:
        axis.set_title(text, loc="left", **looks)


def break_name(name: str, length: int) -> str:
    """A name of several comma-separated parts with each on a line of its own, shortened to `length` characters."""
    return ",\n".join(shorten(part, length) for part in name.split(", "))


def shorten(text: str, length: int) -> str:
    """At most `length` characters, with an ellipsis where some are left out."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def png_bytes(figure: Figure, dots_per_inch: int = 200) -> bytes:
    """The figure as a PNG file."""
    return _saved(figure, "png", dots_per_inch)


def svg_text(figure: Figure, label: str) -> str:
    """The figure as an <svg> element for a page: text as paths, sizes from the page, the palette as CSS variables.

    Args:
        figure: What to draw.
        label: What it shows, for those who cannot see it; plain text.
    """
    text = _saved(figure, "svg", 72).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg role="img" \1>', text, count=1)
    text = _unique_ids(text, hashlib.sha256(label.encode()).hexdigest()[:6])
    for colour, variable in _ROLES.items():
        text = text.replace(colour, f"var({variable}, {colour})")
    return text.replace(">", f">\n<title>{html.escape(label)}</title>", 1)


def _unique_ids(text: str, prefix: str) -> str:
    """Keep only ids that something refers to, renamed: equal in every drawing, different within a page."""
    used = dict.fromkeys(match[2] for match in _REFERENCE.finditer(text))
    names = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{names[match[1]]}"' if match[1] in names else "", text)
    return _REFERENCE.sub(lambda match: f"{match[1]}{names[match[2]]}", text)


_REFERENCE = re.compile(r"""(href="#|url\(#)([\w-]+)""")


def _saved(figure: Figure, kind: str, dots_per_inch: int) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with warnings.catch_warnings():
        # A class name in a script that the bundled font lacks is drawn as boxes; the report has it as text too.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=kind, dpi=dots_per_inch, metadata=metadata)
    return buffer.getvalue()
