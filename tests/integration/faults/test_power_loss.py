"""A power loss of the disk that holds PACELINE_HOME, in the middle of a training: a resume is exact."""

import os
import signal
import threading

import pytest
import torch

from paceline.tasks.files import load_result
from paceline.tasks.records.training import TrainResult
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.rank.checkpoint import checkpoint_path, newest_valid_checkpoint, step_of
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO
from tests.integration.conftest import SMALL
from tests.support.patience import until
from tests.support.power_loss import disk

INTERVAL = 4
RUN = [*SMALL, "recipe.num_epochs=40", f"execution.checkpoint_steps={INTERVAL}", "execution.num_threads=1"]
RUN += ["limits.min_free_gib=0"]  # the disk is small
NUM_LOSSES = 3
STEPS_BETWEEN = 100

pytestmark = pytest.mark.slow


def steps(run):
    return [step_of(path) for path in sorted((run / "checkpoints").glob("step-*.ckpt"))]


def trained(process, home):
    """The result of a run at its end."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    (run,) = (home / "runs").iterdir()
    return load_result(run / "trained.json", TrainResult)


@pytest.fixture(scope="module")
def undisturbed(program, tmp_path_factory):
    """The result of a run that nothing happens to."""
    home = tmp_path_factory.mktemp("undisturbed")
    return trained(program("run", "digits", *RUN, PACELINE_HOME=str(home)), home)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_training_whose_disk_loses_power_resumes_exactly(undisturbed, program, tmp_path, kind):
    with disk(tmp_path, kind) as place:
        home, arguments, start = place.path / "home", ["run", "digits", *RUN], 0
        for _ in range(NUM_LOSSES):
            process = program(*arguments, PACELINE_HOME=str(home), start_new_session=True)
            until(lambda start=start: newest(home) >= start + STEPS_BETWEEN, "checkpoint", process=process, every=0.01)
            (run,) = (home / "runs").iterdir()
            start = steps(run)[-1]
            place.lose_power()
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            until(lambda run=run: not running_ranks(run.name), "end of the ranks", seconds=30)
            place.restore_power()
            assert step_of(newest_valid_checkpoint(run / "checkpoints")) >= start - INTERVAL, (
                "the name may not be synced"
            )
            arguments = ["run", "--resume", run.name]
        result = trained(program(*arguments, PACELINE_HOME=str(home)), home)
        assert result.first_step >= start - INTERVAL
        assert result.losses == undisturbed.losses
        assert result.validation_scores == undisturbed.validation_scores
        for name, tensor in torch.load(undisturbed.weights, weights_only=True).items():
            assert torch.equal(tensor, torch.load(result.weights, weights_only=True)[name]), name


def newest(home):
    return max((step for run in home.glob("runs/*") for step in steps(run)), default=0)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_checkpoint_that_is_reported_as_written_is_there_after_a_power_loss(tmp_path, kind):
    content = {"weights": torch.arange(100_000.0)}
    with disk(tmp_path, kind) as place:
        directory, written = place.path / "checkpoints", 0
        for power_loss in range(10):
            plugin = AtomicCheckpointIO(place.path / "attempt-0")
            lost = threading.Timer(0.05 + 0.037 * power_loss, place.lose_power)
            lost.start()
            with pytest.raises(OSError, match=r"Input/output|Read-only"):  # noqa: PT012  one of many writes fails
                while True:
                    plugin.save_checkpoint(content, checkpoint_path(directory, written + 1))
                    plugin.wait()
                    written += 1
            lost.join()
            place.restore_power()
            plugin.teardown()
            found = newest_valid_checkpoint(directory)
            found_step = step_of(found) if found else 0
            assert written in (found_step, found_step - 1), "the last may be complete and not reported"
            assert not list(directory.glob("*.damaged"))
            written = found_step
