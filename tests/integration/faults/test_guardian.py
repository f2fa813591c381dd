"""After a kill -9 the true status is in MLflow and Prefect within a minute, without a command, and no process stays."""

import os
import signal
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient

from tests.support.deployments import LONG, SHORT, Deployments
from tests.support.lost_power import GUARDIAN, flow_of, guardians, kill, mlflow_run
from tests.support.patience import until

MINUTE = 60
UNPROMOTED = """
import os, signal
from paceline.conf.load import load
from paceline.flows.run import stages
from paceline.flows.run.flow import run_pipeline
stages.promote = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
run_pipeline(load("digits", {settings}))
"""
ENDLESS = [*SHORT, "speedup.baseline=none", "track.experiment=nights", "execution.checkpoint_steps=10"]
ENDLESS += [f"{section}.{name}={value}" for section, settings in LONG.items() for name, value in settings.items()]


def check_ended(api, run, home, state="CRASHED"):
    """Both say so within a minute, and the guardian ends."""
    until(lambda: mlflow_run(home, run).info.status == "KILLED", "status in MLflow", seconds=MINUTE)
    assert "--resume" in mlflow_run(home, run).data.tags["paceline.error"]
    assert api.end_of(run, seconds=MINUTE)["type"] == state
    until(lambda: not guardians(home), "end of the guardian", seconds=MINUTE)
    assert not list(home.glob("flow-runs/*/*"))


@pytest.mark.slow
def test_the_statuses_after_a_kill_of_a_command(program, server, tmp_path):
    up, home = server(), tmp_path / "home"
    known = {"PACELINE_HOME": str(home), "PREFECT_API_URL": up.url, "PREFECT_HOME": str(tmp_path / "client")}
    process = program("run", "digits", *ENDLESS, output=None, **known)
    try:
        until(lambda: list(home.glob("runs/*/checkpoints/*.ckpt")), "checkpoint", process=process)
        (record,) = home.glob("flow-runs/*/*")
    finally:
        process.kill()
        process.wait()
    check_ended(Deployments(up.url), record.name, home)
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    assert client.get_metric_history(mlflow_run(home, record.name).info.run_id, "train/loss")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["flow", "guardian, then flow", "serve and flow"])
def test_the_statuses_after_a_kill_of_a_night(server, serve, killed, tmp_path):
    served, home = serve(server()), tmp_path / "home"
    run = served.begin_with()
    assert mlflow_run(home, run).info.status == "RUNNING"
    if killed == "guardian, then flow":
        (first,) = guardians(home)
        first.kill()
        until(lambda: [guardian for guardian in guardians(home) if guardian.pid != first.pid], "next guardian")
    if killed.endswith("flow") and "serve" not in killed:
        flow_of(served).kill()
    else:
        kill(served.process, but=GUARDIAN)
    check_ended(served, run, home)


@pytest.mark.slow
def test_the_guardian_waits_for_a_prefect_that_is_away(server, serve, tmp_path):
    up, home = server(), tmp_path / "home"
    served = serve(up)
    run = served.begin_with()
    assert mlflow_run(home, run).info.status == "RUNNING"
    up.kill()
    kill(served.process, but=GUARDIAN)
    until(lambda: mlflow_run(home, run).info.status == "KILLED", "status in MLflow", seconds=MINUTE)
    for guardian in guardians(home):
        os.kill(guardian.pid, signal.SIGTERM)
    up.start()
    check_ended(served, run, home)


@pytest.mark.slow
def test_serve_ends_what_was_lost_with_its_guardian(server, serve, tmp_path):
    up, home = server(), tmp_path / "home"
    served = serve(up)
    run = served.begin_with()
    assert mlflow_run(home, run).info.status == "RUNNING"
    kill(served.process)
    until(lambda: not guardians(home), "end of the guardian")
    check_ended(serve(up), run, home)


@pytest.mark.slow
def test_a_model_is_promoted_after_a_kill_between_the_end_of_its_run_and_its_promotion(server, tmp_path):
    up, home = server(), tmp_path / "home"
    settings = [*SHORT, "speedup.baseline=none", "track.experiment=nights", "track.register=killed"]
    known = {"PACELINE_HOME": str(home), "PREFECT_API_URL": up.url, "PREFECT_HOME": str(tmp_path / "client")}
    command = [sys.executable, "-c", UNPROMOTED.format(settings=settings)]
    assert subprocess.run(command, env=os.environ | known, check=False).returncode == -signal.SIGKILL
    (record,) = home.glob("flow-runs/*/*")
    assert mlflow_run(home, record.name).info.status == "FINISHED"
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    until(lambda: client.get_registered_model("killed").aliases, "champion", seconds=MINUTE)
    assert Deployments(up.url).end_of(record.name, seconds=MINUTE)["type"] == "CRASHED"
    until(lambda: mlflow_run(home, record.name).data.tags.get("paceline.registered"), "tag", seconds=MINUTE)
    until(lambda: not guardians(home), "end of the guardian", seconds=MINUTE)
