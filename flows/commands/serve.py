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
from paceline.flows.commands.console import argument, command, preset, say_pairs
from paceline.flows.commands.prefect_session import enable_gc
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.errors import InputError

OVERLAPS = get_args(Overlap)


def make_root_absolute(config: Config) -> Config:
    """A configuration whose `data.root` does not depend on the working directory."""
    root, is_embedded = config.data.root, config.data.source in EMBEDDED_SOURCES
    if root is None or "://" in root or "::" in root:
        return config
    if not is_embedded and not os.path.exists(root):  # noqa: PTH110  which takes any text: it may be a word
        return config
    path = Path(root).expanduser() if is_embedded else Path(root)
    data = config.data.model_copy(update={"root": str(path.absolute())})
    return config.model_copy(update={"data": data})


@command(
    (
        'paceline serve digits --cron "0 2 * * *"',
        'paceline serve folder data.root=DIR --cron "0 2 * * *" --overlap skip --catch-up',
    ),
    *preset(),
    argument("--cron CRON", 'schedule as minute hour day month weekday, for example "0 2 * * *"', required=True),
    argument("--timezone TIMEZONE", "time zone of the schedule, for example Europe/Zurich (default: this machine's)"),
    argument(
        "--overlap",
        "what happens to a run that is due while the previous one still runs (default: queue)",
        choices=OVERLAPS,
        default="queue",
    ),
    argument("--name NAME", "name of the deployment (default: the preset's)"),
    argument("--catch-up", "after a pause of this process, start the runs that were missed"),
)
def serve(options: Namespace) -> None:
    """Run on a schedule, as a deployment in Prefect that this process serves."""
    from paceline.flows.checks import preflight

    environment = Environment()
    config = make_root_absolute(load(options.preset, options.overrides))
    url = prefect_api.prefect_server(environment)
    if url is None:
        fault = "paceline serve needs a Prefect server, which stores the schedule"
        hint = "start prefect server start in a second terminal, then export PREFECT_API_URL=http://127.0.0.1:4200/api"
        raise InputError(fault, hint=hint, setting="PREFECT_API_URL")
    preflight.check(config, environment)
    from paceline.flows import deployment as deployments

    allow(config.cluster)
    timezone, name = options.timezone or deployments.local_timezone(), options.name or config.name
    schedule = deployments.schedule_of(options.cron, timezone)
    deployment = deployments.deployment_of(config, name, schedule, options.overlap)
    say_pairs(
        ("deployment", f"paceline-run/{name}"),
        ("schedule", f"{options.cron} in {timezone}"),
        ("overlap", options.overlap),
        ("server", url),
        ("now and then", f"prefect deployment run paceline-run/{name}"),
    )
    enable_gc()  # this process lives for months
    deployments.serve(deployment, catch_up=options.catch_up)
