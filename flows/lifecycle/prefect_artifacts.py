"""Markdown of Prefect artifacts, with escaped names of classes, files and runs."""

import html
import re
from collections.abc import Iterable, Sequence

from prefect.artifacts import create_markdown_artifact

from paceline.flows.lifecycle.outage import report

_SPECIAL = re.compile(r"([\\`|\[\]])")


def plain(value: object) -> str:
    """Escape markup, links, code and line ends."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(str(value).split()), quote=False))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([plain(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def publish(rows: list[tuple[str, str]], key: str, description: str) -> None:
    """Show a short table with the flow run in the Prefect UI."""
    report(create_markdown_artifact, key=key, markdown=table(("", ""), rows), description=description)
