"""`paceline ui` as users start it: nobody runs commands through it, and it answers only the holder of its token."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from mlflow.tracking import MlflowClient

from paceline.tasks.track.store import check_store
from tests.support.assistant import ASSISTANT, SPELLINGS, Caller, attack
from tests.support.browser import chromium, new_page
from tests.support.paceline_ui import paceline_ui

SEARCH = "/api/2.0/mlflow/experiments/search?max_results=10"
WITHHELD = [
    ("POST", "/ajax-api/2.0/mlflow/gateway-proxy"),
    ("POST", "/ajax-api/2.0/mlflow/runs/create-promptlab-run"),
    ("POST", "/ajax-api/3.0/mlflow/genai/evaluate/invoke"),
    ("POST", "/ajax-api/3.0/mlflow/issues/invoke"),
    ("POST", "/ajax-api/3.0/mlflow/scorer/invoke"),
    ("POST", "/api/3.0/mlflow/prompt-optimization/jobs"),
    ("PATCH", "/ajax-api/3.0/mlflow/jobs/cancel/1"),
    ("POST", "/api/2.0/mlflow/webhooks"),
    ("POST", "/api/2.0/mlflow/%77ebhooks"),
    ("POST", "/api/2.0/mlflow/webhooks/1/test"),
    ("POST", "/ajax-api/3.0/mlflow/demo/generate"),
    ("GET", "/ajax-api/3.0/jobs/1"),
    ("POST", "/gateway/mlflow/v1/chat/completions"),
]
REFUSED = {401, 404, 405}


@pytest.fixture(scope="module")
def ui(tmp_path_factory):
    """A home with an experiment and a run, its server's process and the address that it printed."""
    home = tmp_path_factory.mktemp("home")
    uri, artifacts = f"sqlite:///{home}/mlflow.db", (home / "mlartifacts").as_uri()
    experiment = check_store(uri, "guarded", artifacts)
    client = MlflowClient(uri)
    run = client.create_run(experiment).info.run_id
    client.log_text(run, "seen", "note.txt")
    with paceline_ui(home, tmp_path_factory.mktemp("log") / "ui.log") as (process, address):
        yield home, run, process, address


@pytest.fixture(scope="module")
def server(ui):
    """The root of its address."""
    return f"http://{urlsplit(ui[3]).netloc}"


@pytest.fixture(scope="module")
def token(ui):
    return parse_qs(urlsplit(ui[3]).query).get("token", [""])[0]


@pytest.fixture(params=["stranger", "holder"])
def call(request, server, token):
    """A caller without the token, and one with it."""
    return Caller(server) if request.param == "stranger" else Caller(server, Authorization=f"Bearer {token}")


@pytest.mark.parametrize("place", SPELLINGS)
def test_nobody_runs_a_command(ui, call, place, tmp_path):
    assert set(attack(call, tmp_path / "mark", place)) <= REFUSED
    assert not (tmp_path / "mark").exists()
    assert not (ui[0] / ".mlflow").exists(), "nobody configures the assistant"


@pytest.mark.parametrize(("method", "path"), WITHHELD)
def test_what_sends_requests_or_starts_jobs_is_not_served(call, method, path):
    assert call(method, path, {"experiment_id": "0"})[0] in REFUSED


@pytest.mark.parametrize("path", ["/", SEARCH, "/health", "/version", "/graphql", "/metrics", "/get-artifact", "/x"])
@pytest.mark.parametrize(
    "wrong", [{}, {"Authorization": "Bearer x"}, {"Authorization": "Basic Og=="}, "cookie", "query"]
)
def test_without_the_token_nothing_is_served(server, path, wrong):
    headers = {}
    if wrong == "cookie":
        headers = {"Cookie": f"paceline-ui-{urlsplit(server).port}=x"}
    elif wrong == "query":
        path = f"{path}{'&' if '?' in path else '?'}token=x%C3%A9"
    else:
        headers = wrong
    status, answered, body = Caller(server)("GET", path, **headers)
    assert (status, answered["Set-Cookie"]) == (401, None)
    assert b"paceline ui" in body


def test_with_the_token_the_pages_and_the_api_work(ui, server, token):
    _, run, _, address = ui
    call = Caller(server)
    parts = urlsplit(address)
    status, headers, page = call("GET", f"{parts.path}?{parts.query}")
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert token.encode() not in page
    status, _, page = call("GET", "/", Cookie=cookie)
    assert status == 200
    assert b"static-files" in page
    status, _, found = call("POST", "/ajax-api/2.0/mlflow/experiments/search", {"max_results": 10}, Cookie=cookie)
    assert status == 200
    assert "guarded" in [experiment["name"] for experiment in json.loads(found)["experiments"]]
    assert call("GET", f"/get-artifact?path=note.txt&run_uuid={run}", Cookie=cookie)[::2] == (200, b"seen")


def test_a_client_of_mlflow_has_the_token_in_its_environment(ui, server, token, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    client = MlflowClient(server, server)
    assert client.get_run(ui[1]).info.run_id == ui[1]
    created = client.create_run(client.create_experiment("by-client"))
    client.log_text(created.info.run_id, "text", "a.txt")
    assert Path(client.download_artifacts(created.info.run_id, "a.txt", tmp_path)).read_text() == "text"


def test_other_names_of_the_host_are_refused_with_the_token_too(server, token):
    assert Caller(server, Authorization=f"Bearer {token}")("GET", SEARCH, Host="evil.example")[0] == 403


def test_no_command_line_holds_the_token(ui, token):
    process = psutil.Process(ui[2].pid)
    commands = [" ".join(one.cmdline()) for one in (process, *process.children(recursive=True))]
    assert any("paceline.tasks.track.guard:for_token_holder" in command for command in commands)
    assert not any(token in command for command in commands)


def test_each_start_has_another_token(ui, token, tmp_path):
    with paceline_ui(ui[0], tmp_path / "ui.log") as (_, address):
        assert token not in address
        assert Caller(f"http://{urlsplit(address).netloc}", Authorization=f"Bearer {token}")("GET", SEARCH)[0] == 401


@pytest.mark.parametrize(
    ("options", "said"), [([], "PACELINE_UI_TOKEN"), (["--gunicorn-opts", "--log-level debug"], "--gunicorn-opts")]
)
def test_a_server_without_a_guard_does_not_start(tmp_path, options, said):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "paceline.tasks.track.serve", "--host", "127.0.0.1", "--port", "0", *options],
        env=os.environ | {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/mlflow.db"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_browser_opens_the_printed_address(ui, server):
    with chromium() as browser, new_page(browser) as page:
        page.goto(ui[3])
        page.get_by_text("guarded").first.wait_for()
        assert page.url.startswith(f"{server}/#/experiments")
        assert page.goto(f"{server}{ASSISTANT}/config").status == 404
