"""`paceline clean`: free disk space below PACELINE_HOME."""

from argparse import Namespace

from paceline.conf.environment import Environment
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, say_table, write_json


@command(
    ("paceline clean --dry-run", "paceline clean --keep 5 --older-than 30"),
    argument("--keep KEEP", "leave what the newest KEEP trainings use (default: 10)", type=int, default=10),
    argument(
        "--older-than DAYS",
        "remove only what was not changed or used for so many days (default: 0)",
        type=float,
        default=0.0,
    ),
    argument("--dry-run", "report what would be removed, and remove nothing"),
    JSON,
)
def clean(options: Namespace) -> None:
    """Remove prepared sets, checkpoints, weights, compiled code and logs that nothing needs."""
    from paceline.tasks.clean.removal import clean_home

    environment = Environment()
    with json_stream(options.json) as stream:
        uri = environment.tracking_uri
        done = clean_home(environment.root, uri, options.keep, options.older_than, dry_run=options.dry_run)
        say_table(("kind", "number", "MiB", "outcome"), done.rows())
        say(f"{'would free' if done.dry_run else 'freed'} {done.freed_bytes / 2**20:,.1f} MiB of {environment.root}")
        write_json(stream, done.model_dump(mode="json") | {"freed_bytes": done.freed_bytes})
