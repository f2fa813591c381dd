"""The program `paceline`. Imports the engines only once a command has been understood, so that help is quick."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from conf.load import ConfigError, apply, load, preset_names, validate
from conf.site import Site, quieten
from tasks.errors import InputError, PacelineError, RankError

if TYPE_CHECKING:
    from conf.schema import Config

DONE, FAILED, WRONG_INPUT = 0, 1, 2
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
# What may change when an unfinished run goes on: how it is run, never what is learned.
RESUMABLE_SECTIONS = ("execution.", "cluster.")
KEY_WIDTH = 30


class _Terminated(SystemExit):
    """SIGTERM, as an exception that lets everything be put away."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 failed while running, 2 the input is wrong."""
    quieten()
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        options = _parse(arguments)
        status: int = options.command(options)
    except (ConfigError, InputError) as error:
        _say(f"paceline: {error}")
        status = WRONG_INPUT
    except RankError as error:
        _say(f"paceline: {error}")
        _say(error.rank_traceback.rstrip())
        status = FAILED
    except PacelineError as error:
        _say(f"paceline: {error}")
        status = FAILED
    except KeyboardInterrupt:
        _say("paceline: interrupted")
        status = INTERRUPTED
    return status


def _on_sigterm(number: int, frame: object) -> None:
    raise _Terminated(TERMINATED)


class _Parser(argparse.ArgumentParser):
    """Tells a wrong command line like any other wrong input: on one line."""

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
    run = commands.add_parser(
        "run",
        help="prepare data, train, evaluate, and account for the speed of it",
        description="Prepare data, train, evaluate, and account for the speed of it.",
        add_help=False,
    )
    run.add_argument("preset", nargs="?", help=f"one of {', '.join(preset_names())}, or a YAML file")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the preset's")
    run.add_argument("--json", action="store_true", help="end stdout with the summary as one line of JSON")
    run.add_argument("--show", action="store_true", help="print the resolved configuration and stop")
    run.add_argument("--resume", metavar="RUN_ID", help="go on with an unfinished run from its newest checkpoint")
    run.add_argument("-h", "--help", action="store_true", help="print this help and every setting")
    run.set_defaults(command=_run, parser=run)
    ui = commands.add_parser("ui", help="open the MLflow UI on the runs of this machine")
    ui.add_argument("--port", type=int, default=5000, help="TCP port on loopback (default: 5000)")
    ui.set_defaults(command=_ui)
    return parser


def _run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    if options.help:
        return _help(options)
    if (options.preset is None) == (options.resume is None):
        if options.resume is None:
            raise InputError("paceline run needs a preset; one of " + ", ".join(preset_names()) + ", or a YAML file")
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    site = Site()
    config = _resumed(site, options) if options.resume else load(options.preset, options.overrides)
    if options.show:
        print(_describe(config))
        return DONE
    with _json_stream(options.json) as stream:
        summary = _execute(config, site, options.resume)
        summary["seconds"] = time.monotonic() - started
        _show(summary)
        if stream is not None:
            print(json.dumps(summary), file=stream, flush=True)
    return DONE


def _resumed(site: Site, options: argparse.Namespace) -> Config:
    from tasks.track import run as tracking

    _, tree = tracking.reopen(site.tracking_uri, options.resume)
    for override in options.overrides:
        if not override.startswith(RESUMABLE_SECTIONS):
            raise InputError(
                f"--resume {options.resume}: {override} would change what the run is; "
                f"only {' and '.join(section + '*' for section in RESUMABLE_SECTIONS)} may change"
            )
    before = validate(tree)
    for override in options.overrides:
        apply(tree, override)
    config = validate(tree)
    if config.global_batch_size != before.global_batch_size:
        raise InputError(
            f"--resume {options.resume}: the run has {before.global_batch_size} samples per step and would have "
            f"{config.global_batch_size}; keep execution.num_nodes x num_devices = {before.execution.world_size}"
        )
    return config


def _execute(config: Config, site: Site, resume: str | None) -> dict[str, Any]:
    from flows import preflight

    preflight.check(config, site)  # before the Prefect API is asked for: wrong input leaves no flow run behind
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.pipeline import run_pipeline

    # Heartbeats tell a server which runs are dead. On the temporary one nobody listens, and the flow
    # would wait a second for their thread at its end.
    unheard = {} if preflight.prefect_server(site) else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with temporary_settings(unheard):
        return run_pipeline(config, resume)


def _help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    preset = options.preset or "digits"
    config = load(preset, options.overrides)
    print(f"\nsettings, as paceline run {preset} would have them here:\n\n{_describe(config)}")
    return DONE


def _describe(config: Config) -> str:
    from flows.describe import describe

    return describe(config, KEY_WIDTH)


@contextmanager
def _json_stream(wanted: bool) -> Iterator[TextIO | None]:
    """The real stdout, while whatever engines and their child processes print there goes to stderr."""
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


def _show(summary: dict[str, Any]) -> None:
    from tasks.speedup.summary import summary_table

    rows = summary_table(summary)
    width = max(len(name) for name, _ in rows)
    _say("")
    for name, value in rows:
        _say(f"{name:<{width}}  {value}")
    _say(f"{'run':<{width}}  {summary['run_id']} in experiment {summary['experiment']}; see it with: {_program()} ui")


def _program() -> str:
    """How the user calls this program: by its name where that is found, else by its path."""
    return "paceline" if shutil.which("paceline") else os.path.relpath(sys.argv[0])


def _ui(options: argparse.Namespace) -> int:
    site = Site()
    if site.tracking_uri.startswith("http"):
        print(site.tracking_uri)
        return DONE
    if not site.tracking_uri_given and not (site.root / "mlflow.db").exists():
        raise InputError(f"PACELINE_HOME={site.root} holds no runs yet; run paceline run digits first")
    # Without the workflow type the UI opens on its pages for agents.
    page = f"http://127.0.0.1:{options.port}/#/experiments?workflowType=machine_learning"
    print(f"MLflow UI on {page} (Ctrl-C ends it)", flush=True)
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    arguments = ["--backend-store-uri", site.tracking_uri, "--host", "127.0.0.1", "--port", str(options.port)]
    os.execve(sys.executable, [sys.executable, "-m", "mlflow", "server", *arguments], environment)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
