"""Credentials are planted wherever a user may have one, and then looked for in every byte that was written or said."""

import base64
import json
import os
import re
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from mlflow.tracking import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from paceline.conf.load import load
from paceline.flows.deployment import deployment_of, schedule_of
from tests.support.jobs import PLANTED

SMALL = ["data.image_size=16", "model.width=4", "model.depth=1", "recipe.num_epochs=1", "recipe.warmup_epochs=0"]
SMALL += ["speedup.baseline=none", "execution.max_restarts=0"]
ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "wJalr/XUtn+planted0",
    "MLFLOW_TRACKING_PASSWORD": "planted1-of-mlflow",
    "MLFLOW_TRACKING_USERNAME": "me",
    "PREFECT_API_AUTH_STRING": "me:planted2-of-prefect",
    "DATABASE_URL": "postgresql://me:planted3-of-a-database@db/x",
}
SECRETS = ["wJalr/XUtn+planted0", *(f"planted{number}" for number in range(1, 9))]
LOUD = (
    "https://me:planted4@store.example/x?X-Amz-Signature=planted5, {AWS_SECRET_ACCESS_KEY}, "
    "{MLFLOW_TRACKING_PASSWORD}, password: planted6, {DATABASE_URL} and Authorization: Bearer planted7"
)
FORMS = {form for secret in SECRETS for form in (secret, quote(secret, safe=""))}
LONG = [value for value in ENVIRONMENT.values() if len(value) > 8]  # a name is in the bytes of a picture by chance
FORMS |= {base64.b64encode(value.encode()).decode().rstrip("=") for value in LONG}
PATTERN = re.compile("|".join(re.escape(form) for form in FORMS).encode())
PLACES = {
    "data.root": "s3://me:planted4@bucket/x",
    "cluster.address": "tcp://me:planted4@host:8786",
    "track.experiment": "token=planted4",
    "name": "https://planted4@host",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Of this module alone: store, artifacts, checkpoints, logs."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def call(paceline, home):
    """Calls the program where credentials are planted; its status and all that it said."""

    def to_the_end(*arguments, **environment):
        process = paceline(*arguments, "--json", **{"PACELINE_HOME": str(home), **ENVIRONMENT, **environment})
        out, said = process.communicate(timeout=240)
        return process.returncode, out, said

    return to_the_end


@pytest.fixture(scope="module")
def done(call):
    """The summary of a run that came to its end."""
    status, out, said = call("run", "digits", *SMALL)
    assert status == 0, said
    check_clean(out, said)
    return json.loads(out.splitlines()[-1])


def check_clean(*texts):
    for text in texts:
        assert not PATTERN.search(text.encode()), text


def check_files(*roots):
    """No planted credential lies in any file; how many were looked at."""
    found, number = {}, 0
    for root in roots:
        for path in (path for path in Path(root).rglob("*") if path.is_file()):
            number += 1
            if hit := PATTERN.search(path.read_bytes()):
                found[str(path)] = hit.group()
    assert found == {}
    return number


def settled_prefect():
    """Where Prefect's server keeps all, once it has written what came last."""
    time.sleep(3)  # logs and events are written behind
    return os.environ["PREFECT_HOME"]


def test_a_run_that_succeeds_leaves_none(done, home):
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    names = {file.path for file in client.list_artifacts(done["run_id"])}
    assert {"report.html", "summary.json", "config.yaml", "environment.json", "logs"} <= names
    assert check_files(home) > 20  # the next test reads what Prefect's server has kept of both runs


@pytest.mark.slow
def test_a_rank_that_logs_and_fails_with_them_leaves_none(call, home, prefect_url, done):
    path = os.pathsep.join([PLANTED, os.environ.get("PYTHONPATH", "")])
    status, out, said = call("run", "digits", *SMALL, "name=loud", PYTHONPATH=path, LOUD=LOUD)
    assert status == 1, said
    assert "no answer from https://***@store.example/x" in said, "the error itself is told"
    check_clean(out, said)
    (log,) = [path for path in home.glob("runs/*/attempt-0/rank-0/log.txt") if "trying" in path.read_text()]
    assert "trying https://***@store.example/x?X-Amz-Signature=*** ***" in log.read_text()
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    run = client.get_run(log.parts[-4])
    assert run.info.status == "FAILED"
    assert "no answer from https://***@" in run.data.tags["paceline.error"]
    kept = settled_prefect()
    wanted = {"flow_runs": {"name": {"any_": ["loud"]}}}
    (flow,) = httpx.post(f"{prefect_url}/flow_runs/filter", json=wanted).json()
    assert "no answer from https://***@" in flow["state"]["message"]
    logs = httpx.post(f"{prefect_url}/logs/filter", json={"logs": {"flow_run_id": {"any_": [flow["id"]]}}}).json()
    assert any("Traceback" in entry["message"] for entry in logs), "its log goes into depth"
    assert check_files(home, kept) > 20


COMMANDS = {"run": "folder", "study": "digits", "advise": "digits"}


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(each, marks=pytest.mark.slow) for each in ("study", "advise"))]
)
def test_settings_with_a_credential_are_refused_before_anything_is_stored(call, prefect_url, command, home):
    before = num_flow_runs(prefect_url)
    for name, value in PLACES.items():
        axis = ["--axis", "execution.loading=resident,foreground"] if command == "study" else []
        status, out, said = call(command, COMMANDS[command], *axis, f"{name}={value}")
        assert (status, json.loads(out)["error"]) == (2, f"{name} holds a credential, and settings are logged"), said
        check_clean(out, said)
        if command != "run":
            break
    assert num_flow_runs(prefect_url) == before
    check_files(home, os.environ["PREFECT_HOME"])


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["predict", "a" * 32, "s3://me:planted4@bucket/x"], {}, "source holds a credential"),
        (["predict", "a" * 32, "digits", "name=https://planted4@x"], {}, "holds a credential"),
        (["study", "digits", "--axis", "data.root=https://planted4@x,y"], {}, "holds a credential"),
        (
            ["run", "digits"],
            {"MLFLOW_TRACKING_URI": "http://me:planted4@127.0.0.1:9"},
            r"MLFLOW_TRACKING_URI=http://\*\*\*@127.0.0.1:9 holds a credential.*MLFLOW_TRACKING_PASSWORD",
        ),
        pytest.param(
            ["run", "digits"],
            {"MLFLOW_TRACKING_URI": "postgresql://me:planted4@127.0.0.1:9/x"},
            r"MLFLOW_TRACKING_URI=postgresql://\*\*\*@.* holds a credential.*PGPASSWORD",
            marks=pytest.mark.slow,
        ),
        (
            ["run", "digits"],
            {"PREFECT_API_URL": "http://me:planted4@127.0.0.1:9/api"},
            r"PREFECT_API_URL=http://\*\*\*@.* holds a credential.*PREFECT_API_AUTH_STRING",
        ),
    ],
)
def test_addresses_with_a_credential_are_refused(call, arguments, environment, expected):
    status, out, said = call(*arguments, **environment)
    assert (status, set(json.loads(out)) >= {"error", "hint"}) == (2, True), said
    assert re.search(expected, said, re.DOTALL), said
    check_clean(out, said)


def test_the_form_of_a_deployment_refuses_them_and_stores_none(prefect_url):
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        planned = deployment_of(load("folder", ["data.root=/x"]), "guarded", schedule_of("0 2 * * *", "UTC"), "queue")
        planned.paused = True
        deployment = planned.apply()
    place = f"{prefect_url}/deployments/{deployment}/create_flow_run"
    config = load("folder", ["data.root=/x"]).model_dump(mode="json")
    before = num_flow_runs(prefect_url)
    for root in ("s3://me:planted4@b", "https://planted4@host", "https://h/x?X-Amz-Signature=planted4"):
        config["data"]["root"] = root
        answer = httpx.post(place, json={"parameters": {"config": config}})
        assert answer.status_code == 409, answer.text
    assert num_flow_runs(prefect_url) == before
    check_files(settled_prefect())


def test_the_doctor_tells_none(call):
    status, out, said = call("doctor", MLFLOW_TRACKING_URI="http://me:planted4@127.0.0.1:9")
    assert status == 1, said
    assert "holds a credential" in said
    check_clean(out, said)


def num_flow_runs(url):
    return httpx.post(f"{url}/flow_runs/count", json={}).json()
