"""Pages of the reports: Jinja2 templates with one stylesheet, and the filters that format numbers in them."""

import json
import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from paceline.tasks.formatting import DASH, format_interval, number_text, seconds_text
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.redact import redact
from paceline.tasks.report.plotting import svg_text

_INTERVAL = re.compile(r"\[(\S+), (\S+)\]")


def render_page(template: str, figures: Mapping[str, Figure], **context: object) -> str:
    """Render a template, named without `.html.j2`, as a page without credentials; figures are `svgs[name]` in it."""
    # The label describes a picture for those who cannot see it.
    labels = {name: str(figure.get_label() or name.replace("_", " ")) for name, figure in figures.items()}
    svgs = {name: Markup(svg_text(figure, labels[name])) for name, figure in figures.items()}
    return redact(_environment().get_template(f"{template}.html.j2").render(svgs=svgs, **context))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: DASH if value is None else value,
    )
    environment.filters |= {
        "interval": interval_text,
        "json": partial(json.dumps, indent=2, default=str),
        "number": number_text,
        "seconds": seconds_text,
        "short_ids": lambda run_ids: ", ".join(run_id[:8] for run_id in run_ids),
        # An interval does not break at the end of a line.
        "unbroken": lambda value: None if value is None else _INTERVAL.sub("[\\1,\N{NO-BREAK SPACE}\\2]", str(value)),
        "upper_first": upper_first,
    }
    return environment


def interval_text(interval: Interval | None, form: str = ".2f") -> str:
    """Format an estimate with its interval; a dash for unknown."""
    return DASH if interval is None else format_interval(interval.value, interval.low, interval.high, form=form)


def upper_first(text: str) -> str:
    """Start a sentence with a capital letter, and leave the rest as it is."""
    return text[:1].upper() + text[1:]
