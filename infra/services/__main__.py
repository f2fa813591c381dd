"""The commands behind the scripts from infra/up to infra/uninstall, and those that units and containers call."""

import argparse
import gc
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from infra.services import archive, supervisor
from infra.services.daemon import MARK, PRIVATE_UMASK, Daemon
from infra.services.home import Home, Settings, choose_settings
from infra.services.site import Site, check_workers
from infra.services.start import Say, check_idle, down, make, migrate, running, up
from infra.services.uninstall import uninstall
from paceline.conf.environment import Environment, quieten, spare_loopback
from paceline.flows.commands.console import say, say_error, say_pairs
from paceline.tasks.errors import InputError, PacelineError, RunError, one_line

CHOSEN = ("host", "num_workers", "domain", "pool", "backups", "keep")  # settings by the option of the same name
LOCKED = ("up", "down", "restore", "upgrade", "uninstall")  # commands that keep others away from the home


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 failed, 2 the input is wrong."""
    gc.disable()
    options = _parser().parse_args(arguments)
    spare_loopback()
    environment = Environment()
    home = Home((options.home or environment.root / "services").expanduser().absolute())
    try:
        with home.lock() if options.name in LOCKED else nullcontext():
            COMMANDS[options.name](options, home, environment.root, lambda line: say(f"infra/{options.name}: {line}"))
    except PacelineError as error:
        say_error(error, as_json=False)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _site(home: Home, root: Path) -> Site:
    return Site(home, home.settings(), root)


def _up(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    old = home.settings() if home.is_made else Settings(ports={})
    settings = choose_settings(old, dict(options.port), **{name: getattr(options, name) for name in CHOSEN})
    check_workers(settings)
    site = Site(home, settings, root)
    if options.units or options.compose:
        user = supervisor.user_of_services()
        make(site)
        if options.units:
            names = supervisor.write_units(site, user.pw_name, options.units)
            tell(f"wrote {', '.join(names)}; next, as root: cp --recursive {options.units}/. /etc/systemd/system")
        if options.compose:
            supervisor.write_compose(site, user, options.compose)
            tell(f"next: docker compose -f {options.compose} up --build --detach")
        return
    up(site, tell)
    facts = site.facts
    say_pairs(
        *((name, facts[f"{name}_url"]) for name in ("prefect", "mlflow", "scheduler")),
        ("dashboard", f"http://127.0.0.1:{facts['dashboard_port']}"),
        ("workers", f"{site.num_workers} of one {'GPU' if facts['gpus'] else 'thread'} each"),
        ("logs", str(home.logs)),
        ("to use them", f". {home.environment}"),
    )


def _down(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    home.settings()
    ended = down(home)
    tell(f"ended {', '.join(ended)}" if ended else f"nothing of {home.root} runs")


def _backup(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    place: Path = (options.file or Path.cwd()).expanduser().absolute()
    directory = place if options.nightly is not None or place.is_dir() else place.parent
    if options.keep is not None and options.keep < 1:
        raise InputError(f"--keep {options.keep} would remove every backup; give 1 or more")
    if options.nightly is not None or options.keep is not None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def back_up_once() -> None:
        # Every night without the lock, which is next to the home: a container has the home alone.
        with home.lock() if options.nightly is None else nullcontext():
            path = directory / time.strftime(archive.TIME_FORMAT) if directory == place else place
            size = archive.back_up(_site(home, root), path)
            tell(f"{path}, {size / 2**20:.1f} MiB; it holds the secrets: keep it where nobody else reads")
            for old in archive.keep_newest(directory, options.keep) if options.keep else []:
                tell(f"removed {old}")

    if options.nightly is None:
        back_up_once()
    else:
        archive.every_night(directory, options.nightly, back_up_once, tell)


def _restore(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    path = options.file.absolute()
    if options.check:
        about = archive.check(path)
        versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
        tell(f"{path} is complete; it is of host {about.host}, Paceline {about.paceline}, {versions}")
        return
    if home.is_made and (names := running(home)):
        raise InputError(f"{', '.join(names)} of {home.root} run; infra/down first")
    site = Site(home, Settings(ports={"postgres": 0}), root)
    aside = archive.restore(site, path, overwrite=options.overwrite, other_host=options.other_host)
    tell(f"{home.root} is what {options.file} holds; infra/up starts it")
    if aside is not None:
        tell(f"what was there is in {aside}; remove it when it is not needed")


def _uninstall(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    uninstall(home, options.units, remove=options.yes, say=tell)


def _upgrade(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    site = _site(home, root)
    if not options.report:
        check_idle(home, root)
        path = home.root / "backups" / f"before-upgrade-{time.strftime('%Y%m%dT%H%M%S')}.tar"
        home.make_private("backups")
        archive.back_up(site, path)
        tell(f"backup: {path}")
        if Daemon("postgres", home).pid() is None:
            tell("next: make units or the file of compose again, restart the services, then infra/upgrade --report")
            return
        down(home)
        up(site, tell)
    quieten()
    os.environ |= site.client_environment()
    from infra.services.upgrade import report  # engines, which read these variables at their import

    report(site, tell)


def _run(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    """Become a service, for a supervisor that restarts it."""
    os.umask(PRIVATE_UMASK)
    site = _site(home, root)
    service = site[options.service]
    site.prepare(service)
    command = site.command(service)
    os.chdir("/")
    os.execvpe(command[0], command, site.environment(service) | {MARK: f"{home.root}#{service.name}"})


def _check(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    site = _site(home, root)
    deadline = time.monotonic() + options.wait
    while True:
        try:
            return site.check(site[options.service])
        except InputError:
            raise
        except Exception as error:
            if time.monotonic() >= deadline:
                raise RunError(f"{options.service} is not well: {one_line(error)}") from error
        time.sleep(0.5)


def _migrate(options: argparse.Namespace, home: Home, root: Path, tell: Say) -> None:
    migrate(_site(home, root), tell)


def _port(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not number.isdecimal() or int(number) > 65535:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text} is not SERVICE=NUMBER, such as mlflow=5000; 0 is any that is free")
    return name, int(number)


FUNCTIONS = (_up, _down, _backup, _restore, _upgrade, _uninstall, _run, _check, _migrate)
COMMANDS = {function.__name__.removeprefix("_"): function for function in FUNCTIONS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infra")
    commands = parser.add_subparsers(required=True, dest="name", metavar="COMMAND")
    parsers = {name: commands.add_parser(name, prog=f"infra/{name}") for name in COMMANDS}
    for command in parsers.values():
        command.add_argument("--home", type=Path, help="of the services (default: services below PACELINE_HOME)")
    option = parsers["up"].add_argument
    option("--host", help="address to listen on, by which others reach this host (127.0.0.1)")
    text = "of postgres, prefect, mlflow, scheduler, dashboard or proxy (the usual one, else any that is free)"
    option("--port", type=_port, action="append", default=[], metavar="SERVICE=NUMBER", help=text)
    option("--workers", type=int, dest="num_workers", help="of Dask; 0: one per GPU, or per core without (default)")
    option("--domain", help="start a proxy with TLS for prefect.DOMAIN and mlflow.DOMAIN")
    option("--pool", help="start the runs of this work pool")
    option("--backups", type=os.path.abspath, metavar="DIR", help="make a backup every night in this directory")
    option("--keep", type=int, metavar="N", help="of those backups (14)")
    option("--units", type=Path, metavar="DIR", help="start nothing, but write units of systemd")
    option("--compose", type=Path, metavar="FILE", help="start nothing, but write a file of compose")
    option = parsers["backup"].add_argument
    option("file", type=Path, nargs="?", help="or a directory (default: paceline-TIME.tar here)")
    option("--keep", type=int, metavar="N", help="remove all but the newest N backups of the directory")
    option("--nightly", type=int, choices=range(24), metavar="HOUR", help="keep running, with a backup every night")
    option = parsers["restore"].add_argument
    option("file", type=Path, help="made by infra/backup")
    option("--check", action="store_true", help="read the file from end to end, and restore nothing")
    option("--overwrite", action="store_true", help="put aside what is there")
    option("--other-host", action="store_true", help="the backup is of another host")
    parsers["upgrade"].add_argument("--report", action="store_true", help="only name what is not carried over")
    option = parsers["uninstall"].add_argument
    option("--units", type=Path, default=Path("/etc/systemd/system"), metavar="DIR", help="with units of infra/up")
    option("--yes", action="store_true", help="remove, in place of a list of what would be removed")
    for name in ("run", "check"):
        parsers[name].add_argument("service")
    parsers["check"].add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a backup that is unfinished is removed
    sys.exit(main())
