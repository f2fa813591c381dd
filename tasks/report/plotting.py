"""Palette, size and shared elements of the reports' pictures, by matplotlib's object interface: no global state."""

import hashlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ with every common form of colour blindness (https://jfly.uni-koeln.de/color/).
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

WIDTH_INCHES = 4.6  # at 96 CSS pixels per inch a little over a phone's width, so that text has its size there
FONT_POINTS = 9.5
DASHED: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (3, 3))}
"""A line to compare with, such as a ratio of 1."""
IDEAL: dict[str, Any] = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 3))}
MAX_NAME = 30  # characters of a line of a name
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": FONT_POINTS - 1, "labelcolor": INK}


def new_figure(height_inches: float, *titles: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with plain axes above each other, one for each left-aligned heading; one without a heading."""
    figure = _empty_figure(WIDTH_INCHES, height_inches)
    num_rows = max(1, len(titles))
    axes = [figure.add_subplot(num_rows, 1, row + 1) for row in range(num_rows)]
    for axis in axes:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(FAINT)
        axis.tick_params(colors=INK, labelsize=FONT_POINTS, length=0)
        for side in (axis.xaxis, axis.yaxis):
            side.label.set(fontsize=FONT_POINTS, color=INK)
        axis.set_axisbelow(True)
    looks: dict[str, Any] = {"fontsize": FONT_POINTS + 1, "fontweight": "bold", "color": INK, "parse_math": False}
    if len(titles) == 1:  # a heading that starts at the figure's edge
        figure.suptitle(titles[0], x=0.01, ha="left", **looks)
    else:
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(title, loc="left", **looks)
    return figure, axes


def new_grid(num_rows: int, num_columns: int, inches: float = 1.1) -> tuple[Figure, list[list[Axes]]]:
    """Make a figure of square axes for pictures, by row and column."""
    figure = _empty_figure(num_columns * inches, 0.25 + num_rows * inches)
    starts = range(1, num_rows * num_columns + 1, num_columns)
    axes = [
        [figure.add_subplot(num_rows, num_columns, start + column) for column in range(num_columns)] for start in starts
    ]
    for axis in figure.axes:
        axis.set_axis_off()
    return figure, axes


def _empty_figure(width_inches: float, height_inches: float) -> Figure:
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def add_text(axis: Axes, x: float, y: float, text: str, **looks: Any) -> None:
    """Write plain text, vertically centred."""
    defaults: dict[str, Any] = {"va": "center", "fontsize": FONT_POINTS, "color": INK, "parse_math": False}
    axis.text(x, y, text, **defaults | looks)


def draw_bars(axis: Axes, names: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> None:
    """Draw named horizontal bars from the top down, each with its text at its end, without an x axis."""
    places = range(len(values))[::-1]
    axis.barh(places, values, height=0.64, color=BLUE)
    for place, value, text in zip(places, values, texts, strict=True):
        add_text(axis, value, place, f" {text}")
    axis.set_yticks(places, names, parse_math=False)
    hide_x_axis(axis)


def draw_ratios(
    ratios: Mapping[str, tuple[float, float | None, float | None]], base: str, unit: str, title: str
) -> Figure:
    """Draw bars from the top down, each with its number and, where it is known, its interval; a line at 1."""
    names = [break_name(name, MAX_NAME) for name in ratios]
    lines = max(name.count("\n") + 1 for name in names)
    figure, (axis,) = new_figure(0.9 + (0.2 + 0.17 * lines) * len(ratios), title)
    places = range(len(ratios))[::-1]
    colours = [GREY if name == base else BLUE for name in ratios]
    axis.barh(places, [ratio for ratio, _, _ in ratios.values()], height=0.55, color=colours)
    ends = [max(ratio, high or ratio) for ratio, _, high in ratios.values()]
    for place, end, (ratio, low, high) in zip(places, ends, ratios.values(), strict=True):
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=INK, linewidth=1.0)
        add_text(axis, end, place, f" {ratio:.2f}", fontsize=FONT_POINTS - 1)
    axis.axvline(1.0, **DASHED)
    axis.set_yticks(places, names, parse_math=False)
    axis.set_xlim(0, 1.12 * max(ends))
    axis.set_xlabel(unit, loc="right")
    return figure


def hide_x_axis(axis: Axes) -> None:
    """Remove ticks and line of an axis whose values are written into the picture."""
    axis.set_xticks([])
    axis.spines[["bottom"]].set_visible(False)


def break_name(name: str, length: int) -> str:
    """Put each part of a comma-separated name on its own line, shortened to `length` characters."""
    return ",\n".join(shorten(part, length) for part in name.split(", "))


def shorten(text: str, length: int) -> str:
    """Cut text to at most `length` characters, with an ellipsis where some are left out."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def png_bytes(figure: Figure, dots_per_inch: int = 200) -> bytes:
    """Write the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.set_dpi(dots_per_inch)
    canvas: Any = FigureCanvasAgg(figure)
    with _without_font_warnings():  # `savefig` would draw everything twice, for a layout that is the same
        canvas.print_png(buffer, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def svg_text(figure: Figure, label: str) -> str:
    """Write the figure as an <svg> element: text as paths, sizes from the page, the palette as CSS variables."""
    buffer = io.BytesIO()
    canvas: Any = FigureCanvasSVG(figure)
    with _without_font_warnings():
        canvas.print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg role="img" \1>', text, count=1)
    text = _rename_ids(text, hashlib.sha256(label.encode()).hexdigest()[:6])
    for colour, variable in _ROLES.items():
        text = text.replace(colour, f"var({variable}, {colour})")
    return text.replace(">", f">\n<title>{html.escape(label)}</title>", 1)


def _rename_ids(text: str, prefix: str) -> str:
    """Remove ids that nothing refers to and rename the others: equal in every drawing, different within a page."""
    used = dict.fromkeys(match[2] for match in _REFERENCE.finditer(text))
    names = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{names[match[1]]}"' if match[1] in names else "", text)
    return _REFERENCE.sub(lambda match: f"{match[1]}{names[match[2]]}", text)


_REFERENCE = re.compile(r"""(href="#|url\(#)([\w-]+)""")


@contextmanager
def _without_font_warnings() -> Iterator[None]:
    """A class name in a script that the bundled font lacks is drawn as boxes; the report has it as text too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
