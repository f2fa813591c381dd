"""`paceline.run` and `paceline.run_own`: a run as a function call."""

from collections.abc import Sequence

from paceline.conf.config import Config
from paceline.flows.checks.lightning import load_lightning
from paceline.flows.commands.run import start
from paceline.flows.run.lightning import OwnSummary
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
        fault = "paceline.run takes presets, and this is your own Lightning code"
        raise InputError(fault, hint='run_own("config.yaml", code=".")')
    return Summary.model_validate(start(config))


def run_own(file: str, settings: Sequence[str] = (), code: str | None = None) -> OwnSummary:
    """Train your own Lightning code, and account for the speed of it, as `paceline run FILE --code DIR` does.

    Args:
        file: Path of a file of LightningCLI; `lightning` where all settings follow.
        settings: Overrides, such as `trainer.max_epochs=1` and `execution.num_devices=2`.
        code: Directory of your code; None where all classes are in installed packages.

    Raises:
        InputError: the input is wrong, and nothing was started.
        RunError: the run failed after it had started.
    """
    return OwnSummary.model_validate(start(load_lightning(file, settings, code)))
