"""Own Lightning code that fails on one rank alone, in a flow: soon, with its error in Prefect and in MLflow."""

import json
import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from paceline.conf.environment import Environment
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

PACKAGE = Path(__file__).parents[2] / "packages" / "shapes"
END_SECONDS = 200
"""Of a run with a restart, on a busy machine; far less than the half hour for which a rank waits for another one."""


@pytest.fixture
def run(paceline, prefect_url, tmp_path):
    """Trains a faulty module on two ranks: the process, what it said, and its run in MLflow and in Prefect."""

    def to_the_end(place, error="FileNotFoundError"):
        code = shutil.copytree(PACKAGE, tmp_path / "code")
        before = set(Environment().root.glob("runs/*"))
        model = ["model.class_path=faulty.Perceptron", f"model.init_args.place={place}", "cli=faulty.FaultyCLI"]
        model += ["model.init_args.rank=1", f"model.init_args.error={error}", "data.class_path=more_shapes.Pictures"]
        settings = ["execution.num_devices=2", "execution.checkpoint_steps=2", "speedup.baseline=none"]
        settings.append("trainer.max_epochs=2")
        process = paceline("run", "lightning", "--code", str(code), "--json", *model, *settings)
        out, said = process.communicate(timeout=END_SECONDS)
        (directory,) = set(Environment().root.glob("runs/*")) - before
        stored = MlflowClient(Environment().tracking_uri).get_run(directory.name)
        with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
            state = client.read_flow_run(stored.data.tags["prefect.flow_run_id"]).state
        return process.returncode, out, said, directory, stored, state

    return to_the_end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("before_fit", "FileNotFoundError"),
        ("validation_step", "FileNotFoundError"),
        ("training_step", "KeyboardInterrupt"),
    ],
)
def test_an_error_on_one_rank_alone_fails_the_run_with_its_traceback(run, place, error):
    status, _, said, directory, stored, state = run(place, error)
    fault = f"rank 1 failed: {error}: {place}: a file of rank 1 is not there"
    assert status == 1, said
    assert f"error: {fault}" in said
    assert "in fail" in said
    assert stored.info.status == "FAILED"
    assert stored.data.tags["paceline.error"].startswith(fault)
    assert "in fail" in stored.data.tags["paceline.error"]
    assert state.is_failed()
    assert fault in state.message
    assert (newest_valid_checkpoint(directory / "checkpoints") is not None) == (place == "validation_step")


@pytest.mark.slow
def test_a_test_that_fails_on_one_rank_alone_leaves_a_finished_run_with_the_reason(run):
    status, out, said, directory, stored, state = run("test_step")
    assert status == 0, said
    reason = "rank 1: FileNotFoundError: test_step: a file of rank 1 is not there"
    summary = json.loads(out.splitlines()[-1])
    assert f"test_step ({reason})" in summary["not_measured"]
    assert summary["metrics"].keys() == {"train/loss", "val/accuracy"}
    assert summary["train"]["restarts"] == []
    assert f"test_step: {reason}" in said
    assert stored.info.status == "FINISHED"
    assert state.is_completed()
    logs = MlflowClient(Environment().tracking_uri).download_artifacts(stored.info.run_id, "logs/rank-1.txt")
    assert "in fail" in Path(logs).read_text()
    assert newest_valid_checkpoint(directory / "checkpoints") is not None
