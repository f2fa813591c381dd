"""A sweep over own Lightning code as a user runs it: real servers, Dask workers, ranks and Optuna."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.support.own_lightning import SMALL, values_of_script

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

RATES = ["--param", "model.init_args.learning_rate=[0.003,1e-9]", "--sampler", "grid"]
MINIMIZE = ["--minimize", "val_loss"]


@pytest.fixture
def sweep(call_own):
    """Runs a sweep of the example; returns its JSON."""
    return lambda *arguments, **options: call_own("sweep", *arguments, **options)[0]


@pytest.mark.slow
def test_the_trial_with_the_smallest_loss_is_the_best(sweep, mlflow_server, tmp_path):
    summary = sweep(*RATES, "--minimize", "val_loss")
    trials = {trial["values"]["model.init_args.learning_rate"]: trial for trial in summary["trials"]}
    assert {rate: trial["status"] for rate, trial in trials.items()} == {0.003: "done", 1e-9: "done"}
    assert trials[0.003]["score"] < trials[1e-9]["score"]
    assert summary["best"]["overrides"] == ["model.init_args.learning_rate=0.003"]
    assert (summary["score_name"], summary["num_done"], summary["best"]["num_epochs"]) == ("val_loss", 2, None)
    client = MlflowClient(mlflow_server.url)
    parent, best = (client.get_run(run_id) for run_id in (summary["run_id"], summary["best"]["run_id"]))
    assert (parent.info.status, best.info.status) == ("FINISHED", "FINISHED")
    assert best.data.tags["mlflow.parentRunId"] == summary["run_id"]
    assert best.data.metrics["sweep/score"] == pytest.approx(best.data.metrics["val_loss"])
    assert parent.data.metrics["sweep/best_score"] == pytest.approx(summary["best"]["score"])
    page = Path(client.download_artifacts(summary["run_id"], "report.html", str(tmp_path))).read_text()
    assert "As your module logged it last." in page


@pytest.mark.slow
def test_settings_of_the_data_are_swept(sweep, mlflow_server):
    sizes = ["--param", "data.init_args.batch_size=[16,32]", "--sampler", "grid", "trainer.max_epochs=1"]
    summary = sweep(*sizes, *MINIMIZE)
    trials = {trial["values"]["data.init_args.batch_size"]: trial for trial in summary["trials"]}
    assert {size: trial["status"] for size, trial in trials.items()} == {16: "done", 32: "done"}
    client = MlflowClient(mlflow_server.url)
    steps = {size: len(client.get_metric_history(trial["run_id"], "train_loss")) for size, trial in trials.items()}
    assert steps[16] == pytest.approx(2 * steps[32], abs=1)
    assert summary["best"]["score"] == min(trial["score"] for trial in trials.values())


@pytest.mark.slow
def test_a_trial_whose_loss_is_not_finite_fails_alone(sweep):
    rates = ["--param", "model.init_args.learning_rate=[1e30,0.003]", "--sampler", "grid"]
    summary = sweep("trainer.max_epochs=1", *rates, "--minimize", "val_loss")
    trials = {trial["values"]["model.init_args.learning_rate"]: trial for trial in summary["trials"]}
    assert {rate: trial["status"] for rate, trial in trials.items()} == {1e30: "failed", 0.003: "done"}
    assert "val_loss" in trials[1e30]["error"]
    assert summary["best"]["overrides"] == ["model.init_args.learning_rate=0.003"]


@pytest.mark.slow
def test_trials_start_from_the_checkpoint_of_a_plain_script(sweep, mlflow_server, tmp_path):
    overrides = [*SMALL, f"data.init_args.directory={tmp_path / 'data'}", "trainer.max_steps=2"]
    values_of_script(tmp_path / "code", "config.yaml", tmp_path / "first", *overrides)
    (checkpoint,) = (tmp_path / "first").rglob("*.ckpt")
    steps = ["--param", "trainer.max_steps=[3,5]", "--sampler", "grid", "trainer.val_check_interval=1"]
    summary = sweep(f"ckpt_path={checkpoint}", *steps, *MINIMIZE)
    client = MlflowClient(mlflow_server.url)
    for trial in summary["trials"]:
        assert trial["status"] == "done", trial["error"]
        losses = client.get_metric_history(trial["run_id"], "train_loss")
        assert len(losses) == trial["values"]["trainer.max_steps"] - 2
    assert summary["num_done"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (RATES, "--minimize"),
        ([*RATES, "--minimize", "val_loss", "--pruner", "asha"], "--pruner"),
        (["--param", "model.init_args.widht=int(8,16)", "--minimize", "val_loss"], "model.init_args.widht"),
        (["--param", "execution.num_devices=[1,2]", "--minimize", "val_loss"], "--param"),
    ],
)
def test_what_a_sweep_of_own_code_cannot_do_is_refused_before_any_work(sweep, tmp_path, arguments, setting):
    answer = sweep(*arguments, status=2)
    assert answer["setting"] == setting
    assert answer["hint"]
    assert not (tmp_path / "data").exists()
