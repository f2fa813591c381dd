"""The services of infra/up: well, closed to strangers, quiet about their secrets, and kept through crashes."""

import base64
import json
import os
import shlex
import signal
import socket
import ssl
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
from mlflow.tracking import MlflowClient

from infra.services.site import Site
from paceline.conf.environment import Environment
from paceline.flows.clean import _vacuum
from paceline.tasks.track.garbage import remove_deleted_runs
from tests.support.assistant import SPELLINGS, Caller, attack
from tests.support.services import NAMES, Services

SECONDS = 60


@pytest.fixture(scope="module")
def known(services):
    """What a client of the services has in its environment."""
    return services.environment()


@pytest.fixture
def mlflow(known, monkeypatch):
    """A client of the MLflow server, logged in."""
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, known[name])
    return MlflowClient(known["MLFLOW_TRACKING_URI"], known["MLFLOW_TRACKING_URI"])


def pids(services):
    return {name: services.daemon(name).pid() for name in NAMES}


def test_everything_is_well(services, known, program):
    process = program(
        "doctor", "cluster.kind=address", f"cluster.address={known['PACELINE_SCHEDULER']}", "--json", **known
    )
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    found = {finding["check"]: finding for finding in json.loads(stdout.splitlines()[-1])["findings"]}
    assert found["mlflow"]["status"] == found["prefect"]["status"] == found["certificates"]["status"] == "ok"
    assert found["workers"]["found"].startswith("2 on 1 hosts")


@pytest.mark.parametrize("user", [None, ("paceline", "wrong"), ("admin", "password1234")])
def test_strangers_are_refused(known, user):
    prefect, mlflow = known["PREFECT_API_URL"], known["MLFLOW_TRACKING_URI"]
    assert httpx.post(f"{prefect}/flows/filter", json={}, auth=user).status_code == 401
    assert (
        httpx.post(f"{mlflow}/api/2.0/mlflow/experiments/search", json={"max_results": 1}, auth=user).status_code == 401
    )
    assert httpx.get(f"{prefect}/health").text == "true", "that it is well is no secret"


@pytest.mark.parametrize("name", [None, "paceline", "admin"])
def test_nobody_runs_a_command_through_mlflow(services, known, tmp_path, name):
    secrets = services.secrets()
    passwords = {"paceline": secrets["mlflow_password"], "admin": secrets["mlflow_admin_password"]}
    user = base64.b64encode(f"{name}:{passwords.get(name)}".encode()).decode()
    call = Caller(known["MLFLOW_TRACKING_URI"], **({"Authorization": f"Basic {user}"} if name else {}))
    for place in SPELLINGS:
        assert set(attack(call, tmp_path / "mark", place)) <= {401, 403, 404, 405}, place
        assert not (tmp_path / "mark").exists(), place
    assert call("POST", "/api/2.0/mlflow/webhooks", {})[0] in {401, 404}


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("PREFECT_API_AUTH_STRING", "refuses this user\nhint: set PREFECT_API_AUTH_STRING to NAME:PASSWORD"),
        ("MLFLOW_TRACKING_PASSWORD", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_a_run_without_its_password_is_refused_before_any_work(known, program, lost, said):
    process = program("run", "digits", **known | {lost: "paceline:wrong"})
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, stderr
    assert said in stderr


def test_a_part_without_a_certificate_is_refused_by_dask(services, known):
    trusting = ssl.create_default_context(cafile=services.home.tls / "ca.pem")
    trusting.check_hostname = False
    host, port = known["PACELINE_SCHEDULER"].removeprefix("tls://").split(":")

    def greet(context):
        with (
            socket.create_connection((host, int(port)), timeout=SECONDS) as plain,
            context.wrap_socket(plain) as secured,
        ):
            return secured.recv(1)  # under TLS 1.3 the refusal comes after the client's own part

    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required|handshake.failure"):
        greet(trusting)
    trusting.load_cert_chain(services.home.tls / "cert.pem", services.home.tls / "key.pem")
    assert greet(trusting)


def test_the_database_asks_everybody_for_a_password(services):
    port = services.home.settings().ports["postgres"]
    for user in ("postgres", "mlflow"):
        with pytest.raises(psycopg.OperationalError, match=r"no password supplied|password authentication failed"):
            psycopg.connect(host="127.0.0.1", port=port, user=user, dbname="mlflow", passfile="/dev/null")


def test_the_clean_up_reaches_the_stores_of_the_servers(services, known, mlflow):
    """MLflow's database is in a file of its own, which only this needs; Prefect's server removes old flow runs."""
    place = services.home.root / "work" / "mlflow" / "clean-environment"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    run = mlflow.create_run(mlflow.create_experiment("cleaned"))
    mlflow.delete_run(run.info.run_id)
    database = shlex.split(place.read_text())[1].partition("=")[2]
    outcome = remove_deleted_runs(known["MLFLOW_TRACKING_URI"], database)
    assert outcome == "removed 0 deleted runs; 1 of the last 30 days stay"
    site = Environment(**known)
    assert _vacuum(site) == "its server removes flow runs, logs and artifacts after 90 days"


def test_only_the_owner_can_read_what_is_secret(services):
    home = services.home
    for directory in (home.secrets, home.tls, home.artifacts, home.logs):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    files = [*home.secrets.iterdir(), *home.logs.iterdir(), home.environment, home.tls / "key.pem"]
    assert len(files) > 12
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_nothing_listens_beyond_loopback(services):
    listening = []
    for process in services.family():
        with suppress(psutil.NoSuchProcess):  # a session of the database that has ended meanwhile
            found = process.net_connections(kind="inet")
            listening += [connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN]
    ports = {port for name, port in services.home.settings().ports.items() if name != "proxy"}  # which has no domain
    assert {address.port for address in listening} >= ports
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_no_secret_is_in_a_log_or_on_a_command_line(services):
    secrets = services.secrets()
    assert len(secrets) == 7
    assert all(len(secret) >= 32 for secret in secrets.values())
    texts = {str(path): path.read_text(errors="replace") for path in services.home.logs.iterdir()}
    for process in services.family():
        with suppress(psutil.NoSuchProcess):
            texts[f"command of {process.pid}"] = " ".join([*process.cmdline(), process.name()])
    assert len(texts) > 12
    assert [(place, name) for place, text in texts.items() for name, secret in secrets.items() if secret in text] == []


def test_dask_is_given_no_secret(services):
    """Its workers run whatever a client sends; their ranks need none, for the flow tells MLflow what they log."""
    secrets = services.secrets().values()
    for name in ("scheduler", "workers"):
        for process in services.daemon(name).family():
            given = process.environ()
            assert [variable for variable, value in given.items() if any(secret in value for secret in secrets)] == []


@pytest.mark.slow
def test_what_runs_is_left_alone_and_what_was_killed_comes_back(services, mlflow):
    before = pids(services)
    again = services.up()
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("runs already") == len(NAMES)
    assert pids(services) == before
    assert not [secret for secret in services.secrets().values() if secret in again.stdout + again.stderr]

    experiment = mlflow.create_experiment("before the crash")
    killed = ("postgres", "mlflow", "scheduler")
    for name in killed:
        os.kill(before[name], signal.SIGKILL)
    back = services.up()
    assert back.returncode == 0, back.stderr
    after = pids(services)
    assert all(after.values())
    assert all(after[name] != before[name] for name in (*killed, "workers"))
    assert after["prefect"] == before["prefect"]
    assert mlflow.get_experiment(experiment).name == "before the crash"


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("up", ["--workers", "1"], "infra/down first"),
        ("up", ["--workers", "-1"], "--workers -1\nhint: give how many, or 0 for as many as fit"),
        ("up", ["--host", "0.0.0.0"], "is not an address that clients can connect to"),
        ("up", ["--port", "nobody=1"], "names no service\nhint: use one of postgres"),
        ("restore", [__file__], "infra/down first"),
        ("backup", [__file__], "exists, and nothing is overwritten"),
    ],
)
def test_what_does_not_fit_a_running_set_is_refused(services, command, arguments, said):
    before = pids(services)
    refused = services.command(command, *arguments)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert pids(services) == before


@pytest.mark.slow
def test_what_cannot_be_started_or_restored_leaves_nothing_running(services, tmp_path):
    other = Services(tmp_path / "other")
    taken = other.command("up", "--port", f"postgres={services.home.settings().ports['postgres']}")
    assert taken.returncode == 2
    assert "is in use, and postgres needs it" in taken.stderr
    assert other.family() == []
    (tmp_path / "file").touch()
    closed = Services(tmp_path / "file" / "home").command("down")
    assert (closed.returncode, len(closed.stderr.splitlines())) == (2, 2), closed.stderr
    assert "cannot be written" in closed.stderr
    nothing = Services(tmp_path / "nothing")
    for command, arguments, said in (
        ("backup", [tmp_path / "a.tar"], "holds no services"),
        ("down", [], "holds no services"),
        ("restore", [__file__], "is not a complete archive of infra/backup"),
    ):
        refused = nothing.command(command, *arguments)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    assert not nothing.home.root.exists()
    assert not nothing.home.root.with_name("nothing.restoring").exists()


@pytest.mark.slow
def test_what_was_backed_up_is_back_after_a_restore(services, mlflow, tmp_path):
    experiment = mlflow.create_experiment("kept")
    run = mlflow.create_run(experiment)
    mlflow.log_text(run.info.run_id, "as it was", "note.txt")
    archive = tmp_path / "archive.tar"
    backed_up = services.command("backup", archive)
    assert backed_up.returncode == 0, backed_up.stderr
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600

    mlflow.create_experiment("after the backup")
    mlflow.log_text(run.info.run_id, "changed", "note.txt")
    mlflow.log_metric(run.info.run_id, "late", 1.0)
    assert services.down().returncode == 0
    refused = services.command("restore", archive)
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    restored = services.command("restore", "--overwrite", archive)
    assert restored.returncode == 0, restored.stderr
    begun = services.up()
    assert begun.returncode == 0, begun.stderr

    assert mlflow.get_experiment_by_name("after the backup") is None
    assert "late" not in mlflow.get_run(run.info.run_id).data.metrics
    note = Path(mlflow.download_artifacts(run.info.run_id, "note.txt", str(tmp_path)))
    assert note.read_text() == "as it was"


@pytest.mark.slow
def test_databases_of_older_versions_are_migrated_and_kept_as_they_were(services, mlflow):
    mlflow.create_experiment("older")
    home = services.home
    settings = home.settings()
    site = Site(home, settings, home.root.parent)
    for name in ("prefect", "mlflow"):
        services.daemon(name).end(signal.SIGTERM, 30)
    one_back = ["-m", "prefect", "server", "database", "downgrade", "-y", "-r", "-1"]
    subprocess.run([sys.executable, *one_back], env=site.environment(site["prefect"]), check=True, capture_output=True)
    script = "import os, mlflow.store.db.utils as u; from alembic import command; "
    script += "command.downgrade(u._get_alembic_config(os.environ['MLFLOW_BACKEND_STORE_URI']), '-1')"
    subprocess.run(
        [sys.executable, "-c", script], env=site.environment(site["mlflow"]), check=True, capture_output=True
    )
    home.keep(settings.model_copy(update={"versions": {"prefect": "3.8.0", "mlflow": "3.17.0"}}))

    begun = services.up()
    assert begun.returncode == 0, begun.stderr
    assert "are migrated" in begun.stderr
    assert mlflow.get_experiment_by_name("older") is not None
    (dumps,) = (home.root / "backups").iterdir()
    assert {path.name for path in dumps.iterdir()} == {"prefect.dump", "mlflow.dump", "mlflow_auth.dump"}
