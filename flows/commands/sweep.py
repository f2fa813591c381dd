"""`paceline sweep`: try other settings of a recipe, several trials at once, and report the best."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import is_lightning, validate_as
from paceline.flows.commands.console import argument, command, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.own_code import CODE, GOALS, load_config, objective_of
from paceline.flows.commands.prefect_session import start_flow, stored_request

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "asha", "hyperband")


@command(
    (
        "paceline sweep digits --param 'recipe.learning_rate=log(1e-3,1)'",
        "paceline sweep digits --param recipe.optimizer=sgd,adamw --sampler grid",
    ),
    *preset(resume="resume an interrupted sweep"),
    argument(
        "--param field=VALUES ...",
        "a setting and the values to try: log(a,b), lin(a,b), int(a,b[,step]) or x,y,z; repeat for more",
    ),
    argument("--trials N", "number of trials (default: 20; for a grid all)", type=int),
    argument("--sampler", "method that chooses the values (default: tpe)", choices=SAMPLERS),
    argument("--pruner", "method that ends poor trials early (default: none)", choices=PRUNERS),
    argument("--at-once N", "number of trials at the same time (default: as many as fit)", type=int),
    CODE,
    *GOALS,
)
def sweep(options: Namespace) -> None:
    """Search better settings of a recipe, several trials at a time."""
    from paceline.flows.sweep.flow import check_sweep, run_sweep
    from paceline.flows.sweep.trial import SweepRequest
    from paceline.tasks.sweep.space import parse_parameters, split_parameter

    if options.resume:
        tree = stored_request(options, "sweep")
    else:
        require(options, "preset")
        parse_parameters(options.param, is_own=is_lightning(options.preset))
        tree = {
            "preset": options.preset,
            "config": load_config(options),
            "objective": objective_of(options),
            "parameters": dict(split_parameter(text) for text in options.param),
            "num_trials": options.trials,
            "sampler": options.sampler or SAMPLERS[0],
            "pruner": options.pruner or PRUNERS[0],
            "at_once": options.at_once,
        }
    start_flow(options, validate_as(SweepRequest, tree), check_sweep, run_sweep, _show)


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.sweep_report import sweep_notes, sweep_table
    from paceline.tasks.sweep.records import SweepResult

    result = SweepResult.model_validate(summary["result"])
    say_table(*sweep_table(result), sweep_notes(result))
    say_pairs(("sweep", run_location(result.run_id, result.experiment)), ("view", summary["view"]))
