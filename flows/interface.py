"""`paceline.run`: a run as a function call."""

from paceline.conf.config import Config
from paceline.flows.commands.run import start
from paceline.flows.run.stages import Summary
from paceline.tasks.errors import InputError


def run(config: Config) -> Summary:
    """Prepare data, train, evaluate, and account for the speed of it, as `paceline run` does.

    Args:
        config: All settings, for example of `load("digits", ["recipe.num_epochs=1"])`.

    Raises:
        InputError: the input is wrong, and nothing was started.
        RunError: the run failed after it had started.
    """
    if config.lightning.settings:
        raise InputError("paceline.run takes presets, and this is your own Lightning code", hint="paceline run --help")
    return Summary.model_validate(start(config))
