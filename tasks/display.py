"""Progress bars on stderr for people at a terminal; nothing for logs, pipes and `--json`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int, str], None]
"""Takes what is done, the total, and a note."""


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Yield a function that moves a bar; it does nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=None, note="")
        yield lambda done, total, note: progress.update(bar, completed=done, total=total, note=note)
