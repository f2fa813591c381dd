import logging
import subprocess
import sys
from contextlib import closing, suppress

import pytest
from mlflow import MlflowClient
from prefect.logging import disable_run_logger

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.lifecycle import mlflow_run
from paceline.flows.lifecycle.mlflow_run import close_abandoned_runs
from paceline.tasks.metrics_file import FILE, MetricsFile
from paceline.tasks.names import Tag
from paceline.tasks.track.queries import FoundRun
from paceline.tasks.track.store import check_store

HOLD = "import sys, time; from pathlib import Path; from paceline.tasks.train.launch.run_lock import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Environment()


def test_a_run_whose_process_is_gone_is_killed_by_the_next_command_and_a_living_one_is_not(site, monkeypatch):
    config = load("digits")
    experiment_id = check_store(site.tracking_uri, config.track.experiment, site.artifact_root)
    client = MlflowClient(site.tracking_uri)
    gone, living, elsewhere = [], [], []
    finish = mlflow_run.tracking.finish
    with disable_run_logger():
        monkeypatch.setattr(mlflow_run, "MIN_AGE_SECONDS", 0.0)
        monkeypatch.setattr(mlflow_run.tracking, "finish", lambda *arguments: None)  # as after kill -9
        for runs in (gone, living, elsewhere):
            with mlflow_run.new_run(config, site, experiment_id, "study") as study:
                runs.append(study.run_id)
                with mlflow_run.nested_run(study, config, "an arm") as arm:
                    runs.append(arm.run_id)
        monkeypatch.setattr(mlflow_run.tracking, "finish", finish)
        for run_id in elsewhere:
            client.set_tag(run_id, "paceline.host", "another-host")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(site.root / "runs" / living[0])], stdout=subprocess.PIPE, text=True
        )
        with holder:
            assert holder.stdout.readline().strip() == "held"
            directory = site.root / "runs" / gone[1] / "attempt-0" / "rank-0"
            directory.mkdir(parents=True)
            with closing(MetricsFile(directory / FILE)) as untold:
                untold.log({"train/loss": 0.5}, 7)
            close_abandoned_runs(site, config.track.experiment)
            holder.kill()
    statuses = [[client.get_run(run_id).info.status for run_id in runs] for runs in (gone, living, elsewhere)]
    assert statuses == [["KILLED"] * 2, ["RUNNING"] * 2, ["RUNNING"] * 2]
    assert [metric.step for metric in client.get_metric_history(gone[1], "train/loss")] == [7]
    assert f"paceline study --resume {gone[0]}" in client.get_run(gone[0]).data.tags["paceline.error"]


@pytest.mark.parametrize("tag", ["../../elsewhere", "/elsewhere", "a/b", ""])
def test_a_tag_of_the_store_leads_nowhere(site, tag):
    run = FoundRun(run_id="a" * 32, name="", status="RUNNING", start_time=0, tags={Tag.PARENT: tag})
    assert mlflow_run._directory(site, run) == site.root / "runs" / run.run_id


def test_a_resume_with_other_code_or_versions_is_told_and_recorded(site, monkeypatch):
    config = load("digits")
    experiment_id = check_store(site.tracking_uri, config.track.experiment, site.artifact_root)
    client, told = MlflowClient(site.tracking_uri), []
    logger = logging.getLogger("resumes")
    monkeypatch.setattr(logger, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(mlflow_run, "get_run_logger", lambda: logger)

    def attempt(resume):
        with suppress(KeyboardInterrupt), mlflow_run.open_run("run", config, site, experiment_id, "w", resume) as run:
            attempt.run_id = run.run_id
            raise KeyboardInterrupt
        return client.get_run(attempt.run_id).data.tags

    first = attempt(None)
    assert attempt(attempt.run_id).get(Tag.RESUMED_WITH) is None
    assert told == []
    versions = mlflow_run.package_versions()
    monkeypatch.setattr(mlflow_run, "package_versions", lambda: versions | {"torch": "9.9"})
    last = attempt(attempt.run_id)
    assert last[Tag.VERSIONS] == first[Tag.VERSIONS], "of its start"
    assert last[Tag.RESUMED_WITH].startswith(f"{first[Tag.VERSIONS]} -> ")
    assert "torch 9.9" in last[Tag.RESUMED_WITH]
    (line,) = told
    assert last[Tag.RESUMED_WITH] in line
    client.set_tag(attempt.run_id, Tag.CODE, "code 000000000000")
    assert f"code 000000000000 -> {first[Tag.CODE]}" in attempt(attempt.run_id)[Tag.RESUMED_WITH]
    client.delete_tag(attempt.run_id, Tag.CODE)
    assert "code" not in attempt(attempt.run_id)[Tag.RESUMED_WITH], "a run of an older Paceline has none"
