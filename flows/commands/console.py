"""Arguments and output of the commands: people read stderr, programs read the last line of stdout."""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline.conf.environment import Environment
from paceline.conf.hints import fault_and_hint
from paceline.tasks.errors import InputError
from paceline.tasks.redact import redact, redact_tree

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Argument(NamedTuple):
    """The parameters of `ArgumentParser.add_argument`."""

    names: tuple[str, ...]
    options: dict[str, Any]


class Command(NamedTuple):
    """A command of the program."""

    help: str
    examples: tuple[str, str]
    arguments: tuple[Argument, ...]
    execute: Callable[[Namespace], None]
    settings: bool = False  # whether its help lists the most common settings


class _Output:
    quiet = False
    """Print results and errors only where a program reads them, and errors."""
    answered = False
    """Whether the line of JSON has been written."""


def start_output(*, quiet: bool) -> None:
    """Start the output of a call of the program."""
    _Output.quiet, _Output.answered = quiet, False


def argument(*names: str, **options: Any) -> Argument:
    """Declare an argument of a command, as for `ArgumentParser.add_argument`."""
    return Argument(names, options)


def overrides(help_text: str) -> Argument:
    """Declare the `key=value` arguments of a command."""
    return argument("overrides", nargs="*", metavar="key=value", help=help_text)


JSON = argument("--json", action="store_true", help="end stdout with the outcome as one line of JSON")


def preset(*, resume: str | None = None) -> tuple[Argument, ...]:
    """Declare the preset, its overrides and `--json`; with help on `resume` also `--resume`, instead of a preset."""
    return (
        argument("preset", nargs="?" if resume else None, help="a preset (list them: paceline presets) or a YAML file"),
        overrides("settings that differ from the preset's (list them: paceline settings)"),
        *([argument("--resume", metavar="RUN_ID", help=resume)] if resume else []),
        JSON,
    )


def require(options: Namespace, *names: str) -> None:
    """Raise InputError for a missing argument, which `--resume` would make needless."""
    for name in names:
        if getattr(options, name.removeprefix("--")) is None:
            raise InputError(
                f"{options.parser.prog} needs {'a preset' if name == 'preset' else name}",
                hint=f"for example: {options.parser.example}",
                setting=name,
            )


def say(line: str) -> None:
    """Print a line on stderr, unless `--quiet` was given."""
    if not _Output.quiet:
        say_always(line)


def say_always(line: str) -> None:
    """Print a line on stderr; names from outside, of classes and files, cannot steer the terminal."""
    print(redact(line).translate(CONTROLS), file=sys.stderr, flush=True)


def say_error(error: Exception, *, as_json: bool) -> None:
    """Print an error as two lines, the fault and one action; with `--json` also as JSON on stdout."""
    fault, hint = fault_and_hint(error)
    say_always(f"error: {fault}")
    if hint:
        say_always(f"hint: {hint}")
    if as_json and not _Output.answered:
        with suppress(BrokenPipeError):
            write_json(sys.stdout, {"error": fault, "hint": hint, "setting": getattr(error, "setting", None)})


def say_pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other."""
    width = max((len(name) for name, _ in rows), default=0)
    say("")
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def say_table(head: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> None:
    """Print a table, as wide as its cells, and notes below it."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
    say("")
    for row in (head, *rows):
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in ["", *notes] if notes else ():
        say(note)


def run_location(run_id: str, experiment: str) -> str:
    """The place of an MLflow run, and how to look at it."""
    uri = Environment().tracking_uri
    program = "paceline" if shutil.which("paceline") else os.path.relpath(sys.argv[0])
    way = f"it is on {uri}" if uri.startswith("http") else f"see it with: {program} ui {run_id}"
    return f"{run_id} in experiment {experiment}; {way}"


@contextmanager
def json_stream(wanted: bool) -> Iterator[TextIO | None]:
    """The real stdout, while output of engines and their child processes goes to stderr."""
    if not wanted:
        yield None
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def write_page(path: Path, html: str) -> None:
    """Write a page to the file of `--html`; raise InputError if that fails."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--html {path} cannot be written ({error.strerror}); name a file in a directory that you own"
        ) from error


def write_json(stream: TextIO | None, outcome: dict[str, Any]) -> None:
    """Print the outcome on one line, if there is a stream for it."""
    if stream is not None:
        print(json.dumps(redact_tree(outcome)), file=stream, flush=True)
        _Output.answered = True
