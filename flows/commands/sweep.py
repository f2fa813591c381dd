"""`paceline sweep`: try other settings of a recipe, several trials at once, and report the best."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import load, validate_as
from paceline.flows.commands.console import Command, argument, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow, stored_request

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "asha", "hyperband")


def main(options: Namespace) -> None:
    """Run or resume a sweep."""
    from paceline.flows.sweep.flow import check_sweep, run_sweep
    from paceline.flows.sweep.request import SweepRequest

    tree = stored_request(options, "sweep") if options.resume else _request(options)
    start_flow(options, validate_as(SweepRequest, tree), check_sweep, run_sweep, _show)


def _request(options: Namespace) -> dict[str, Any]:
    from paceline.tasks.sweep.space import parse_parameters, split_parameter

    require(options, "preset")
    parse_parameters(options.param)
    return {
        "preset": options.preset,
        "config": load(options.preset, options.overrides),
        "parameters": dict(split_parameter(text) for text in options.param),
        "num_trials": options.trials,
        "sampler": options.sampler or SAMPLERS[0],
        "pruner": options.pruner or PRUNERS[0],
        "at_once": options.at_once,
    }


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.sweep_report import sweep_notes, sweep_table
    from paceline.tasks.sweep.records import SweepResult

    result = SweepResult.model_validate(summary["result"])
    say_table(*sweep_table(result), sweep_notes(result))
    say_pairs([("sweep", run_location(result.run_id, result.experiment)), ("view", summary["view"])])


COMMAND = Command(
    "search better settings of a recipe, several trials at a time",
    (
        "paceline sweep digits --param 'recipe.learning_rate=log(1e-3,1)'",
        "paceline sweep digits --param recipe.optimizer=sgd,adamw --sampler grid",
    ),
    (
        *preset(resume="resume an interrupted sweep"),
        argument(
            "--param",
            action="append",
            default=[],
            metavar="field=VALUES",
            help="a setting and the values to try: log(a,b), lin(a,b), int(a,b[,step]) or x,y,z; repeat for more",
        ),
        argument("--trials", type=int, metavar="N", help="number of trials (default: 20; for a grid all)"),
        argument("--sampler", choices=SAMPLERS, help="method that chooses the values (default: tpe)"),
        argument("--pruner", choices=PRUNERS, help="method that ends poor trials early (default: none)"),
        argument(
            "--at-once", type=int, metavar="N", help="number of trials at the same time (default: as many as fit)"
        ),
    ),
    main,
)
