"""Options of the commands that also take the user's own Lightning code."""

from argparse import Namespace
from collections.abc import Callable

from paceline.conf.config import Config
from paceline.conf.lightning import Objective
from paceline.conf.load import is_lightning, load
from paceline.flows.commands.console import argument
from paceline.tasks.errors import InputError

CODE = argument("--code DIR", "directory of your own Lightning code, with a file of LightningCLI as the preset")
GOALS = (
    argument("--minimize METRIC", "metric of your own Lightning code that compares trainings, smaller is better"),
    argument("--maximize METRIC", "the same, larger is better"),
)


def load_config(options: Namespace, meanwhile: Callable[[Config | None], None] | None = None) -> Config:
    """Read a preset, or a file of LightningCLI with the directory of `--code`, with its overrides.

    `meanwhile` is called while another process imports this code, see `load_lightning`.
    """
    if is_lightning(options.preset):
        from paceline.flows.checks.lightning import load_lightning

        return load_lightning(options.preset, options.overrides, options.code, meanwhile)
    if options.code is not None:
        load(options.preset)  # which reports a file that does not exist
        raise InputError(f"--code {options.code} has no meaning for a preset", hint="remove --code", setting="--code")
    return load(options.preset, options.overrides)


def objective_of(options: Namespace) -> Objective | None:
    """The metric of `--minimize` or `--maximize`. Raises InputError: both are given."""
    if options.minimize is not None and options.maximize is not None:
        fault = f"--minimize {options.minimize} and --maximize {options.maximize} are given; remove one"
        raise InputError(fault, setting="--maximize")
    if options.minimize is not None:
        return Objective(name=options.minimize, goal="minimize")
    return None if options.maximize is None else Objective(name=options.maximize, goal="maximize")
