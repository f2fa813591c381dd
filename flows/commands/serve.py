"""`paceline serve`: runs by schedule, started by this process as long as it lives."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.conf.plugins import EMBEDDED_SOURCES
from paceline.flows.checks.origin import allow
from paceline.flows.commands.console import Command, add_preset, say_pairs
from paceline.flows.commands.prefect_session import collect_again
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.errors import InputError

OVERLAPS = get_args(Overlap)


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser)
    parser.add_argument(
        "--cron", required=True, help='schedule as minute hour day month weekday, for example "0 2 * * *"'
    )
    parser.add_argument(
        "--timezone", help="time zone of the schedule, for example Europe/Zurich (default: this machine's)"
    )
    parser.add_argument(
        "--overlap",
        choices=OVERLAPS,
        default="queue",
        help="what happens to a run that is due while the previous one still runs (default: queue)",
    )
    parser.add_argument("--name", help="name of the deployment (default: the preset's)")
    parser.add_argument(
        "--catch-up",
        action="store_true",
        help="after a pause of this process, start the runs that were missed",
    )


def settled(config: Config) -> Config:
    """With a path that means the same wherever a run is started."""
    root = config.data.root
    if root is None or "://" in root or "::" in root:
        return config
    if config.data.source in EMBEDDED_SOURCES:
        path = Path(root).expanduser()
    elif os.path.exists(root):  # noqa: PTH110  which takes any text: a source of the user's may be rooted in a word
        path = Path(root)
    else:
        return config
    data = config.data.model_copy(update={"root": str(path.absolute())})
    return config.model_copy(update={"data": data})


def main(options: Namespace) -> None:
    """Check the run, deploy it, and start its runs until interrupted."""
    site = Environment()
    config = settled(load(options.preset, options.overrides))
    from paceline.flows.checks import preflight

    url = prefect_api.prefect_server(site)
    if url is None:
        raise InputError(
            "paceline serve needs a Prefect server, which stores the schedule",
            hint="start prefect server start in a second terminal, then export PREFECT_API_URL=http://127.0.0.1:4200/api",
            setting="PREFECT_API_URL",
        )
    preflight.check(config, site)
    from paceline.flows.deployment import deployment_of, local_timezone, schedule_of, serve

    allow(config.cluster)
    timezone = options.timezone or local_timezone()
    schedule = schedule_of(options.cron, timezone)
    name = options.name or config.name
    deployment = deployment_of(config, name, schedule, options.overlap)
    say_pairs(
        [
            ("deployment", f"paceline-run/{name}"),
            ("schedule", f"{options.cron} in {timezone}"),
            ("overlap", options.overlap),
            ("server", url),
            ("now and then", f"prefect deployment run paceline-run/{name}"),
        ]
    )
    collect_again()  # this process lives for months
    serve(deployment, catch_up=options.catch_up)


COMMAND = Command(
    "run on a schedule, as a deployment in Prefect that this process serves",
    (
        'paceline serve digits --cron "0 2 * * *"',
        'paceline serve folder data.root=DIR --cron "0 2 * * *" --overlap skip --catch-up',
    ),
    add_arguments,
    main,
)
