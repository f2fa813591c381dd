"""The Python interface: a run as a function call, and its stages, to compose a flow of your own: see guides/compose.md.

Each stage takes the session of a preset or of your own Lightning code.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from paceline.conf.config import Config
from paceline.flows.checks.lightning import load_lightning
from paceline.flows.commands.run import start
from paceline.flows.run import lightning as own
from paceline.flows.run import stages
from paceline.flows.run.lightning import OwnEvaluation, OwnSummary
from paceline.flows.run.session import OwnSession, Session, open_session
from paceline.flows.run.stages import Summary
from paceline.tasks.errors import InputError
from paceline.tasks.records.data import PreparedPartitions, PreparedSet
from paceline.tasks.records.training import EvaluateResult, ModuleResult, TrainResult


def run(config: Config) -> Summary:
    """Prepare data, train, evaluate, and account for the speed of it, as `paceline run` does.

    Args:
        config: All settings, for example of `load("digits", ["recipe.num_epochs=1"])`.

    Raises:
        InputError: the input is wrong, and nothing was started.
        RunError: the run failed after it had started.
    """
    _require_preset(config, "run()", "run_own")
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


@contextmanager
def session(config: Config, resume: str | None = None) -> Iterator[Session]:
    """Check a configuration, and open its cluster; inside a Prefect flow. The MLflow run ends with the body.

    After a run that was accounted for, the registered model is promoted, and a regression is confirmed and reported.

    Args:
        config: All settings, for example of `load("digits")`.
        resume: Id of an unfinished MLflow run, which continues from its newest checkpoint.

    Raises:
        InputError: a setting does not fit this machine; nothing was started.
        RegressionError: the run got worse than those before it, and `track.on_regression` is `fail`.
    """
    _require_preset(config, "session()", "own_session")
    with open_session(Session, config, resume) as opened:
        yield opened


@contextmanager
def own_session(
    file: str, settings: Sequence[str] = (), code: str | None = None, resume: str | None = None
) -> Iterator[OwnSession]:
    """Read and check your own Lightning code, and open its cluster; as `session`.

    The arguments are those of `run_own`. Raises as `session`.
    """
    with open_session(OwnSession, load_lightning(file, settings, code), resume) as opened:
        yield opened


@overload
def prepare(session: Session) -> PreparedSet: ...
@overload
def prepare(session: OwnSession) -> PreparedPartitions | None: ...
def prepare(session: Session | OwnSession) -> Any:
    """Prepare the data, or find them prepared, and open the MLflow run; a failure leaves a FAILED run.

    Of own code, these are the partitions of a DataModule that has some.
    """
    return own.prepare(session) if isinstance(session, OwnSession) else stages.prepare(session)


@overload
def train(session: Session, prepared: PreparedSet) -> TrainResult: ...
@overload
def train(session: OwnSession, prepared: PreparedPartitions | None) -> ModuleResult: ...
def train(session: Session | OwnSession, prepared: Any) -> Any:
    """Train on the cluster, with the probe before the first step.

    A preset also times further starts of the process. Own code also runs its `test_step`.
    """
    return own.train(session, prepared) if isinstance(session, OwnSession) else stages.train(session, prepared)


@overload
def evaluate(session: Session, prepared: PreparedSet, trained: TrainResult) -> EvaluateResult: ...
@overload
def evaluate(session: OwnSession, prepared: PreparedPartitions | None, trained: ModuleResult) -> OwnEvaluation: ...
def evaluate(session: Session | OwnSession, prepared: Any, trained: Any) -> Any:
    """Measure the quality on the test split; of own code, the values that it logged in the training and its test."""
    if isinstance(session, OwnSession):
        return own.evaluate(session, trained)
    return stages.evaluate(session, prepared, trained)


@overload
def account(session: Session, prepared: PreparedSet, trained: TrainResult, evaluated: EvaluateResult) -> Summary: ...
@overload
def account(
    session: OwnSession, prepared: PreparedPartitions | None, trained: ModuleResult, evaluated: OwnEvaluation
) -> OwnSummary: ...
def account(session: Session | OwnSession, prepared: Any, trained: Any, evaluated: Any) -> Any:
    """Judge the speed and the quality against the baseline and earlier runs, and record it all in the MLflow run."""
    if isinstance(session, OwnSession):
        return OwnSummary.model_validate(own.judge(session, trained, evaluated))
    return Summary.model_validate(stages.judge(session, prepared, trained, evaluated))


def _require_preset(config: Config, what: str, other: str) -> None:
    if config.lightning.settings:
        fault = f"{what} takes presets, and this is your own Lightning code"
        raise InputError(fault, hint=f'{other}("config.yaml", code=".")')
