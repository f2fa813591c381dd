"""`paceline compare`: runs that exist already, side by side, divided only where they did the same work."""

from argparse import Namespace
from pathlib import Path

from paceline.conf.environment import Environment
from paceline.flows.commands.console import JSON, Command, argument, json_stream, say, say_table, write_json, write_page
from paceline.tasks.errors import InputError


def main(options: Namespace) -> None:
    """Compare."""
    if options.last is not None and options.last < 2:  # noqa: PLR2004  a comparison is of two
        raise InputError(f"--last must be 2 or more, got {options.last}; compare two runs with --last 2")
    from paceline.flows.compare import compare_runs, view_url
    from paceline.tasks.report.tables import render_compare
    from paceline.tasks.speedup.compare import compare_notes, compare_table

    site = Environment()
    with json_stream(options.json) as stream:
        comparison = compare_runs(site, options.runs, options.experiment, options.last)
        if options.html:
            write_page(options.html, render_compare(comparison))
        say_table(*compare_table(comparison), compare_notes(comparison))
        if view := view_url(site, comparison):
            say(f"in the MLflow UI: {view}")
        write_json(stream, comparison.model_dump(mode="json") | {"view": view})


COMMAND = Command(
    "compare finished runs; the first one is the base",
    ("paceline compare RUN_ID RUN_ID", "paceline compare --experiment paceline --last 5"),
    (
        argument("runs", nargs="*", metavar="RUN_ID", help="runs to compare; the first is the base"),
        argument("--experiment", help="take the newest runs of this experiment instead"),
        argument("--last", type=int, metavar="N", help="number of newest runs of the experiment (default: 5)"),
        argument("--html", type=Path, metavar="FILE", help="write the comparison as a page too"),
        JSON,
    ),
    main,
)
