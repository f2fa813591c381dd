"""`paceline compare` and `paceline hardware`: runs that exist already, divided only where they did the same work."""

from argparse import Namespace
from pathlib import Path

from paceline.conf.environment import Environment
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, say_table, write_json, write_page
from paceline.tasks.errors import InputError


@command(
    ("paceline compare RUN_ID RUN_ID", "paceline compare --experiment paceline --last 5"),
    argument("runs RUN_ID ...", "runs to compare; the first is the base"),
    argument("--experiment EXPERIMENT", "take the newest runs of this experiment instead"),
    argument("--last N", "number of newest runs of the experiment (default: 5)", type=int),
    argument("--html FILE", "write the comparison as a page too", type=Path),
    JSON,
)
def compare(options: Namespace) -> None:
    """Compare finished runs; the first one is the base."""
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


@command(
    ("paceline hardware", 'paceline hardware --price "H200=4.5" --html hardware.html'),
    argument("--experiment EXPERIMENT", "experiment whose runs are compared (default: paceline)", default="paceline"),
    argument(
        "--price DEVICE=PRICE ...",
        "price of one device for an hour, with a part of the device's name, as in H200=4.5; repeat for more",
    ),
    argument("--html FILE", "write the table as a page too", type=Path),
    JSON,
)
def hardware(options: Namespace) -> None:
    """Compare all hardware that did the same work: throughput, memory, energy, price."""
    prices = dict(_price(text) for text in options.price)
    from paceline.flows.compare import hardware_table
    from paceline.tasks.report.tables import HEAD, hardware_notes, hardware_rows, render_hardware

    with json_stream(options.json) as stream:
        table = hardware_table(Environment(), options.experiment, prices)
        if options.html:
            write_page(options.html, render_hardware(table))
        for work in table.tables:
            say(f"\n{work.work}")
            say_table(HEAD, hardware_rows(work))
            for break_even in work.break_evens:
                say(break_even.sentence)
        for note in ("", *hardware_notes(table)):
            say(note)
        write_json(stream, table.model_dump(mode="json"))


def _price(text: str) -> tuple[str, float]:
    device, _, price = text.rpartition("=")
    try:
        value = float(price)
    except ValueError:
        value = -1.0
    if not device or not 0 <= value < float("inf"):
        raise InputError(f"--price {text} is not DEVICE=PRICE with a price of 0 or more; for example --price H200=4.5")
    return device, value
