"""Files for a site: each is read by the program that it is for, and each command in them is started."""

import http.client
import importlib
import json
import os
import pwd
import re
import socket
import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from sqlalchemy import make_url

from infra.services.home import Home, Settings, free_port
from infra.services.site import Site, declared
from infra.services.supervisor import IN_IMAGE, write_compose
from tests.integration.cluster import test_clusters
from tests.support.patience import listens, until
from tests.support.services import supervised
from tests.support.slurm import no_job, program, run

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
JOBS = sorted((INFRA / "slurm").glob("*.sbatch"))
slurm_conf = test_clusters.slurm_conf
TEMPLATE_WORD = re.compile(r"(?<![$])[$](\w+)")


def words_of(value):
    """The names behind `$` in a part of the declaration."""
    return set(TEMPLATE_WORD.findall(json.dumps(value)))


def test_a_service_lists_the_secrets_that_it_uses_and_no_command_has_one():
    secrets = {name for service in declared().values() for name in service.secrets}
    for service in declared().values():
        assert not words_of(service.command) & secrets, service.name
        health = service.health.model_dump() if service.health else {}
        used = words_of([service.environment, service.files, health]) & secrets
        assert used <= set(service.secrets), service.name
        assert set(service.requires) <= set(list(declared())[: list(declared()).index(service.name)]), service.name
    assert declared()["scheduler"].secrets == declared()["workers"].secrets == ()
    owners = {name for name, service in declared().items() if "postgres_password" in service.secrets}
    assert owners == {"postgres", "databases", "backups"}, "only they are PostgreSQL's superuser"


def test_mlflow_is_served_without_what_runs_commands():
    command = list(declared()["mlflow"].command)
    assert command[1:4] == ["-P", "-m", "paceline.tasks.track.serve"]
    assert command[command.index("--app-name") + 1] == "basic-auth"
    assert [name for name, other in declared().items() if "mlflow" in other.command] == []


def test_every_database_has_a_driver_that_is_installed():
    found = {word for service in declared().values() for word in re.findall(r"(postgresql[+\w]*)://", str(service))}
    assert found == {"postgresql+psycopg", "postgresql+asyncpg"}
    for driver in found:
        assert make_url(f"{driver}://x@y/z").get_dialect().import_dbapi()


def test_every_prefect_server_has_its_leases_on_disk():
    """In its memory it would forget in a restart who holds a deployment's slots."""
    name = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    prefect = declared()["prefect"]
    storage = prefect.environment[name]
    assert f"export {name}={storage}" in (ROOT / "infra/docs/guides/nightly.md").read_text()
    assert prefect.environment["PREFECT_HOME"] == "$home/work/prefect"
    assert prefect.writes == ("work/prefect",)
    assert importlib.import_module(storage).ConcurrencyLeaseStorage().storage_path.name == "concurrency_leases"


@pytest.fixture(scope="module")
def site():
    """A site for supervisors, with all services, which does not run."""
    with supervised() as made:
        yield made


def test_systemd_takes_the_units(site):
    analyze = program("systemd-analyze")
    units = sorted(site.units.iterdir())
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if any(unit.name in line for unit in units)] == []
    assert len(units) == len(declared()) + 1
    for unit in units:
        assert not [secret for secret in site.secrets() if secret in unit.read_text()], unit


def test_units_separate_the_services(site):
    units = {unit.stem.removeprefix("paceline-"): unit.read_text() for unit in site.units.iterdir()}
    home = site.home.root
    for name in ("scheduler", "workers"):
        assert f"TemporaryFileSystem={home}/secrets:ro" in units[name]
        assert "BindReadOnlyPaths" not in units[name], "no secret is theirs"
        assert f"InaccessiblePaths=-{home}/postgres" in units[name]
        assert f"InaccessiblePaths=-{home}/environment" in units[name], "it has passwords"
    shown = set(re.findall(r"BindReadOnlyPaths=\S+/(\w+)", units["serve-nightly"]))
    assert shown == {"prefect_password", "mlflow_password"}
    assert "ExecStartPost=" in units["mlflow"], "those that require it wait until it is well"
    assert f"User={site.user}" in units["mlflow"]


def test_compose_takes_its_file(site):
    run(program("docker-compose"), "-f", site.compose, "config", "--quiet")


def test_containers_start_what_the_units_start(site):
    services = yaml.safe_load(site.compose.read_text())["services"]
    assert set(services) == set(site.commands())
    for name, service in services.items():
        assert service["command"] == ["python", *site.commands()[name][1:]]
        mounted = [volume.split(":") for volume in service["volumes"]]
        assert all(path == inside for path, inside, _ in mounted)
        secrets = {Path(path).name for path, *_ in mounted if Path(path).parent == site.home.secrets}
        if "." not in declared()[name.partition("-")[0]].writes:
            assert secrets == set(declared()[name.partition("-")[0]].secrets)
            assert [str(site.home.root), str(site.home.root), "rw"] not in mounted
        if str(site.paceline_home) in [path for path, *_ in mounted]:
            assert service["tmpfs"] == [str(site.home.root)], "the secrets below PACELINE_HOME are covered"
        assert service["environment"]["PYTHONPATH"] == IN_IMAGE
        account = dict(zip(("USER_ID", "GROUP_ID"), pwd.getpwnam(site.user)[2:4], strict=True))
        assert service["build"]["args"] == account, "initdb looks it up"
    dockerfile = (INFRA / "Dockerfile").read_text()
    assert 'useradd --no-log-init --uid "$USER_ID"' in dockerfile
    assert f"WORKDIR {IN_IMAGE}" in dockerfile
    assert ",services]" in dockerfile, "flask-wtf and the driver of PostgreSQL"
    for line in dockerfile.splitlines():
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


def test_gpus_are_given_to_containers_of_ranks(tmp_path, monkeypatch):
    from infra.services import site as site_module
    from infra.services import supervisor

    gpu = type("Gpu", (), {"uuid": "GPU-1"})
    hardware = type("Hardware", (), {"gpus": (gpu,)})
    for module in (site_module, supervisor):
        monkeypatch.setattr(module, "describe", lambda: hardware)
    ports = dict.fromkeys(("postgres", "prefect", "mlflow", "scheduler", "dashboard", "proxy"), 2000)
    made = Site(Home(tmp_path), Settings(ports=ports), tmp_path)
    write_compose(made, pwd.getpwuid(os.getuid()), tmp_path / "compose.yaml")
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    assert [name for name, service in services.items() if "deploy" in service] == ["workers"]
    command = made.command(made["workers"])
    assert command[command.index("--preload-nanny") + 1] == "paceline.tasks.cluster.gpu_workers"
    assert made.environment(made["workers"])["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.slow
def test_the_commands_of_the_units_start_every_service(site):
    """Each line of each unit, in the order of the units, as their user and with nothing but their environment."""
    program("nginx")
    site.make_proxy_certificate()
    with site.all_started() as processes:
        context = ssl.create_default_context(cafile=site.home.root / "proxy" / "cert.pem")
        port = site.home.settings().ports["proxy"]
        until(lambda: listens(port), "proxy", process=processes["proxy"])

        def status_of(host, path):
            connection = http.client.HTTPSConnection(host, port, context=context, timeout=10)
            connection._create_connection = lambda address, *rest: socket.create_connection(("127.0.0.1", port), *rest)
            with closing(connection):
                connection.request("GET", path)
                return connection.getresponse().status

        assert status_of("prefect.example.com", "/api/health") == 200
        assert status_of("mlflow.example.com", "/health") == 200
        assert status_of("mlflow.example.com", "/ajax-api/3.0/mlflow/assistant/config") == 404
        backups = Path(site.home.settings().backups)
        until(lambda: list(backups.glob("paceline-*.tar")), "first backup", process=processes["backups"])
        until(lambda: site.deployments() == ["nightly"], "deployment", process=processes["serve-nightly"])
        for name, process in processes.items():
            assert process.poll() is None, name


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
