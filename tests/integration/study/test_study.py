"""Studies, advice and comparisons as a user runs them: real Prefect server, MLflow server, Dask cluster and ranks."""

import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from tests.support.damage import damage_newest_set
from tests.support.outputs import told_by
from tests.support.patience import until

TINY = [
    "data.image_size=12",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=4",
    "recipe.warmup_epochs=0.5",
    "recipe.batch_scaling=strong",
    "speedup.max_seconds=3",
    "speedup.competent_loop=false",
]
AXIS = ["--axis", "execution.precision=32-true,bf16-mixed"]


@pytest.fixture(scope="module")
def run(paceline, mlflow_server):
    """Runs a command to its end; returns its JSON and what it told."""

    def to_the_end(*arguments, status=0):
        process = paceline(*arguments, "--json", MLFLOW_TRACKING_URI=mlflow_server.url)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == status, stderr
        return (told_by(arguments[0], stdout) if stdout else None), stderr

    return to_the_end


class Studied(NamedTuple):
    """What is left of a study of four arms, two of which crash, that was interrupted and went on."""

    interrupted: list[Run]
    parent: Run
    summary: dict[str, Any]
    told: str


@pytest.fixture(scope="module")
def studied(paceline, run, mlflow_server):
    arguments = ["study", "digits", *TINY, *AXIS, "--axis", "recipe.learning_rate=0.1,1e30", "--repeats", "1"]
    process = paceline(*arguments, "track.experiment=studied", MLFLOW_TRACKING_URI=mlflow_server.url)
    client = MlflowClient(mlflow_server.url)
    run_id = wait_for_first_arm(client, process, "studied")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    interrupted, parent = children(client, run_id), client.get_run(run_id)
    damage_newest_set(Environment().root)
    return Studied(interrupted, parent, *run("study", "--resume", run_id))


def wait_for_first_arm(client, process, experiment):
    """Until the study has noted its first training as done; the study's id."""

    def noted():
        found = client.get_experiment_by_name(experiment)
        for study in client.search_runs([found.experiment_id], "tags.`paceline.role` = 'study'") if found else []:
            notes = Environment().root / "runs" / study.info.run_id / "arms.jsonl"
            if notes.exists() and notes.read_text().endswith("\n"):
                return study.info.run_id
        return None

    return until(noted, "first training", process=process)


def children(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    return [run for run in found if "paceline.superseded_by" not in run.data.tags]  # disturbed by other work, repeated


def artifact(client, run_id, name, folder):
    return Path(client.download_artifacts(run_id, name, str(folder))).read_text()


@pytest.mark.slow
def test_a_study_whose_trainings_all_fail_fails_with_its_report(run, mlflow_server):
    own = [*TINY, *AXIS, "recipe.learning_rate=1e30", "track.experiment=failing"]
    _, stderr = run("study", "digits", *own, "--repeats", "1", status=1)
    assert "error: all 2 trainings failed; the last error: " in stderr
    assert "is nan" in stderr
    client = MlflowClient(mlflow_server.url)
    experiment = client.get_experiment_by_name("failing").experiment_id
    (study,) = client.search_runs([experiment], "tags.`paceline.role` = 'study'")
    assert study.info.status == "FAILED"
    assert study.data.metrics["study/num_failed"] == 2
    assert "report.html" in [file.path for file in client.list_artifacts(study.info.run_id)]


def test_a_study_reports_a_crashed_arm_and_goes_on(studied, mlflow_server, tmp_path):
    summary, told = studied.summary, studied.told
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert len(arms) == 4
    crashed = [arm for name, arm in arms.items() if "learning_rate=1e30" in name]  # ids of runs may hold "1e30" too
    assert len(crashed) == 2
    assert all(arm["num_failed"] == 1 and "is nan" in arm["error"] for arm in crashed)
    assert all(arm["ratio"] is None and arm["accuracy"] is None for arm in crashed)
    whole = [arm for arm in arms.values() if arm not in crashed]
    assert all(arm["num_failed"] == 0 and arm["samples_per_second"] > 0 for arm in whole)
    faster = next(arm for arm in whole if arm["execution"]["execution.precision"] == "bf16-mixed")
    assert faster["matches"] is True
    assert (faster["ratio"] or 1) > 0, "None where other work disturbed the baseline"
    assert faster["low"] is None, "one repeat has no interval"
    assert "Failed, and left out" in told

    client = MlflowClient(mlflow_server.url)
    parent = client.get_run(summary["run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["study/num_failed"] == 2
    runs = children(client, summary["run_id"])
    ended = [run.info.status for run in runs if run.info.status != "KILLED"]
    assert sorted(ended) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    found = next(run for run in runs if run.info.run_id == faster["run_id"])
    assert found.data.metrics.get("speedup/ratio") == pytest.approx(faster["ratio"])
    assert found.data.tags["paceline.match"] == "True"
    page = artifact(client, summary["run_id"], "report.html", tmp_path)
    for question in ("How much faster", "Compared with what?", "Where did the time go?", "What limits it?"):
        assert question in page
    study = json.loads(artifact(client, summary["run_id"], "study.json", tmp_path))
    difference = study["differences"][0]
    parts = sum(item["seconds"] - item["baseline_seconds"] for item in difference["items"])
    assert parts == pytest.approx(difference["difference"])


def test_an_interrupted_study_goes_on_where_it_was(studied, mlflow_server):
    assert studied.parent.info.status == "KILLED"
    before = {run.info.run_id for run in studied.interrupted if run.info.status == "FINISHED"}
    assert before

    assert studied.summary["run_id"] == studied.parent.info.run_id
    client = MlflowClient(mlflow_server.url)
    assert client.get_run(studied.summary["run_id"]).info.status == "FINISHED"
    assert "is damaged" in studied.told, "a resume checks the content of the prepared set"
    after = {run_id for arm in studied.summary["arms"] for run_id in arm["run_ids"]}
    assert before <= after, "what was trained is not trained again"


@pytest.fixture(scope="module")
def predicted(run):
    """An advice for two devices, and the run that tried them: its summary and what it told."""
    common = [*TINY, "track.experiment=predicted"]
    advice, _ = run("advise", "digits", *common, "--devices", "2,4", "--deadline", "3600")
    return advice, *run("run", "digits", *common, "execution.num_devices=2")


@pytest.mark.slow
def test_an_advice_predicts_and_ranks(predicted):
    advice, _, _ = predicted
    assert [(p["num_devices"], p["scaling"]) for p in advice["predictions"]] == [
        (2, "strong"),
        (4, "strong"),
        (2, "weak"),
        (4, "weak"),
    ]
    assert all(p["low"] < p["ratio"] < p["high"] for p in advice["predictions"])
    assert advice["link"]["source"] == "measured"
    assert advice["cheapest"]["num_devices"] == 1
    settings = [move["setting"] for move in advice["advice"]]
    assert "recipe.batch_size=256" in settings
    assert any(setting.startswith("execution.precision") for setting in settings)
    assert "faster input" in settings


@pytest.mark.slow
def test_a_prediction_is_held_against_the_first_run_that_tries_it(predicted, mlflow_server, tmp_path):
    advice, measured, told = predicted
    if measured["speedup"]["cause"] == "contaminated machine":
        assert measured["prediction"] is None, "a disturbed measurement says nothing of a prediction"
        pytest.skip(f"other work disturbed the measurement: {measured['speedup']['verdict']}")
    assert measured["prediction"]["prediction_run_id"] == advice["run_id"]
    assert measured["prediction"]["measured"] == pytest.approx(2 * measured["speedup"]["efficiency"])
    assert "was predicted" in told
    client = MlflowClient(mlflow_server.url)
    metrics = client.get_run(measured["run_id"]).data.metrics
    assert metrics["prediction/error"] == pytest.approx(
        advice["predictions"][0]["ratio"] / measured["prediction"]["measured"] - 1
    )
    assert "Predicted before" in artifact(client, measured["run_id"], "report.html", tmp_path)


@pytest.mark.slow
def test_runs_are_compared_where_they_did_the_same_work(run, studied, predicted, mlflow_server, tmp_path):
    summary = studied.summary
    advice, measured, _ = predicted
    whole = [arm for arm in summary["arms"] if arm["num_failed"] == 0]
    single = next(arm for arm in whole if arm["execution"]["execution.precision"] == "32-true")
    page = tmp_path / "compared.html"
    comparison, _ = run("compare", single["run_id"], measured["run_id"], "--html", str(page))
    base, row = comparison["runs"]
    assert base["is_base"]
    assert row["match"]["matches"], row["match"]
    assert row["match"]["scaling"] == "strong"
    if not any("disturbed" in one["why_no_ratio"] for one in comparison["runs"]):
        assert row["ratio"] > 0
    assert comparison["view"].startswith(mlflow_server.url)
    assert "execution.num_devices" in page.read_text()
    newest, _ = run("compare", "--experiment", "studied", "--last", "2")
    assert len({row["run_id"] for row in newest["runs"]}) == 2
    assert summary["run_id"] not in {row["run_id"] for row in newest["runs"]}, "a study is no training"

    foreign, told = run("compare", single["run_id"], advice["run_id"])
    assert foreign["runs"][1]["ratio"] is None
    assert "not comparable: nothing is known of one of them" in told


@pytest.mark.slow
def test_a_named_link_needs_one_device_alone_and_claims_less(run):
    common = [*TINY, "track.experiment=given"]
    advice, _ = run("advise", "digits", *common, "--devices", "2", "--link", "ethernet25")
    assert advice["link"]["name"] == "ethernet25"
    assert advice["profile"]["company"] is None, "two devices were not tried"
    found = advice["predictions"][0]
    assert found["high"] / found["low"] > 1.15


@pytest.mark.slow
def test_an_advice_limits_its_preparation_as_a_run_does(run):
    link = ["--devices", "2", "--link", "ethernet25"]
    _, told = run("advise", "digits", *TINY, *link, "data.image_size=13", "limits.prepare_seconds=0.001", status=1)
    assert "limits.prepare_seconds=0.001" in told


@pytest.mark.slow
def test_the_views_columns_exist_in_the_store(run, predicted, mlflow_server):
    from paceline.tasks.track.ui_views import view_of_runs

    advice, measured, _ = predicted
    client = MlflowClient(mlflow_server.url)
    data = client.get_run(measured["run_id"]).data
    known = {"metrics": set(data.metrics), "params": set(data.params), "tags": set(data.tags)}
    for column in view_of_runs([measured["run_id"]]).columns:
        kind, _, name = column.partition(".")
        assert name.strip("`") in known[kind], column
    compared, _ = run("compare", measured["run_id"], advice["run_id"])
    key = compared["view"].rpartition("viewStateShareKey=")[2]
    experiment = client.get_experiment_by_name("predicted")
    assert f"mlflow.sharedViewState.{key}" in experiment.tags
