"""The program `paceline`. Imports the engines only after it has parsed the command, so that help is quick."""

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
from importlib import metadata
from typing import Any, NoReturn

from paceline.conf.environment import quieten, set_verbosity
from paceline.conf.hints import HintedError, did_you_mean, suggest, suggest_setting
from paceline.conf.load import field_paths
from paceline.flows.commands import (
    advise,
    bisect,
    compare,
    evidence,
    judge,
    lookup,
    operations,
    predict,
    run,
    serve,
    study,
    sweep,
    watch,
)
from paceline.flows.commands.console import Command, say_always, say_error, start_output
from paceline.flows.lifecycle import next_pool
from paceline.flows.lifecycle import signals as interrupt
from paceline.tasks import log_lines
from paceline.tasks.errors import InputError, PacelineError, RankError
from paceline.tasks.redact import redact_logs

DONE, FAILED, WRONG_INPUT, SIGNALLED = 0, 1, 2, 128
GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (run.run, sweep.sweep),
    "Measure": (
        watch.watch,
        judge.judge,
        bisect.bisect,
        study.study,
        advise.advise,
        compare.compare,
        compare.hardware,
        evidence.evidence,
        study.no_gpu,
    ),
    "Use": (predict.predict, predict.features, predict.classify),
    "Operate": (serve.serve, operations.clean, operations.doctor, operations.metrics, operations.ui),
    "Look up": (lookup.presets, lookup.settings, lookup.schema, lookup.completion),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
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
  --log-format F   text (default), or json: every line on stderr and in the logs of ranks is one JSON object
"""


def program() -> NoReturn:
    """Run a command as the process `paceline`, and exit."""
    status = FAILED

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.flush()
        try:
            next_pool.start_next()
        finally:
            os._exit(status)

    # Called last, after the libraries' own exit functions; the interpreter would unload thousands of modules for two
    # seconds.
    atexit.register(leave)
    gc.disable()  # until a flow starts: collecting garbage among the imported objects takes a quarter of the time
    try:
        status = main()
    except SystemExit as end:  # argparse's, after a help
        status = end.code if isinstance(end.code, int) else FAILED
    sys.exit(status)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status: 0 done or its own, 1 failed, 2 the input is wrong, 128 + n ended by signal n."""
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
    words = sys.argv[1:] if arguments is None else arguments
    as_json, verbose = "--json" in words, False
    if log_lines.is_json() or re.search("(^| )--log-format[= ]json( |$)", " ".join(words)):
        set_verbosity(quiet=False, verbose=False, as_json=True)
        log_lines.convert(2)
    try:
        options = _parse(arguments)
        verbose = options.verbose
        start_output(quiet=options.quiet)
        set_verbosity(quiet=options.quiet, verbose=verbose)
        status: int | None = options.command(options)
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(sys.stdout.fileno(), select.POLLOUT)
        if not any(events & select.POLLERR for _, events in stdout.poll(0)):  # another pipe broke
            raise
        return SIGNALLED + signal.SIGPIPE  # the reader, such as `head`, has ended
    except HintedError as error:
        say_error(error, as_json=as_json)
        if isinstance(error, RankError):
            say_always(error.rank_traceback.rstrip())
        if verbose:
            say_always("".join(traceback.format_exception(error)).rstrip())
        return FAILED if isinstance(error, PacelineError) and not isinstance(error, InputError) else WRONG_INPUT
    return status or DONE


class _Parser(argparse.ArgumentParser):
    """Report a wrong command line as any other wrong input. Options cannot be abbreviated."""

    example = "paceline run digits"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        # Suppressed, so that a command does not overrule what stands before its name.
        switch: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
        self.add_argument("-q", "--quiet", help="print errors only", **switch)
        self.add_argument("-v", "--verbose", help="print debug messages, and tracebacks of errors", **switch)
        formats, text = ("text", "json"), "format of stderr and of the logs of ranks (default: text)"
        self.add_argument("--log-format", help=text, choices=formats, default=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        hint, setting = f"{self.prog} --help", None
        required = re.fullmatch(r"the following arguments are required: (.*)", message)
        wrong_type = re.fullmatch(r"argument (\S*?/?)([^/\s]+): invalid (\w+) value: '(.*)'", message)
        if required:
            names = [name for name in required[1].split(", ") if name not in ("key=value", "ARGS")]
            message, hint = f"{self.prog} needs {' and '.join(names)}", f"for example: {self.example}"
            setting = names[0]
        elif wrong_type:
            kind = {"int": "a whole number", "float": "a number"}.get(wrong_type[3], f"a {wrong_type[3]}")
            message = f"{wrong_type[2]} must be {kind}, got {wrong_type[4]}"
        raise InputError(message, hint=hint, setting=setting)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(action.choices or ())
        if not choices or value in choices:
            return
        near = suggest(str(value), choices)
        if not action.option_strings:
            raise InputError(f"unknown command {value}", hint=did_you_mean(near, "paceline --help"), setting="command")
        option, listed = action.option_strings[-1], f"choices: {', '.join(choices)}"
        hint = f"did you mean {near}? {listed.capitalize()}" if near else listed
        raise InputError(f"{option} {value} is not valid", hint=hint, setting=option)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options, wherever they stand among the overrides."""
    root = _parser()
    has_dashes = "--" in (sys.argv if arguments is None else arguments)
    defaults = argparse.Namespace(quiet=False, verbose=False, log_format="text", has_dashes=has_dashes)
    options, overrides = root.parse_known_args(arguments, defaults)
    parser: argparse.ArgumentParser = getattr(options, "parser", root)
    unknown = [argument for argument in overrides if argument.startswith("-") or "=" not in argument]
    if unknown or (overrides and "overrides" not in options):
        argument = (unknown or overrides)[0]
        name = argument.partition("=")[0]
        hint = f"{parser.prog} --help"
        if name.startswith("--"):
            near = suggest(name, [option for action in parser._actions for option in action.option_strings])
            setting = suggest_setting(name.lstrip("-"), field_paths())
            hint = did_you_mean(near or (f"the setting {setting}=VALUE" if setting else None), hint)
        raise InputError(f"{parser.prog} has no argument {argument}", hint=hint, setting=name)
    if options.version:
        options.command = lambda _: print(f"paceline {metadata.version('paceline')}")
    elif "command" not in options:
        options.command = lambda _: root.print_help()
    if overrides:
        options.overrides += overrides
    return options


class _RootParser(_Parser):
    """The parser of `paceline` without a command, whose help shows the commands in groups."""

    def format_help(self) -> str:
        lines = [HEAD]
        for group, commands in GROUPS.items():
            helps = ((command.name, command.sentence.removesuffix(".")) for command in commands)
            lines += [f"{group}:", *(f"  {name:<12}{text[:1].lower()}{text[1:]}" for name, text in helps)]
        return "\n".join(lines) + "\n" + TAIL


def _parser() -> argparse.ArgumentParser:
    parser = _RootParser(prog="paceline")
    parser.add_argument("-V", "--version", action="store_true")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        epilog = "\n  ".join(("Examples:", *command.examples))
        child = commands.add_parser(name, description=command.sentence, epilog=epilog, add_help=not command.own_help)
        child.example = command.examples[0]
        for names, options in command.arguments:
            child.add_argument(*names, **options)
        child.set_defaults(command=command.execute, parser=child, root=parser)
    return parser


if __name__ == "__main__":
    program()
