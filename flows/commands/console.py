"""Arguments and output of the commands: people read stderr, programs read the last line of stdout."""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TextIO

from paceline.conf.environment import Environment
from paceline.conf.hints import fault_and_hint
from paceline.tasks.errors import InputError
from paceline.tasks.redact import redact, redact_tree

Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and options for `ArgumentParser.add_argument`
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Command(NamedTuple):
    """A command of the program."""

    name: str
    sentence: str
    examples: tuple[str, str]
    arguments: tuple[Argument, ...]
    execute: Callable[[Namespace], int | None]
    own_help: bool  # it has an option --help of its own


_output = SimpleNamespace(quiet=False, answered=False)  # answered: the line of JSON has been written


def start_output(*, quiet: bool) -> None:
    """Start the output of a call of the program; a quiet one says nothing but errors on stderr."""
    _output.quiet, _output.answered = quiet, False


def command(
    examples: tuple[str, str], *arguments: Argument, own_help: bool = False
) -> Callable[[Callable[[Namespace], int | None]], Command]:
    """Make a function a command of its name, whose docstring is the help; it may return an exit status."""

    def declare(execute: Callable[[Namespace], int | None]) -> Command:
        name, sentence = execute.__name__.replace("_", "-"), execute.__doc__ or ""
        return Command(name, sentence, examples, arguments, execute, own_help)

    return declare


def argument(form: str, help_text: str, **options: Any) -> Argument:
    """Declare an argument as a usage line has it: `-o --output FILE`, `--axis A,B ...` to repeat, `--ladder` to switch.

    A positional one has its attribute and its name: `run RUN_ID`. `options` are those of `ArgumentParser.add_argument`.
    """
    names, options["help"] = form.split(), help_text
    is_positional = not form.startswith("-")
    if names[-1] == "...":
        names.pop()
        options |= {"nargs": "*"} if is_positional else {"action": "append", "default": []}
    if len(names) > 1 and not names[-1].startswith("-"):
        options["metavar"] = names.pop()
    elif not is_positional and "choices" not in options:
        options["action"] = "store_true"
    return tuple(names), options


JSON = argument("--json", "end stdout with the outcome as one line of JSON")


def preset(*, resume: str | None = None) -> tuple[Argument, ...]:
    """Declare the preset, its overrides and `--json`; with help on `resume` also `--resume`, instead of a preset."""
    return (
        argument("preset", "a preset (list them: paceline presets) or a YAML file", nargs="?" if resume else None),
        argument("overrides key=value ...", "settings that differ from the preset's (list them: paceline settings)"),
        *([argument("--resume RUN_ID", resume)] if resume else []),
        JSON,
    )


def require(options: Namespace, *names: str) -> None:
    """Raise InputError for a missing argument, which `--resume` would make needless."""
    for name in names:
        if getattr(options, name.removeprefix("--")) is None:
            fault = f"{options.parser.prog} needs {'a preset' if name == 'preset' else name}"
            raise InputError(fault, hint=f"for example: {options.parser.example}", setting=name)


def say(line: str) -> None:
    """Print a line on stderr, unless `--quiet` was given."""
    if not _output.quiet:
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
    if as_json and not _output.answered:
        with suppress(BrokenPipeError):
            write_json(sys.stdout, {"error": fault, "hint": hint, "setting": getattr(error, "setting", None)})


def say_pairs(*rows: tuple[str, str]) -> None:
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
        fault = f"--html {path} cannot be written ({error.strerror})"
        raise InputError(f"{fault}; name a file in a directory that you own") from error


def write_json(stream: TextIO | None, outcome: dict[str, Any]) -> None:
    """Print the outcome on one line, if there is a stream for it."""
    if stream is not None:
        print(json.dumps(redact_tree(outcome)), file=stream, flush=True)
        _output.answered = True
