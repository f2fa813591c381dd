"""`paceline serve`: runs by schedule, started by this process as long as it lives."""

import os
from argparse import Namespace
from pathlib import Path
from typing import get_args

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.conf.plugins import EMBEDDED_SOURCES
from paceline.flows.checks.origin import allow
from paceline.flows.commands.console import Command, argument, preset, say_pairs
from paceline.flows.commands.prefect_session import enable_gc
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.errors import InputError

OVERLAPS = get_args(Overlap)


def make_root_absolute(config: Config) -> Config:
    """A configuration whose `data.root` does not depend on the working directory."""
    root = config.data.root
    if root is None or "://" in root or "::" in root:
        return config
    if config.data.source in EMBEDDED_SOURCES:
        path = Path(root).expanduser()
    elif os.path.exists(root):  # noqa: PTH110  which takes any text: the root of a user's source may be a word
        path = Path(root)
    else:
        return config
    data = config.data.model_copy(update={"root": str(path.absolute())})
    return config.model_copy(update={"data": data})


def main(options: Namespace) -> None:
    """Check the run, deploy it, and start its runs until interrupted."""
    from paceline.flows.checks import preflight

    environment = Environment()
    config = make_root_absolute(load(options.preset, options.overrides))
    url = prefect_api.prefect_server(environment)
    if url is None:
        raise InputError(
            "paceline serve needs a Prefect server, which stores the schedule",
            hint="start prefect server start in a second terminal, then export PREFECT_API_URL=http://127.0.0.1:4200/api",
            setting="PREFECT_API_URL",
        )
    preflight.check(config, environment)
    from paceline.flows.deployment import deployment_of, local_timezone, schedule_of, serve

    allow(config.cluster)
    timezone = options.timezone or local_timezone()
    name = options.name or config.name
    deployment = deployment_of(config, name, schedule_of(options.cron, timezone), options.overlap)
    say_pairs(
        [
            ("deployment", f"paceline-run/{name}"),
            ("schedule", f"{options.cron} in {timezone}"),
            ("overlap", options.overlap),
            ("server", url),
            ("now and then", f"prefect deployment run paceline-run/{name}"),
        ]
    )
    enable_gc()  # this process lives for months
    serve(deployment, catch_up=options.catch_up)


COMMAND = Command(
    "run on a schedule, as a deployment in Prefect that this process serves",
    (
        'paceline serve digits --cron "0 2 * * *"',
        'paceline serve folder data.root=DIR --cron "0 2 * * *" --overlap skip --catch-up',
    ),
    (
        *preset(),
        argument("--cron", required=True, help='schedule as minute hour day month weekday, for example "0 2 * * *"'),
        argument("--timezone", help="time zone of the schedule, for example Europe/Zurich (default: this machine's)"),
        argument(
            "--overlap",
            choices=OVERLAPS,
            default="queue",
            help="what happens to a run that is due while the previous one still runs (default: queue)",
        ),
        argument("--name", help="name of the deployment (default: the preset's)"),
        argument(
            "--catch-up", action="store_true", help="after a pause of this process, start the runs that were missed"
        ),
    ),
    main,
)
