"""The program `paceline`. Imports the engines only once a command has been understood, so that help is quick."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from paceline.conf.environment import quieten, set_verbosity
from paceline.conf.hints import HintedError, did_you_mean, suggest, suggest_setting
from paceline.conf.load import field_paths
from paceline.flows.commands import (
    advise,
    classify,
    compare,
    doctor,
    hardware,
    lookup,
    no_gpu,
    predict,
    run,
    serve,
    study,
    sweep,
    ui,
)
from paceline.flows.commands.console import Command, say_always, say_error, start_output
from paceline.flows.lifecycle import signals as interrupt
from paceline.tasks.errors import InputError, PacelineError, RankError
from paceline.tasks.redact import redact_logs

DONE, FAILED, WRONG_INPUT, SIGNALLED = 0, 1, 2, 128
GROUPS: dict[str, dict[str, Command]] = {
    "Train": {"run": run.COMMAND, "sweep": sweep.COMMAND},
    "Measure": {
        "study": study.COMMAND,
        "advise": advise.COMMAND,
        "compare": compare.COMMAND,
        "hardware": hardware.COMMAND,
        "no-gpu": no_gpu.COMMAND,
    },
    "Use": {"predict": predict.COMMAND, "features": predict.FEATURES, "classify": classify.COMMAND},
    "Operate": {"serve": serve.COMMAND, "doctor": doctor.COMMAND, "ui": ui.COMMAND},
    "Look up": {"presets": lookup.PRESETS, "settings": lookup.SETTINGS, "completion": lookup.COMPLETION},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
HEAD = """Train image, audio and video models on one or many devices, and measure how much faster your settings make it.

Usage: paceline COMMAND [OPTIONS] [SETTING=VALUE]...

Start here:
  paceline run digits                 train on the built-in digits (about a minute, no data needed)
  paceline run folder data.root=DIR   train on your images, one folder per class
  paceline ui                         browse the results
"""
TAIL = """
Options:
  -h, --help       print this help; paceline COMMAND --help prints that of a command
  -V, --version    print the version
  -q, --quiet      print errors only
  -v, --verbose    print more: the engines' debug messages, and tracebacks of errors
"""


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
        say_always("error: interrupted")
        status = SIGNALLED + number
    return status


def _execute(arguments: list[str] | None) -> int:
    start_output(quiet=False)
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    verbose = False
    try:
        options = _parse(arguments)
        verbose = options.verbose
        start_output(quiet=options.quiet)
        set_verbosity(quiet=options.quiet, verbose=verbose)
        options.command(options)
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return SIGNALLED + signal.SIGPIPE
    except HintedError as error:
        say_error(error, as_json=as_json)
        if isinstance(error, RankError):
            say_always(error.rank_traceback.rstrip())
        if verbose:
            say_always("".join(traceback.format_exception(error)).rstrip())
        return FAILED if isinstance(error, PacelineError) and not isinstance(error, InputError) else WRONG_INPUT
    return DONE


def _reader_has_left() -> bool:
    """Whether whoever read stdout has had enough of it, as `head` does; else another pipe broke."""
    look = select.poll()
    look.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in look.poll(0))


class _Parser(argparse.ArgumentParser):
    """Report a wrong command line as any other wrong input; no option has a shorter name."""

    example = "paceline run digits"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        help_of = {"quiet": "print errors only", "verbose": "print debug messages, and tracebacks of errors"}
        for name, text in help_of.items():
            # Suppressed, so that a command does not overrule what stands before its name.
            self.add_argument(f"-{name[0]}", f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text)

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        hint, setting = f"{self.prog} --help", None
        required = re.fullmatch(r"the following arguments are required: (.*)", message)
        wrong_type = re.fullmatch(r"argument (\S*?/?)([^/\s]+): invalid (\w+) value: '(.*)'", message)
        if required:
            names = [name for name in required[1].split(", ") if name != "key=value"]
            message, hint = f"{self.prog} needs {' and '.join(names)}", f"for example: {self.example}"
            setting = names[0]
        elif wrong_type:
            kind = {"int": "a whole number", "float": "a number"}.get(wrong_type[3], f"a {wrong_type[3]}")
            message = f"{wrong_type[2]} must be {kind}, got {wrong_type[4]}"
        raise InputError(message, hint=hint, setting=setting)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [] if action.choices is None else list(action.choices)
        if not choices or value in choices:
            return
        near = suggest(str(value), choices)
        if action.option_strings:
            name = f"{action.option_strings[-1]} {value} is not valid"
            listed = f"choices: {', '.join(choices)}"
            hint = f"did you mean {near}? {listed.capitalize()}" if near else listed
            raise InputError(name, hint=hint, setting=action.option_strings[-1])
        raise InputError(f"unknown command {value}", hint=did_you_mean(near, "paceline --help"), setting="command")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options, wherever they stand among the overrides."""
    root = _parser()
    options, rest = root.parse_known_args(arguments, argparse.Namespace(quiet=False, verbose=False))
    parser: argparse.ArgumentParser = getattr(options, "parser", root)
    unknown = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    if unknown or (rest and "overrides" not in options):
        raise _unknown_argument(parser, (unknown or rest)[0])
    if options.version:
        options.command = _print_version
    elif "command" not in options:
        options.command = lambda _: root.print_help()
    if rest:
        options.overrides += rest
    return options


def _unknown_argument(parser: argparse.ArgumentParser, argument: str) -> InputError:
    name = argument.partition("=")[0]
    hint = f"{parser.prog} --help"
    if name.startswith("--"):
        known = [option for action in parser._actions for option in action.option_strings]
        near = suggest(name, known)
        setting = suggest_setting(name.lstrip("-"), field_paths())
        hint = did_you_mean(near or (f"the setting {setting}=VALUE" if setting else None), hint)
    return InputError(f"{parser.prog} has no argument {argument}", hint=hint, setting=name)


def _print_version(_: argparse.Namespace) -> None:
    from importlib.metadata import version

    print(f"paceline {version('paceline')}")


class _RootParser(_Parser):
    """The parser of `paceline` without a command, whose help shows the commands in groups."""

    def format_help(self) -> str:
        """The head, the groups and the options."""
        lines = [HEAD]
        for group, commands in GROUPS.items():
            lines += [f"{group}:", *(f"  {name:<12}{command.help}" for name, command in commands.items())]
        return "\n".join(lines) + "\n" + TAIL


def _parser() -> argparse.ArgumentParser:
    parser = _RootParser(prog="paceline")
    parser.add_argument("-V", "--version", action="store_true")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name, one in COMMANDS.items():
        sentence = f"{one.help[0].upper()}{one.help[1:]}."
        examples = "\n".join(f"  {example}" for example in one.examples)
        command = commands.add_parser(
            name, help=one.help, description=sentence, epilog=f"Examples:\n{examples}", add_help=not one.settings
        )
        command.example = one.examples[0]
        one.add_arguments(command)
        command.set_defaults(command=one.execute, parser=command, root=parser)
    return parser


if __name__ == "__main__":
    program()
