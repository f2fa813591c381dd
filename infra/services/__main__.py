"""The commands behind infra/up, infra/down, infra/backup and infra/restore."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

from infra.services.archive import back_up, restore
from infra.services.home import Home, Settings, choose_settings
from infra.services.servers import check_workers
from infra.services.start import down, running, up
from paceline.conf.environment import Environment, spare_loopback
from paceline.flows.commands.console import say, say_pairs
from paceline.tasks.errors import InputError, PacelineError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 failed, 2 the input is wrong."""
    gc.disable()
    options = _parser().parse_args(arguments)
    spare_loopback()
    site = Environment()
    home = Home((options.home or site.root / "services").expanduser().absolute())
    try:
        with home.lock():
            options.command(options, home, site)
    except PacelineError as error:
        say(f"infra/{options.name}: {error}")
        return 2 if isinstance(error, InputError) else 1
    return 0


def _up(options: argparse.Namespace, home: Home, site: Environment) -> None:
    old = home.settings() if home.is_made else Settings(ports={})
    settings = choose_settings(old, options.host, dict(options.port), options.workers)
    check_workers(settings)
    servers = up(home, settings, site, lambda line: say(f"infra/up: {line}"))
    rows = [("postgres", f"127.0.0.1:{settings.ports['postgres']}")]
    rows += [(service.daemon.name, service.address) for service in servers.all()]
    say_pairs(*rows, ("logs", str(home.logs)), ("to use them", f". {home.environment}"))


def _down(options: argparse.Namespace, home: Home, site: Environment) -> None:
    ended = down(home)
    say(f"infra/down: ended {', '.join(ended)}" if ended else f"infra/down: nothing of {home.root} runs")


def _backup(options: argparse.Namespace, home: Home, site: Environment) -> None:
    path = (options.file or Path(f"paceline-{time.strftime('%Y%m%dT%H%M%S')}.tar")).absolute()
    size = back_up(home, path)
    say(f"infra/backup: {path}, {size / 2**20:.1f} MiB; it holds the secrets, so keep it where nobody else reads")


def _restore(options: argparse.Namespace, home: Home, site: Environment) -> None:
    if home.is_made and (running_names := running(home)):
        raise InputError(f"{', '.join(running_names)} of {home.root} run; infra/down first")
    aside = restore(home, options.file.absolute(), overwrite=options.overwrite)
    say(f"infra/restore: {home.root} is what {options.file} holds; infra/up starts it")
    if aside is not None:
        say(f"infra/restore: what was there is in {aside}; remove it when it is not needed")


def _port(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not number.isdecimal() or int(number) > 65535:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text} is not SERVICE=NUMBER, such as mlflow=5000; 0 is any that is free")
    return name, int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infra")
    commands = parser.add_subparsers(required=True, dest="name", metavar="COMMAND")
    for name, function in (("up", _up), ("down", _down), ("backup", _backup), ("restore", _restore)):
        command = commands.add_parser(name, prog=f"infra/{name}")
        command.add_argument("--home", type=Path, help="of the services (default: services below PACELINE_HOME)")
        command.set_defaults(command=function)
        if name == "up":
            command.add_argument("--host", help="address to listen on, by which others reach this host (127.0.0.1)")
            text = "of postgres, prefect, mlflow, scheduler or dashboard (the usual one, else any that is free)"
            command.add_argument("--port", type=_port, action="append", default=[], metavar="SERVICE=NUMBER", help=text)
            command.add_argument("--workers", type=int, help="of Dask; 0: one per GPU, or per core without (default)")
        if name == "backup":
            command.add_argument("file", type=Path, nargs="?", help="(default: paceline-TIME.tar)")
        if name == "restore":
            command.add_argument("file", type=Path, help="made by infra/backup")
            command.add_argument("--overwrite", action="store_true", help="put aside what is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
