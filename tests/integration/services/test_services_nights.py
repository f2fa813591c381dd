"""All of it at once, on the services of infra/up: three scheduled runs, the alarm, the comparison, the end.

About three and a half minutes, nearly all of which is waiting: cron knows minutes, the slow run must last longer than
one to be overlapped, and the alarm is for when it has ended. One test in place of five mocks.
"""

import base64
import json
import re
import zlib

import httpx
import psutil
import pytest
from mlflow.tracking import MlflowClient

from infra.services.daemon import MARK
from tests.support.jobs import planted
from tests.support.nights import NIGHT, repeat, set_alarm, web_hook
from tests.support.patience import until
from tests.support.services import NAMES

SLOW = "input=0.03"
"""Seconds for each of 1,293 samples in two epochs: longer than a minute."""
ENDED = ("COMPLETED", "FAILED", "CRASHED")


class Nights:
    """The deployment's runs, as Prefect has them."""

    def __init__(self, known, process):
        self._process = process
        self._url = known["PREFECT_API_URL"]
        self._user = tuple(known["PREFECT_API_AUTH_STRING"].split(":"))

    def ask(self, path, wanted):
        assert self._process.poll() is None, self._process.communicate()[1]
        answer = httpx.post(f"{self._url}/{path}/filter", json=wanted, auth=self._user, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def runs(self, *states, after=None):
        """Those in these states, in the order of the schedule; of those after a run."""
        since = after["expected_start_time"] if after else ""
        wanted = {"deployments": {"name": {"any_": ["nights"]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found = self.ask("flow_runs", wanted)
        return [run for run in found if run["state_type"] in states and run["expected_start_time"] > since]

    def artifact(self, run, key):
        """The text of a run's artifact."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}, "key": {"any_": [key]}}}
        (found,) = self.ask("artifacts", wanted)
        return found["data"]

    def state(self, run):
        """The state of a run now."""
        return self.ask("flow_runs", {"flow_runs": {"id": {"any_": [run["id"]]}}})[0]["state"]


@pytest.fixture
def known(services, monkeypatch):
    """The services' environment, in this process too."""
    for name, value in services.environment().items():
        monkeypatch.setenv(name, value)
    return services.environment()


@pytest.fixture
def nights(known, program):
    """A deployment that is served: every minute, a run that overlaps with another one is skipped."""
    cluster = ["cluster.kind=address", f"cluster.address={known['PACELINE_SCHEDULER']}"]
    schedule = ["--cron", "* * * * *", "--timezone", "Europe/Zurich", "--overlap", "skip", "--name", "nights"]
    process = program("serve", *NIGHT, *cluster, *schedule, **known, PREFECT_RUNNER_POLL_FREQUENCY="1")
    yield Nights(known, process)
    process.terminate()
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert known["PREFECT_API_AUTH_STRING"].split(":")[1] not in stderr


def run_of(client, flow):
    """The MLflow run of a flow run."""
    experiment = client.get_experiment_by_name("nights")
    found = client.search_runs([experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{flow['id']}'")
    return found[0] if found else None


def three_nights(nights, client, known):
    """A good run, a slow one and one that overlaps with it, as the schedule starts them."""
    good = until(lambda: nights.runs(*ENDED), "run that has ended")[0]  # a slow machine skips what comes meanwhile
    assert nights.state(good)["type"] == "COMPLETED", nights.state(good)["message"]
    repeat(client, run_of(client, good).info.run_id, 7)
    until(lambda: not nights.runs("RUNNING", "PENDING"), "moment without a run")
    with planted(known["PACELINE_SCHEDULER"], SLOW, BLIND="yes"):
        slow = until(lambda: nights.runs("RUNNING"), "run that is slow")[0]
        skipped = until(lambda: nights.runs("CANCELLED", after=slow), "run that is skipped")[0]
        assert nights.state(slow)["type"] == "RUNNING", "the other one has waited for it"
        ended = until(lambda: (state := nights.state(slow))["type"] in ENDED and state, "end of the slow run")
    assert ended["type"] == "COMPLETED", ended["message"]
    return good, slow, skipped


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_nights_an_alarm_and_a_comparison(services, known, nights, program):
    client = MlflowClient(known["MLFLOW_TRACKING_URI"], known["MLFLOW_TRACKING_URI"])
    with web_hook() as (address, received):
        set_alarm(address)
        good, slow, skipped = three_nights(nights, client, known)
        worse_than_before = "nights is worse than before: accuracy"
        until(lambda: any(said["text"].startswith(worse_than_before) for said in received), "message of the alarm")
    assert list((services.home.work / "prefect" / "concurrency_leases").iterdir()), "they outlive the server"
    assert all(run["auto_scheduled"] for run in (good, slow, skipped))
    assert len({run["expected_start_time"][:16] for run in (good, slow, skipped)}) == 3, "each in a minute of its own"
    assert nights.state(skipped)["message"] == "Deployment concurrency limit reached."
    assert run_of(client, skipped) is None

    assert "data wait" in nights.artifact(slow, "regression")
    usual, worse = run_of(client, good), run_of(client, slow)
    assert "accuracy" in worse.data.tags["paceline.regression"]  # what is slow alone may be laid to others
    registered = {version.run_id for version in client.search_model_versions("name='digits-nights'")}
    champion = client.get_model_version_by_alias("digits-nights", "champion").run_id
    assert {usual.info.run_id, champion} <= registered  # on a slow machine the schedule has another good run meanwhile
    assert worse.info.run_id not in registered
    check_comparison(client, known, program, usual, worse)


def check_comparison(client, known, program, *runs):
    """The page that `paceline compare` names is there, and holds the runs."""
    compare = program("compare", *[run.info.run_id for run in runs], "--json", **known)
    stdout, stderr = compare.communicate(timeout=60)
    assert compare.returncode == 0, stderr
    page = json.loads(stdout.splitlines()[-1])["view"]
    assert page.startswith(f"{known['MLFLOW_TRACKING_URI']}/#/experiments/")
    key = re.search(r"viewStateShareKey=(\w+)", page)[1]
    state = client.get_experiment(runs[0].info.experiment_id).tags[f"mlflow.sharedViewState.{key}"]
    shown = zlib.decompress(base64.b64decode(state.removeprefix("deflate;"))).decode()
    assert all(run.info.run_id in shown for run in runs)
    user = (known["MLFLOW_TRACKING_USERNAME"], known["MLFLOW_TRACKING_PASSWORD"])
    assert "<title>MLflow</title>" in httpx.get(page.partition("#")[0], auth=user).text


def test_the_end_leaves_no_process_and_keeps_the_data(services):
    assert len(services.family()) > len(NAMES)
    ended = services.down()
    assert ended.returncode == 0, ended.stderr
    assert all(name in ended.stderr for name in NAMES)
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(f"{services.home.root}#"):
                marked.append(process)
        except psutil.Error:
            continue
    assert marked == services.family() == []
    again = services.down()
    assert (again.returncode, again.stderr.strip().endswith("runs")) == (0, True)
    assert (services.home.database / "data" / "PG_VERSION").exists()
