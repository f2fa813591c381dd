"""Files for a site: each is read by the program that it is for, and each command in them by the program it starts."""

import http.client
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from sqlalchemy import make_url

from infra.services.home import free_port
from infra.services.servers import LEASES_ON_DISK
from tests.integration.cluster import test_clusters
from tests.support.patience import listens, until
from tests.support.slurm import no_job, program, run

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
UNITS = sorted((INFRA / "systemd").glob("*.service"))
JOBS = sorted((INFRA / "slurm").glob("*.sbatch"))
COMPOSE = INFRA / "compose.yaml"
INSTALLED = "/opt/paceline/.venv/bin"
slurm_conf = test_clusters.slurm_conf


def commands_of_compose():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    return {f"compose {name}": one["command"] for name, one in services.items() if "command" in one}


def commands_of_units():
    starts = {unit.name: re.search(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)[1] for unit in UNITS}
    return {name: shlex.split(start.removeprefix(f"{INSTALLED}/")) for name, start in starts.items()}


COMMANDS = commands_of_compose() | commands_of_units()


GUARDED = ["python", "-P", "-m", "paceline.tasks.track.serve"]
"""MLflow's server, of whose application parts are withheld."""


@cache
def help_of(*words):
    name = {
        "dask": "dask",
        "prefect": "prefect",
        "paceline.tasks.track.serve": "paceline.tasks.track.serve",
        "paceline": "paceline.flows.cli",
    }[words[0]]
    done = subprocess.run(
        [sys.executable, "-m", name, *words[1:], "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("where", COMMANDS)
def test_a_command_has_the_options_that_it_is_given(where):
    command = COMMANDS[where]
    words = [word for word in command if re.fullmatch(r"[a-z]+", word)]
    words = words[: 3 if words[0] == "prefect" else 2]
    if command[: len(GUARDED)] == GUARDED:
        words = GUARDED[-1:]
    known = set(re.findall(r"--[a-z][\w-]*", help_of(*words)))
    assert {option for option in command if option.startswith("--")} <= known


@pytest.mark.parametrize("where", ["compose mlflow", "paceline-mlflow.service"])
def test_mlflow_is_served_without_what_runs_commands(where):
    command = COMMANDS[where]
    assert command[: len(GUARDED)] == GUARDED
    assert command[command.index("--app-name") + 1] == "basic-auth"
    assert [name for name, other in COMMANDS.items() if "mlflow" in other] == []
    dockerfile = (INFRA / "compose" / "Dockerfile").read_text()
    assert "COPY tasks tasks" in dockerfile
    assert "flask-wtf" in dockerfile


def test_compose_reads_its_file():
    compose = program("docker-compose")
    run(compose, "-f", COMPOSE, "config", "--quiet")


def test_only_the_proxy_listens_beyond_this_host_and_no_secret_stands_in_a_file():
    tree = yaml.safe_load(COMPOSE.read_text())
    for name, service in tree["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])) or name == "proxy"
        image = service.get("image", "")
        assert re.search(r":\d+\.\d+", image), f"{name}: {image} is not pinned"
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH_STRING|_URI$|DATABASE", key) and not key.endswith("TRACKING_URI"):
                assert value.startswith("/run/secrets/"), key
                assert Path(value).name in service["secrets"], f"{name} is not given {value}"
        if name != "workers":
            assert "healthcheck" in service or name == "flows"
    assert set(tree["secrets"]) == {secret for one in tree["services"].values() for secret in one.get("secrets", [])}
    for path in (INFRA / "compose" / "Dockerfile").read_text().splitlines():
        if path.startswith("COPY infra/") or path.startswith("COPY --chmod"):
            for source in [word for word in path.split()[1:-1] if not word.startswith("--")]:
                assert (ROOT / source).exists(), source


def test_secrets_come_from_files(tmp_path):
    (tmp_path / "one").write_text("opensesame\n")
    script = INFRA / "compose" / "with-secrets"
    environment = {"PATH": os.environ["PATH"], "WORD__FILE": str(tmp_path / "one")}
    command = [script, "sh", "-c", 'echo "$WORD ${WORD__FILE-none}"']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "opensesame none\n"
    environment["WORD__FILE"] = str(tmp_path / "two")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "two cannot be read" in done.stderr


def test_the_proxy_takes_its_file(tmp_path):
    nginx = program("nginx")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    run(*made, "-keyout", key, "-out", certificate)
    text = (INFRA / "compose" / "nginx.conf").read_text()
    text = text.replace("/run/secrets/proxy_certificate", str(certificate)).replace("/run/secrets/proxy_key", str(key))
    for name in ("prefect", "mlflow"):  # names that only resolve beside it
        text = text.replace(f"http://{name}:", "http://127.0.0.1:")
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nerror_log stderr;\n{text}")
    run(nginx, "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def test_systemd_takes_the_units(tmp_path):
    analyze = program("systemd-analyze")
    run(INFRA / "systemd" / "install", tmp_path)
    for file in (tmp_path / "etc" / "paceline").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    here = str(Path(sys.executable).parent)
    units = []
    for unit in UNITS:
        installed = tmp_path / "etc" / "systemd" / "system" / unit.name.replace("@.", "@nightly.")
        installed.write_text(unit.read_text().replace(INSTALLED, here))
        units.append(installed)
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if any(unit.name in line for unit in units)]
    assert told == []


def test_every_variable_of_a_unit_is_in_its_file(tmp_path):
    run(INFRA / "systemd" / "install", tmp_path)
    for unit in UNITS:
        text = unit.read_text()
        files = re.findall(r"^EnvironmentFile=(.*)$", text, re.MULTILINE)
        given = "".join((tmp_path / file.lstrip("/").replace("%i", "nightly")).read_text() for file in files)
        wanted = set(re.findall(r"\$\{?([A-Z_]+)\}?", re.search(r"^ExecStart=.*$", text, re.MULTILINE)[0]))
        assert wanted <= set(re.findall(r"^([A-Z_]+)=", given, re.MULTILINE)), unit.name


def test_every_prefect_server_has_its_leases_on_disk(tmp_path):
    """In its memory it would forget in a restart who holds a deployment's slots."""
    prefect = yaml.safe_load(COMPOSE.read_text())["services"]["prefect"]
    subprocess.run([INFRA / "systemd" / "install", tmp_path], check=True, capture_output=True)
    unit = dict(line.split("=", 1) for line in (tmp_path / "etc/paceline/prefect.env").read_text().splitlines())
    name = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    assert [prefect["environment"][name], unit[name]] == [LEASES_ON_DISK] * 2
    assert f"export {name}={LEASES_ON_DISK}" in (ROOT / "infra/docs/guides/nightly.md").read_text()
    assert prefect["volumes"] == [f"prefect:{prefect['environment']['PREFECT_HOME']}"]
    assert importlib.import_module(LEASES_ON_DISK).ConcurrencyLeaseStorage().storage_path.name == "concurrency_leases"


@pytest.fixture
def slurm(slurm_conf, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    yield
    until(no_job, "end of the jobs")


FITTING = ["--nodes=1", "--gres=none", "--time=5"]
"""What a node of the test's Slurm has."""


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_slurm_takes_the_jobs(slurm, job):
    run("bash", "-n", job)
    done = subprocess.run(["sbatch", "--test-only", *FITTING, job], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_a_job_outside_of_the_repository_is_refused(tmp_path):
    command = ["bash", INFRA / "slurm" / "run.sbatch", "digits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"error: {tmp_path} is not the root of Paceline's repository"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_of_workers_joins_a_scheduler(slurm, tmp_path):
    from distributed import Client, Security

    tls, port = tmp_path / "tls", free_port()
    run(INFRA / "certificates", tls)
    files = {f"tls_{role}_{kind}": str(tls / f"{kind}.pem") for role in ("client",) for kind in ("cert", "key")}
    options = ["--tls-ca-file", f"{tls}/ca.pem", "--tls-cert", f"{tls}/cert.pem", "--tls-key", f"{tls}/key.pem"]
    address = f"tls://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dask", "scheduler", "--host", address, "--no-dashboard"]
    scheduler = subprocess.Popen([*command, "--dashboard-address", "127.0.0.1:0", *options], stderr=subprocess.DEVNULL)
    try:
        until(lambda: listens(port), "scheduler", process=scheduler)
        environment = {"PACELINE_SCHEDULER": address, "PACELINE_TLS": str(tls), "PACELINE_BIN": sys.prefix + "/bin"}
        job = subprocess.run(
            ["sbatch", "--parsable", *FITTING, f"--output={tmp_path}/log", INFRA / "slurm" / "workers.sbatch"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        security = Security(tls_ca_file=str(tls / "ca.pem"), require_encryption=True, **files)
        with Client(address, security=security, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=120)
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        run("scancel", job)
    finally:
        scheduler.terminate()
        scheduler.wait(30)


def shown(port):
    """How a part of Dask shows its status as in the units."""
    return ["--no-dashboard", "--dashboard-address", f"127.0.0.1:{port}"]


def ask(url):
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=5)
    try:
        connection.request("GET", f"{place.path}?{place.query}" if place.query else place.path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


@pytest.mark.slow
def test_prometheus_scrapes_a_scheduler_and_its_workers(tmp_path):
    promtool, prometheus, port, status_port = program("promtool"), program("prometheus"), free_port(), free_port()
    run(promtool, "check", "config", INFRA / "prometheus.yml")
    scheduler_port = free_port()
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    started = [
        subprocess.Popen(
            [*dask, "scheduler", "--host", "127.0.0.1", "--port", str(scheduler_port), *shown(status_port)],
            **quiet,
        ),
        subprocess.Popen(
            [*dask, "worker", f"tcp://127.0.0.1:{scheduler_port}", "--nworkers", "2", "--nthreads", "1", *shown(0)],
            **quiet,
        ),
    ]
    targets = tmp_path / "dask-workers.json"

    def found():
        done = subprocess.run(
            [INFRA / "dask-targets", f"http://127.0.0.1:{status_port}"], capture_output=True, text=True, check=False
        )
        targets.write_text(done.stdout or "[]")
        return len(json.loads(targets.read_text())) == 2

    try:
        until(found, "two workers")
        text = (INFRA / "prometheus.yml").read_text()
        text = text.replace("127.0.0.1:8787", f"127.0.0.1:{status_port}").replace("interval: 15s", "interval: 1s")
        (tmp_path / "prometheus.yml").write_text(text)
        place = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path}/data"]
        command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", *place]
        started.append(subprocess.Popen(command, **quiet))
        api = f"http://127.0.0.1:{port}/api/v1/query?query="

        def value(query):
            status, answer = ask(api + query)
            return json.loads(answer)["data"]["result"] if status == 200 else []

        until(lambda: len([one for one in value("up") if one["value"][1] == "1"]) == 3, "three that are up")
        until(lambda: value("dask_worker_threads"), "workers' figures")
        workers = {one["metric"]["state"]: one["value"][1] for one in value("dask_scheduler_workers")}
        assert sum(map(int, workers.values())) == 2, workers
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def test_every_database_has_a_driver_that_is_installed(tmp_path):
    run(INFRA / "systemd" / "install", tmp_path)
    files = [INFRA / "compose.yaml", *(tmp_path / "etc" / "paceline").iterdir()]
    drivers = {found for file in files for found in re.findall(r"(postgresql[+\w]*)://", file.read_text())}
    assert drivers == {"postgresql+psycopg", "postgresql+asyncpg"}
    for driver in drivers:
        assert make_url(f"{driver}://x@y/z").get_dialect().import_dbapi()
