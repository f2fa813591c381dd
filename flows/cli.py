"""The program `paceline`. Imports the engines only once a command has been understood, so that help is quick."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import select
import signal
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from paceline.conf.environment import quieten
from paceline.conf.load import ConfigError
from paceline.flows.commands import (
    advise,
    classify,
    compare,
    doctor,
    features,
    hardware,
    no_gpu,
    predict,
    run,
    serve,
    study,
    sweep,
    ui,
)
from paceline.flows.commands.console import say
from paceline.flows.lifecycle import signals as interrupt
from paceline.tasks.errors import InputError, PacelineError, RankError
from paceline.tasks.redact import redact_logs

DONE, FAILED, WRONG_INPUT, SIGNALLED = 0, 1, 2, 128
COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "study": study,
    "sweep": sweep,
    "predict": predict,
    "features": features,
    "classify": classify,
    "advise": advise,
    "compare": compare,
    "hardware": hardware,
    "no-gpu": no_gpu,
    "serve": serve,
    "doctor": doctor,
    "ui": ui,
}
OWN_HELP = ("run",)
"""Commands whose help also shows every setting as it would be here."""


def program() -> NoReturn:
    """The process `paceline`: runs the command that it was called with, and exits."""
    status = FAILED

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.flush()
        os._exit(status)

    # Called last, when all libraries have put away what they had; the interpreter would go on to take its thousands of
    # modules apart, one by one, for two seconds.
    atexit.register(leave)
    gc.disable()  # until a flow begins: looking for garbage among what is imported takes a quarter of the time
    try:
        status = main()
    except SystemExit as wish:  # argparse's, after a help
        status = wish.code if isinstance(wish.code, int) else FAILED
    sys.exit(status)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 failed, 2 the input is wrong, 128 + n ended by signal n."""
    quieten()
    redact_logs()
    interrupt.listen()
    try:
        status = _execute(arguments)
    except BaseException:
        if interrupt.received_signal() is None:
            raise
        status = FAILED
    if status == FAILED and (number := interrupt.received_signal()) is not None:
        say("paceline: interrupted")
        status = SIGNALLED + number
    return status


def _execute(arguments: list[str] | None) -> int:
    try:
        options = _parse(arguments)
        options.command(options)
    except (ConfigError, InputError) as error:
        say(f"paceline: {error}")
        return WRONG_INPUT
    except RankError as error:
        say(f"paceline: {error}")
        say(error.rank_traceback.rstrip())
        return FAILED
    except PacelineError as error:
        say(f"paceline: {error}")
        return FAILED
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return SIGNALLED + signal.SIGPIPE
    return DONE


def _reader_has_left() -> bool:
    """Whether whoever read stdout has had enough of it, as `head` does; else another pipe broke."""
    look = select.poll()
    look.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in look.poll(0))


class _Parser(argparse.ArgumentParser):
    """Tells a wrong command line like any other wrong input, on one line; no option has a shorter name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise InputError(f"{message}; see {self.prog} --help")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options, wherever they stand among the overrides."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    if unknown or (rest and "overrides" not in options):
        parser.error(f"unrecognized argument {(unknown or rest)[0]}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="paceline", description="Training pipelines that account for their own speed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        sentence = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        command = commands.add_parser(name, help=module.HELP, description=sentence, add_help=name not in OWN_HELP)
        module.add_arguments(command)
        command.set_defaults(command=module.main, parser=command)
    return parser


if __name__ == "__main__":
    program()
