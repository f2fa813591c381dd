"""`paceline serve`: runs by schedule, started by this process as long as it lives."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from socket import gethostname
from typing import get_args

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.conf.plugins import EMBEDDED_SOURCES
from paceline.flows.checks.origin import allow
from paceline.flows.commands.console import argument, command, preset, require, say_pairs, write_json
from paceline.flows.commands.own_code import CODE, load_config
from paceline.flows.commands.prefect_session import enable_gc
from paceline.flows.lifecycle import prefect_api
from paceline.tasks.errors import InputError

OVERLAPS = get_args(Overlap)
CLEAN_CRON = "0 6 * * 0"


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
    argument("preset", "a preset (list them: paceline presets) or a YAML file; none for --clean alone", nargs="?"),
    *preset()[1:],
    CODE,
    argument("--cron CRON", 'schedule as minute hour day month weekday, for example "0 2 * * *"'),
    argument(
        "--clean CRON",
        f'also clean up on a schedule (default: "{CLEAN_CRON}"): see paceline clean, and infra/README.md',
        nargs="?",
        const=CLEAN_CRON,
    ),
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

    if options.clean is None or options.preset or options.cron:
        require(options, "preset", "--cron")
    environment = Environment()
    config = make_root_absolute(load_config(options)) if options.preset is not None else None
    url = prefect_api.prefect_server(environment)
    if url is None:
        fault = "paceline serve needs a Prefect server, which stores the schedule"
        hint = "start prefect server start in a second terminal, then export PREFECT_API_URL=http://127.0.0.1:4200/api"
        raise InputError(fault, hint=hint, setting="PREFECT_API_URL")
    if config is not None:
        preflight.check_run(config, environment)
    else:
        prefect_api.check_prefect(environment)
    from paceline.flows import deployment as deployments

    timezone, served = options.timezone or deployments.local_timezone(), []
    rows: list[tuple[str, str]] = []
    if config is not None:
        allow(config.cluster, config.lightning)
        name = options.name or config.name
        schedule = deployments.schedule_of(options.cron, timezone)
        served.append(deployments.deployment_of(config, name, schedule, options.overlap))
        rows += [
            ("deployment", served[0].full_name),
            ("schedule", f"{options.cron} in {timezone}"),
            ("overlap", options.overlap),
            ("now and then", f"prefect deployment run {served[0].full_name}"),
        ]
    if options.clean is not None:
        schedule = deployments.schedule_of(options.clean, timezone, "--clean")
        served.append(deployments.deployment_of(None, gethostname(), schedule, "skip"))
        rows.append(("clean-up", f"paceline-clean/{gethostname()}, {options.clean} in {timezone}"))
    say_pairs(*rows, ("server", url))
    if options.json:
        names = [f"{deployment.flow_name}/{deployment.name}" for deployment in served]
        write_json(sys.stdout, {"deployments": names, "server": url})
    enable_gc()  # this process lives for months
    deployments.serve(*served, catch_up=options.catch_up)
