"""Runs by schedule: a deployment of a real Prefect server, served by the program, with runs that overlap."""

import os
import signal
import subprocess
import sys

import httpx
import pytest
from mlflow.tracking import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.deployment import deployment_of, schedule_of
from tests.support.deployments import LONG, SHORT, Deployments, Served
from tests.support.jobs import two_workers
from tests.support.listeners import listening
from tests.support.patience import until

NIGHTLY = ["serve", "digits", *SHORT, "speedup.baseline=none", "track.experiment=served"]


@pytest.fixture
def serve(paceline, prefect_url):
    """Serves a deployment of a name until the test is over."""
    processes = []

    def begin(name, *arguments):
        process = paceline(*NIGHTLY, "--name", name, *arguments, PREFECT_RUNNER_POLL_FREQUENCY="1")
        processes.append(process)
        return Served(prefect_url, name, process)

    yield begin
    for process in processes:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.slow
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
        served.begin_with(recipe={"batch_size": "many"})
    assert refused.value.response.status_code == 409

    first = served.begin_with()
    assert served.end_of(first)["type"] == "COMPLETED"
    client = MlflowClient(Environment().tracking_uri)
    experiment = client.get_experiment_by_name("served").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{first}'")
    assert run.info.status == "FINISHED"

    endless = served.begin_with(**LONG)
    served.wait_until_running(endless)
    skipped = served.begin_with()
    state = served.end_of(skipped)
    assert (state["type"], state["message"]) == ("CANCELLED", "Deployment concurrency limit reached.")
    running = until(lambda: client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{endless}'"), "MLflow run")
    served.process.send_signal(signal.SIGTERM)
    _, told = served.process.communicate(timeout=90)
    assert served.process.returncode == 0, told
    assert served.deployment["paused"]
    assert client.get_run(running[0].info.run_id).info.status == "KILLED", told


@pytest.mark.slow
def test_the_newest_run_goes_first_where_the_policy_says_so(serve):
    served = serve("newest", "--cron", "0 2 * * *", "--timezone", "UTC", "--overlap", "cancel-oldest", "--catch-up")
    older = served.begin_with(**LONG)
    served.wait_until_running(older)
    newer = served.begin_with()
    assert served.end_of(newer)["type"] == "COMPLETED"
    assert served.end_of(older)["type"] == "CANCELLED"
    served.process.terminate()
    served.process.communicate(timeout=60)
    assert not served.deployment["paused"], "what comes due meanwhile is to be caught up with"


HOSTILE = {"kind": "address", "tls": "off"}


def test_a_form_names_no_scheduler(prefect_url, tmp_path):
    """A flow run of a deployment, in a process like that of Prefect's runners and workers."""
    config = load("digits", SHORT)
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        deployment_of(config, "attacked", schedule_of("0 2 * * *", "UTC"), "queue").apply()
    api = Deployments(prefect_url)
    with listening(b"nothing", answers=True) as hostile:
        cluster = HOSTILE | {"address": hostile.address}
        run = api.begin(
            api.find("paceline-run/attacked"), {"config": config.model_dump(mode="json") | {"cluster": cluster}}
        )
        environment = {"PREFECT_API_URL": prefect_url, "PREFECT__FLOW_RUN_ID": run}
        engine = [sys.executable, "-m", "prefect.engine"]
        subprocess.run(engine, env=os.environ | environment, capture_output=True, timeout=120, check=False)
        state = api.state(run)
        assert (state["type"], hostile.num_connections) == ("FAILED", 0), state
    assert f"cluster.address={hostile.address} is not the scheduler of this host" in state["message"]


@pytest.mark.slow
def test_a_deployment_joins_the_scheduler_that_it_was_served_with_and_no_other(serve):
    with two_workers(tls="off") as address, listening(b"nothing", answers=True) as hostile:
        cluster = ["cluster.kind=address", f"cluster.address={address}", "cluster.tls=off"]
        served = serve("joining", *cluster, "--cron", "0 2 * * *", "--timezone", "UTC")
        attacked = served.begin_with(cluster={"address": hostile.address})
        assert served.end_of(attacked)["type"] == "FAILED"
        assert hostile.num_connections == 0
        assert served.end_of(served.begin_with())["type"] == "COMPLETED"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--cron", "every night"], {}, "is not a schedule"),
        (["--cron", "0 2 * * *", "--timezone", "Zurich"], {}, "is not a time zone"),
        (["--cron", "0 2 * * *"], {"PREFECT_API_URL": ""}, "needs a Prefect server"),
        (["--cron", "0 2 * * *", "--overlap", "never"], {}, "--overlap never is not valid"),
    ],
)
def test_what_cannot_be_served_is_refused(paceline, arguments, environment, said):
    process = paceline(*NIGHTLY, *arguments, **environment)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert said in stderr
