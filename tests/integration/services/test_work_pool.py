"""Deployments of infra/prefect.yaml on a real Prefect server, and a real process worker that runs them."""

import os
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.conf.load import load
from tests.support.deployments import SHORT, Deployments
from tests.support.jobs import PLANTED
from tests.support.lost_power import GUARDIAN, family_of, guardians, kill, mlflow_run, status_of
from tests.support.patience import SECONDS, until

ROOT = Path(__file__).parents[3]
FILE = ROOT / "infra" / "prefect.yaml"
DEPLOYMENTS = {"run": "paceline-run/nightly", "study": "paceline-study/weekly", "predict": "paceline-predict/incoming"}
TINY = load("digits", [*SHORT, "speedup.baseline=none", "track.experiment=pool", "cluster.num_workers=1"])
STRATEGY = {"queue": "ENQUEUE", "skip": "CANCEL_NEW", "cancel-oldest": None}


class Pool(Deployments):
    """What was deployed, and its worker."""

    def __init__(self, url, environment, directory):
        super().__init__(url)
        self.path = environment["PYTHONPATH"]
        self._environment = environment
        self._directory = directory

    def prefect(self, *arguments):
        """Prefect's own command line."""
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(
            command, env=self._environment, cwd=self._directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_worker(self, **environment):
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "paceline", "--type", "process"]
        with (self._directory / "worker.log").open("wb") as log:
            known = self._environment | environment
            return subprocess.Popen(command, env=known, cwd=self._directory, stdout=log, stderr=log)

    def deployment(self, role):
        return self.find(DEPLOYMENTS[role])

    def begin_role(self, role, due=None, **parameters):
        return self.begin(self.deployment(role), parameters, due)


@pytest.fixture(scope="module")
def pool(prefect_url, tmp_path_factory):
    """Everything of the file, deployed as its head says, from a folder that has nothing to do with the repository."""
    directory = tmp_path_factory.mktemp("pool")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PREFECT_API_URL": prefect_url, "PYTHONPATH": path, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    found = Pool(prefect_url, environment, directory)
    found.prefect("work-pool", "create", "paceline", "--type", "process")
    found.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(FILE))
    return found


@pytest.fixture
def worker(pool):
    """It ends with the test: the next one has a worker of its own, and each run goes to the first that asks."""
    process = pool.start_worker()
    yield process
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # it asks its server on the way out, for minutes on a busy machine
        process.kill()
        process.wait()


def test_the_deployments_are_forms_with_help_and_refuse_what_is_wrong(pool):
    fields = {"run": "Config", "study": "StudyRequest", "predict": "PredictRequest"}
    for role, kind in fields.items():
        found = pool.deployment(role)
        assert found["work_pool_name"] == "paceline"
        assert found["pull_steps"] == []
        (schedule,) = found["schedules"]
        assert not schedule["active"]
        assert schedule["schedule"]["timezone"] == "Europe/Zurich"
        helped = found["parameter_openapi_schema"]["definitions"][kind]["properties"]
        unhelped = [name for name, field in helped.items() if not field.get("description") and "$ref" not in str(field)]
        assert unhelped == []
        (policy,) = [tag.removeprefix("overlap:") for tag in found["tags"] if tag.startswith("overlap:")]
        options = found["concurrency_options"]
        assert (options and options["collision_strategy"]) == STRATEGY[policy]
        assert found["global_concurrency_limit"]["limit"] == 1
    request = pool.deployment("study")["parameters"]["request"]
    for wrong in ({"repeats": 0}, {"target": 2}, {"axes": {"execution.precision": "all"}}, {"arms": 3}):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            pool.begin_role("study", request=request | wrong)
        assert refused.value.response.status_code == 409, wrong


def test_the_file_says_what_the_preset_says():
    deployments = yaml.safe_load(FILE.read_text())["deployments"]
    assert Config(**deployments[0]["parameters"]["config"]) == load("digits")
    policies = {tag for one in deployments for tag in one["tags"]} - {"paceline"}
    assert policies <= {f"overlap:{policy}" for policy in Overlap.__args__}


@pytest.mark.slow
def test_a_worker_runs_them_to_their_end_and_what_came_due_while_there_was_none(pool, request):
    tiny = TINY.model_dump(mode="json")
    run = pool.begin_role("run", due=datetime.now(UTC) - timedelta(hours=1), config=tiny)
    until(lambda: pool.state(run)["name"] == "Late", "late run", seconds=60)
    request.getfixturevalue("worker")
    assert pool.end_of(run)["type"] == "COMPLETED"
    client = MlflowClient(Environment().tracking_uri)
    experiment = client.get_experiment_by_name("pool").experiment_id

    def found(role, flow_run):
        tags = f"tags.`paceline.role` = '{role}' and tags.`prefect.flow_run_id` = '{flow_run}'"
        (only,) = client.search_runs([experiment], tags)
        return only

    trained = found("run", run)
    assert trained.info.status == "FINISHED"
    # A network that has learned nothing may tell other classes in bf16, and is then not predicted with.
    overrides = ["track.experiment=pool", "execution.precision=32-true"]
    request = {"model": trained.info.run_id, "source": "digits", "overrides": overrides}
    prediction = pool.begin_role("predict", request=request)
    wrong = pool.begin_role("predict", request=request | {"model": "models:/none@champion"})
    assert pool.end_of(prediction)["type"] == "COMPLETED"
    predicted = found("predict", prediction)
    assert predicted.info.status == "FINISHED"
    assert predicted.data.metrics["predict/num_samples"] == 359
    state = pool.end_of(wrong)
    assert state["type"] == "FAILED"
    assert "models:/none@champion" in state["message"]


@pytest.mark.slow
def test_a_worker_runs_a_study(pool, worker):
    request = {
        "preset": "digits",
        "config": TINY.model_dump(mode="json"),
        "axes": {"execution.loading": ["foreground", "resident"]},
        "repeats": 1,
    }
    study = pool.begin_role("study", request=request)
    assert pool.end_of(study)["type"] == "COMPLETED"
    client = MlflowClient(Environment().tracking_uri)
    experiment = client.get_experiment_by_name("pool").experiment_id
    runs = client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{study}'")
    assert sorted(run.data.tags["paceline.role"] for run in runs) == ["arm", "arm", "study"]
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["worker", "worker and flow"])
def test_the_statuses_after_a_kill_of_a_worker_while_its_run_trains(pool, killed, tmp_path):
    """The run of a worker that is killed alone trains to its end."""
    home, hold = tmp_path / "home", tmp_path / "hold"
    hold.touch()
    path = os.pathsep.join([PLANTED, pool.path])
    family = []
    process = pool.start_worker(PACELINE_HOME=str(home), PYTHONPATH=path, HOLD=str(hold))
    try:
        config = load("digits", [*SHORT, "speedup.baseline=none", "execution.loading=foreground"])
        config = config.model_copy(update={"cluster": TINY.cluster, "track": TINY.track})
        run = pool.begin_role("run", config=config.model_dump(mode="json"))
        pool.wait_until_running(run)
        assert mlflow_run(home, run, "pool").info.status == "RUNNING"
        family = family_of(process)
        process.kill() if killed == "worker" else kill(process, but=GUARDIAN)
        process.wait()
        if killed == "worker":
            until(lambda: list(home.glob("runs/*/attempt-*/rank-0/log.txt")), "ranks")
            assert pool.state(run)["type"] == "RUNNING"
            hold.unlink()
        ends = ("FINISHED", "COMPLETED") if killed == "worker" else ("KILLED", "CRASHED")
        seconds = SECONDS if killed == "worker" else 60
        until(lambda: status_of(home, run, "pool") == ends[0], "status in MLflow", seconds)
        assert pool.end_of(run, seconds)["type"] == ends[1]
        until(lambda: not guardians(home), "end of the guardian", 60)
    finally:
        hold.unlink(missing_ok=True)
        for member in [*family_of(process), *family]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


@pytest.mark.slow
def test_a_schedule_can_be_switched_on_and_off(pool):
    name = DEPLOYMENTS["predict"]
    (schedule,) = pool.deployment("predict")["schedules"]
    pool.prefect("deployment", "schedule", "resume", name, schedule["id"])
    assert pool.deployment("predict")["schedules"][0]["active"]
    predict = pool.deployment("predict")
    until(lambda: pool.runs(predict, "SCHEDULED"), "runs that are due")
    pool.prefect("deployment", "schedule", "pause", name, schedule["id"])
    assert not pool.deployment("predict")["schedules"][0]["active"]
    until(lambda: not pool.runs(predict, "SCHEDULED"), "end of what had been planned", seconds=30)
