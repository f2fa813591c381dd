"""Runs by schedule: a deployment of a real Prefect server, served by the program, with runs that overlap."""

import signal
import time

import httpx
import pytest
from mlflow.tracking import MlflowClient

from conf.site import Site

SHORT = ["data.image_size=16", "model.width=4", "model.depth=1", "recipe.num_epochs=1", "recipe.warmup_epochs=0"]
NIGHTLY = ["serve", "digits", *SHORT, "speedup.baseline=none", "track.experiment=served"]
LONG = {
    "recipe": {"num_epochs": 100_000, "schedule": "constant"},
    "execution": {
        "precision": "32-true",
        "memory_format": "contiguous",
        "loading": "resident",
        "num_threads": 1,
        "compile": "off",
    },
}
"""Endless, with nothing of the execution left open: else it would first search for minutes."""
SECONDS = 240


def until(found, what, seconds=SECONDS):
    """Wait for something to be found."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.5)
    raise TimeoutError(f"no {what} within {seconds} s")


class Served:
    """A deployment that is served."""

    def __init__(self, url, name, process):
        self._url = url
        self.process = process
        self._name = name

    @property
    def deployment(self):
        answer = httpx.get(f"{self._url}/deployments/name/paceline-run/{self._name}")
        return answer.json() if answer.status_code == 200 else None

    def begin(self, **sections):
        """A run now, with other settings; its id."""
        config = dict(self.deployment["parameters"]["config"])
        for name, settings in sections.items():
            config[name] = config[name] | settings
        body = {"parameters": {"config": config}}
        place = f"{self._url}/deployments/{self.deployment['id']}/create_flow_run"
        # 503: its sqlite is locked for the moment; Prefect's own client asks again too.
        answer = until(lambda: found if (found := httpx.post(place, json=body)).status_code != 503 else None, "answer")
        answer.raise_for_status()
        return answer.json()["id"]

    def state(self, run):
        return httpx.get(f"{self._url}/flow_runs/{run}").json()["state"]

    def wait(self, run, *types, seconds=SECONDS):
        ended = f"{types} of {run}"
        return until(lambda: state if (state := self.state(run))["type"] in types else None, ended, seconds)


@pytest.fixture
def serve(paceline, prefect_url):
    """Serves a deployment of a name until the test is over."""
    processes = []

    def begin(name, *arguments):
        process = paceline(*NIGHTLY, "--name", name, *arguments, PREFECT_RUNNER_POLL_FREQUENCY="1")
        processes.append(process)
        served = Served(prefect_url, name, process)
        until(lambda: served.deployment or process.poll() is not None, "deployment")
        assert process.poll() is None, process.communicate()[1]
        return served

    yield begin
    for process in processes:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.timeout(600)
def test_a_deployment_has_its_schedule_its_form_and_runs_now_and_then(serve, prefect_url):
    served = serve("nightly", "--cron", "0 2 * * *", "--timezone", "Europe/Zurich", "--overlap", "skip")
    deployment = served.deployment
    (schedule,) = deployment["schedules"]
    assert schedule["active"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("0 2 * * *", "Europe/Zurich")
    form = deployment["parameter_openapi_schema"]["definitions"]["Recipe"]["properties"]
    assert "Samples per device" in form["batch_size"]["description"]
    with pytest.raises(httpx.HTTPStatusError) as refused:
        served.begin(recipe={"batch_size": "many"})
    assert refused.value.response.status_code == 409

    first = served.begin()
    assert served.wait(first, "COMPLETED", "FAILED", "CRASHED")["type"] == "COMPLETED"
    client = MlflowClient(Site().tracking_uri)
    experiment = client.get_experiment_by_name("served").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{first}'")
    assert run.info.status == "FINISHED"

    endless = served.begin(**LONG)
    served.wait(endless, "RUNNING")
    skipped = served.begin()
    state = served.wait(skipped, "CANCELLED", "RUNNING", "COMPLETED")
    assert (state["type"], state["message"]) == ("CANCELLED", "Deployment concurrency limit reached.")
    running = until(lambda: client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{endless}'"), "MLflow run")
    served.process.send_signal(signal.SIGTERM)
    served.process.communicate(timeout=90)
    assert served.process.returncode == 0
    assert served.deployment["paused"]
    assert client.get_run(running[0].info.run_id).info.status == "KILLED"


@pytest.mark.slow
def test_the_newest_run_goes_first_where_the_policy_says_so(serve):
    served = serve("newest", "--cron", "0 2 * * *", "--timezone", "UTC", "--overlap", "cancel-oldest", "--catch-up")
    older = served.begin(**LONG)
    served.wait(older, "RUNNING")
    newer = served.begin()
    assert served.wait(newer, "COMPLETED", "FAILED", "CRASHED", "CANCELLED")["type"] == "COMPLETED"
    assert served.wait(older, "CANCELLED", "COMPLETED", "FAILED", "CRASHED")["type"] == "CANCELLED"
    served.process.terminate()
    served.process.communicate(timeout=60)
    assert not served.deployment["paused"], "what comes due meanwhile is to be caught up with"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--cron", "every night"], {}, "is no schedule"),
        (["--cron", "0 2 * * *", "--timezone", "Zurich"], {}, "is no time zone"),
        (["--cron", "0 2 * * *"], {"PREFECT_API_URL": ""}, "needs a Prefect server"),
        (["--cron", "0 2 * * *", "--overlap", "never"], {}, "invalid choice"),
    ],
)
def test_what_cannot_be_served_is_refused(paceline, arguments, environment, said):
    process = paceline(*NIGHTLY, *arguments, **environment)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert said in stderr.splitlines()[-1]
