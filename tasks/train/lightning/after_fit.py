"""What follows the training of a user's module: `after_fit` of their LightningCLI, and the test loop.

The training is complete then, whatever they raise, and on whichever rank.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from paceline.tasks.errors import one_line
from paceline.tasks.train.lightning.callbacks import metrics_of
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.trainer_steps import do_nothing
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.file_logger import FileLogger
from paceline.tasks.train.rank.time_budget import Stopwatch

AFTER_FIT = "after_fit of your LightningCLI failed ({}); the training is complete"
BUILT_AGAIN = "setup or configure_model built the network again: build a layer once, in __init__"
TEST_SECONDS = 1.0
"""A rank whose test has failed waits so long for the others. Nothing follows for which the group must be complete."""
WAITED = f"other ranks were still at work after {group.ALONE_SECONDS / 60:g} min"
AT_WORK = {"cost": None, "uncounted": "another rank was still at work when the device's limit was to be measured"}

logger = logging.getLogger(__name__)


def finish(cli: ModuleCLI, stopwatch: Stopwatch, note: Callable[[str], None]) -> dict[str, Any]:
    """The training's metrics and those that only the test logged; else `not_tested`, why the test's do not count.

    The test follows `after_fit`, which may test or validate too.
    """
    logged = metrics_of(cli.trainer)
    failure, is_complete = group.run_on_all(partial(_run, partial(cli.run_hook, "after_fit")), group.GROUP_SECONDS)
    if failure:
        note(AFTER_FIT.format(failure))
    if not _has_test(cli):
        return logged if is_complete else logged | AT_WORK
    if not is_complete:
        return logged | AT_WORK | {"not_tested": failure or WAITED}
    files = cli.trainer.logger
    assert isinstance(files, FileLogger)
    files.trained = frozenset((*logged["metrics"], *logged["not_finite"]))
    with stopwatch.during("test"):
        reason, is_complete = group.run_on_all(partial(_run, partial(_test, cli)), TEST_SECONDS)
    if not is_complete:
        return logged | AT_WORK | {"not_tested": reason or WAITED}
    if reason:
        return logged | {"not_tested": reason}
    tested = metrics_of(cli.trainer)
    not_finite = (*logged["not_finite"], *(name for name in tested["not_finite"] if name not in files.trained))
    new = {name: value for name, value in tested["metrics"].items() if name not in files.trained}
    return {"metrics": logged["metrics"] | new, "not_finite": not_finite}


def _run(work: Callable[[], str | None]) -> str:
    """Run the user's code; return why it failed, or nothing. The traceback is in the log of the rank."""
    try:
        return work() or ""
    except (Exception, SystemExit) as error:  # whatever it raises: the training is done
        logger.warning("after the training:", exc_info=True)
        return f"{type(error).__name__}: {one_line(error)}"


def _has_test(cli: ModuleCLI) -> bool:
    model, data = cli.model, cli.datamodule
    has_loader = is_overridden("test_dataloader", model, LightningModule)
    has_loader |= data is not None and is_overridden("test_dataloader", data, LightningDataModule)
    is_left_out = cli.trainer.limit_test_batches == 0  # Lightning would still call `setup`
    return not is_left_out and has_loader and is_overridden("test_step", model, LightningModule)


def _test(cli: ModuleCLI) -> str | None:
    """Run the test loop; return why its metrics are not those of the trained weights."""
    leave_out_preparation(cli)
    trained = _parameters(cli.model)
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    return None if [*map(id, _parameters(cli.model))] == [*map(id, trained)] else BUILT_AGAIN


def leave_out_preparation(cli: ModuleCLI) -> None:
    """Leave out `prepare_data`, which has run on this host. Lightning still has all ranks wait for each other."""
    for owner, parent in ((cli.model, LightningModule), (cli.datamodule, LightningDataModule)):
        if is_overridden("prepare_data", owner, parent):
            owner.prepare_data = do_nothing


def _parameters(model: LightningModule) -> list[Any]:
    """The parameters; of a sharded module always the shards, as a state dict takes them."""
    return [each for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.nn.Parameter)]
