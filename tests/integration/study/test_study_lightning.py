"""A study of own Lightning code as a user runs it: real Prefect server, MLflow server, Dask workers and ranks."""

from functools import partial
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

WORKERS, PRECISION = "data.init_args.num_workers=0,1", "execution.precision=32-true,bf16-mixed"
SHORT = ["trainer.max_epochs=1", "speedup.max_seconds=3"]


@pytest.fixture
def study(call_own):
    """Runs a study of the example; returns its JSON and what it said."""
    return partial(call_own, "study")


@pytest.mark.slow
def test_arms_of_own_code_are_compared_where_they_do_the_same_work(study, mlflow_server, tmp_path):
    summary, _ = study("--axis", WORKERS, "--repeats", "1")
    base, faster = summary["arms"]
    assert all(arm["num_failed"] == 0 and arm["samples_per_second"] > 0 for arm in (base, faster))
    assert (base["group"], base["ratio"], faster["matches"]) == ("", None, True)
    assert (faster["ratio"] or 1) > 0, "None where other work disturbed the baseline"
    assert base["score_name"] == faster["score_name"] == "val_loss"
    assert base["score"] == faster["score"], "workers read the same samples in the same order"
    assert faster["parity"] == "undecided", "one repeat decides nothing"

    client = MlflowClient(mlflow_server.url)
    parent, arm = (client.get_run(run_id) for run_id in (summary["run_id"], faster["run_id"]))
    assert (parent.info.status, arm.info.status) == ("FINISHED", "FINISHED")
    assert arm.data.tags["mlflow.parentRunId"] == summary["run_id"]
    assert arm.data.metrics["val_loss"] == pytest.approx(faster["score"])
    assert arm.data.metrics["time/end_to_end_seconds"] > arm.data.metrics["time/epoch_seconds"] > 0
    page = client.download_artifacts(summary["run_id"], "report.html", str(tmp_path))
    assert "as your module logged it last" in Path(page).read_text()
    runs = Environment().root / "runs"
    assert (runs / summary["run_id"] / "code" / "prose" / "gpt.py").exists()


@pytest.mark.slow
def test_executions_of_own_code_are_compared_with_the_first(study, mlflow_server):
    summary, _ = study("--axis", "execution.num_devices=1,2", "--axis", PRECISION, "--repeats", "1", *SHORT)
    arms = {tuple(arm["execution"].values()): arm for arm in summary["arms"]}
    assert arms.keys() == {("1", "32-true"), ("1", "bf16-mixed"), ("2", "32-true"), ("2", "bf16-mixed")}
    assert all(arm["num_failed"] == 0 and arm["samples_per_second"] > 0 and arm["matches"] for arm in arms.values())
    run = MlflowClient(mlflow_server.url).get_run(arms["2", "bf16-mixed"]["run_id"])
    assert run.data.metrics["val_loss"] == pytest.approx(arms["2", "bf16-mixed"]["score"])


@pytest.mark.slow
def test_models_of_different_depth_are_compared_by_what_they_reach(study):
    summary, _ = study("--axis", "model.init_args.depth=1,2", "--repeats", "1", *SHORT)
    shallow, deep = summary["arms"]
    assert all(arm["num_failed"] == 0 and arm["samples_per_second"] > 0 for arm in (shallow, deep))
    assert [arm["group"] for arm in summary["arms"]] == [f"model.init_args.depth={depth}" for depth in (1, 2)]
    assert (shallow["ratio"], deep["ratio"]) == (None, None), "other work has no speedup"
    assert shallow["score"] != deep["score"]


@pytest.mark.slow
def test_the_first_training_ends_a_study_that_names_a_metric_of_nobody(study):
    answer, _ = study("--axis", PRECISION, "--maximize", "val_acc", "trainer.max_epochs=1", status=2)
    assert answer["setting"] == "--maximize"
    assert "val_loss" in answer["hint"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--axis", "execution.compile=off,graph"], "execution.compile"),
        (["--axis", "model.init_args.widht=8,16"], "model.init_args.widht"),
        (["--axis", "trainer.devices=1,2"], "trainer.devices"),
        (["--axis", PRECISION, "--target", "0.9"], "--target"),
    ],
)
def test_what_a_study_of_own_code_cannot_do_is_refused_before_any_work(study, tmp_path, arguments, setting):
    answer, _ = study(*arguments, status=2)
    assert answer["setting"] == setting
    assert answer["hint"]
    assert not (tmp_path / "data").exists()
