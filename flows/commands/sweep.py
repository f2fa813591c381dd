"""`paceline sweep`: try other settings of a recipe, several trials at once, and say which are best."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import checked, load
from paceline.flows.commands.console import (
    Command,
    add_preset,
    json_stream,
    run_location,
    say,
    say_pairs,
    say_table,
    write_json,
)
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.flows.commands.resumed import stored_request
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.flows.sweep.request import SweepRequest

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "asha", "hyperband")


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser, optional=True)
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="field=VALUES",
        help="a setting and the values to try: log(a,b), lin(a,b), int(a,b[,step]) or x,y,z; repeat for more",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="number of trials (default: 20; for a grid all)")
    parser.add_argument("--sampler", choices=SAMPLERS, help="method that chooses the values (default: tpe)")
    parser.add_argument("--pruner", choices=PRUNERS, help="method that ends poor trials early (default: none)")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="number of trials at the same time (default: as many as fit)"
    )
    parser.add_argument("--resume", metavar="RUN_ID", help="resume an interrupted sweep")


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.sweep.flow import check_sweep

    site = Environment()
    request = _resumed(site, options) if options.resume else _request(options)
    check_sweep(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        from paceline.flows.sweep.flow import run_sweep

        summary = run_sweep(request, options.resume)
        _show(summary)
        write_json(stream, {key: value for key, value in summary.items() if key != "result"})


def _request(options: Namespace) -> SweepRequest:
    from paceline.flows.sweep.request import SweepRequest
    from paceline.tasks.sweep.space import parse_parameters, split_parameter

    if options.preset is None:
        raise InputError(
            "paceline sweep needs a preset",
            hint="for example: paceline sweep digits --param 'recipe.learning_rate=log(1e-3,1)'",
            setting="preset",
        )
    parse_parameters(options.param)
    asked = {
        "preset": options.preset,
        "config": load(options.preset, options.overrides),
        "parameters": dict(split_parameter(text) for text in options.param),
        "num_trials": options.trials,
        "sampler": options.sampler or SAMPLERS[0],
        "pruner": options.pruner or PRUNERS[0],
        "at_once": options.at_once,
    }
    return checked(SweepRequest, asked)


def _resumed(site: Environment, options: Namespace) -> SweepRequest:
    from paceline.flows.sweep.request import SweepRequest

    given = (*options.param, options.trials, options.sampler, options.pruner, options.at_once)
    changed = any(value is not None for value in given)
    return checked(SweepRequest, stored_request(options, "sweep", site, changed))


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.sweep_report import sweep_notes, sweep_table
    from paceline.tasks.sweep.records import SweepResult

    result = SweepResult.model_validate(summary["result"])
    say_table(*sweep_table(result))
    say("")
    for note in sweep_notes(result):
        say(note)
    where = run_location(result.run_id, result.experiment)
    say_pairs([("sweep", where), ("view", summary["view"])])


COMMAND = Command(
    "search better settings of a recipe, several trials at a time",
    (
        "paceline sweep digits --param 'recipe.learning_rate=log(1e-3,1)'",
        "paceline sweep digits --param recipe.optimizer=sgd,adamw --sampler grid",
    ),
    add_arguments,
    main,
)
