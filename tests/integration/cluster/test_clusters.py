"""Kinds of clusters, TLS between their parts, a real SSH server and a real Slurm: each brings up workers that train."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import dask
import psutil
import pytest

from infra.services.home import free_port
from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.checks.preflight import check, confirm_on_cluster, training_host
from paceline.tasks.cluster import gpu_workers
from paceline.tasks.cluster.client import ClusterResources, connect, demand_of
from paceline.tasks.cluster.dask_config import low_overhead_config
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.cluster.ssh import ask_hosts
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.train.launch import placement as seats
from paceline.tasks.train.launch.coordinator import train_group
from tests.integration.conftest import SMALL
from tests.support.jobs import new_job, two_workers
from tests.support.patience import listens, until
from tests.support.refusals import refused
from tests.support.slurm import no_job, program, run, slurm_on

ROOT = Path(__file__).parents[3]
ONE = ClusterResources(num_hosts=1, workers_per_host=1, gpus=False)
UP_SECONDS = 20


SAME_ENVIRONMENT = """
import os

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.prestart import local_rank_environment, plan_of
from paceline.tasks.cluster.client import ClusterResources, connect
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.cluster.local import LOOPBACK
from paceline.tasks.train.launch.fork_server import comparable
from paceline.tasks.train.launch.layout import rank_environment
from paceline.tasks.train.launch.rank_process import interface_of

if __name__ == "__main__":
    config = Config()
    plan = plan_of(config, Environment())
    of_server = comparable(local_rank_environment(plan))
    one = ClusterResources(num_hosts=1, workers_per_host=1, gpus=False, prepares=False)
    with open_cluster(config.cluster, one) as address, connect(address) as client:
        (of_worker,) = client.run(lambda: dict(os.environ)).values()
    of_rank = comparable(rank_environment(of_worker, plan.num_threads, interface_of(LOOPBACK), ()))
    print({name for name in of_server.keys() | of_rank.keys() if of_server.get(name) != of_rank.get(name)})
"""


def test_a_fork_server_has_the_environment_of_the_ranks_of_a_local_cluster():
    """It is set before Dask's nanny is there; else no rank would be forked, and each start would take longer."""
    done = subprocess.run([sys.executable, "-c", SAME_ENVIRONMENT], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


def check_lean(client):
    for name, value in low_overhead_config().items():
        assert all(found == value for found in client.run(dask.config.get, name).values()), name


@pytest.fixture(scope="module")
def made_certificates(tmp_path_factory):
    root = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "others"):
        run(ROOT / "infra" / "certificates", root / name)
    return root


@pytest.fixture
def tls(made_certificates, monkeypatch):
    """Certificates of this site, in force."""
    monkeypatch.setenv("PACELINE_TLS", str(made_certificates / "ours"))
    return made_certificates


def knock(address, directory):
    """Shake hands as a client with the certificates of a directory, or with none, and wait for a first byte."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # whom we trust is not what is asked here
    if directory is not None:
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    place = urlsplit(address)
    with (
        socket.create_connection((place.hostname, place.port), timeout=10) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return secured.recv(1)


def test_tls_refuses_whoever_has_no_certificate(tls, monkeypatch):
    monkeypatch.setattr("paceline.tasks.cluster.client.CONNECT_SECONDS", 2)
    with open_cluster(Cluster(tls="on", num_workers=1), ONE) as address:
        with connect(address) as client:
            assert client.submit(sum, [1, 2]).result() == 3
            check_lean(client)
            (worker,) = client.scheduler_info()["workers"]
        for part in (address, worker):
            assert part.startswith("tls://127.0.0.1:")
            for stranger in (None, tls / "others"):
                with pytest.raises(ssl.SSLError, match=r"CERTIFICATE_REQUIRED|UNKNOWN_CA|DECRYPT_ERROR"):
                    knock(part, stranger)
            assert knock(part, tls / "ours")
        with refused("cluster.address", "tls://"), connect(address.replace("tls://", "tcp://")):
            pass
        monkeypatch.setenv("PACELINE_TLS", str(tls / "others"))
        monkeypatch.setattr("paceline.tasks.cluster.tls._clusters", {})  # as in a process that has not opened it
        with refused("cluster.address", f"PACELINE_TLS={tls / 'others'}"), connect(address):
            pass


def train_on(config_overrides):
    """All that a run does with a cluster: check, open, prepare, train; returns the result and the parts' addresses."""
    overrides = [*SMALL, "recipe.num_epochs=1", "execution.accelerator=cpu", *config_overrides]
    config = load("digits", overrides)
    checked = check(config, Environment())
    with open_cluster(
        config.cluster, demand_of([config.execution], checked.plan.accelerator), Environment()
    ) as address:
        assert confirm_on_cluster(config, checked, address).hardware.host == socket.gethostname()
        with connect(address) as client:
            parts = [address, *client.scheduler_info()["workers"]]
        return train_group(new_job(address, "digits", overrides), address), parts


def processes_with(tls):
    """Processes that were told where our certificates lie: the parts of a cluster over SSH."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(str(tls) in part for part in process.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """A real OpenSSH server on loopback, known as `paceline-host` to whoever has the returned directory as home."""
    server = program("sshd")
    home = tmp_path_factory.mktemp("ssh")
    (home / ".ssh").mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name)
    port = free_port()
    (home / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/user_key.pub\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    host_key = " ".join((home / "host_key.pub").read_text().split()[:2])
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    (home / ".ssh" / "config").write_text(
        f"Host paceline-*\n HostName 127.0.0.1\n Port {port}\n User root\n UserKnownHostsFile {home}/known_hosts\n"
        f"Host paceline-host\n IdentityFile {home}/user_key\n"
    )
    separation = Path("/run/sshd")  # sshd wants this empty directory, which a service manager would make
    made = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    process = subprocess.Popen([server, "-D", "-e", "-f", str(home / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        until(lambda: listens(port), "SSH server", process=process)
        yield home
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        if made:
            separation.rmdir()


@pytest.fixture
def ssh_home(sshd, monkeypatch):
    monkeypatch.setenv("HOME", str(sshd))
    return sshd


def test_a_cluster_over_ssh_trains_with_tls(tls, ssh_home):
    result, parts = train_on(["cluster.kind=ssh", "cluster.hosts=[paceline-host]", "cluster.interface=lo"])
    assert result.losses[-1] < result.losses[0]
    assert len(parts) == 2
    assert all(part.startswith("tls://127.0.0.1:") for part in parts)
    until(lambda: processes_with(tls) == [], "end of the workers")


def test_ssh_starts_as_many_workers_as_devices_and_ends_them(tls, ssh_home):
    settings = Cluster(kind="ssh", hosts=("paceline-host",), interface="lo")
    with open_cluster(settings, ClusterResources(num_hosts=1, workers_per_host=2, gpus=False)) as address:
        assert processes_with(tls)
        with connect(address) as client:
            assert list(client.nthreads().values()) == [1, 1]
            check_lean(client)
    until(lambda: processes_with(tls) == [], "end of the workers")


def test_hosts_that_cannot_serve_are_named(tls, ssh_home, monkeypatch):
    settings = Cluster(kind="ssh", hosts=("paceline-host", "paceline-stranger"))
    with refused("cluster.hosts", "paceline-stranger", "BatchMode=yes"):
        ask_hosts(settings, None)
    monkeypatch.setattr("paceline.tasks.cluster.ssh.PYTHON", "/nowhere/python")
    with refused("cluster.hosts", "paceline-host", "/nowhere/python"):
        ask_hosts(Cluster(kind="ssh", hosts=("paceline-host",)), None)


def test_workers_that_cannot_start_are_heard_and_leave_nothing(tls, ssh_home, monkeypatch):
    monkeypatch.setitem(gpu_workers.PRELOAD, "preload_nanny", ["nowhere"])
    settings = Cluster(kind="ssh", hosts=("paceline-host",), interface="lo")
    on_gpus = ONE.model_copy(update={"gpus": True})
    with (
        refused("cluster.hosts", "cluster.hosts=paceline-host", "nowhere", kind=RunError),
        open_cluster(settings, on_gpus),
    ):
        pass
    until(lambda: processes_with(tls) == [], "end of the workers")


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory):
    """The slurm.conf of a real Slurm of one node."""
    with slurm_on(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture
def slurm(slurm_conf, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    yield
    until(no_job, "end of the jobs")


SLURM = ["cluster.kind=slurm", "cluster.cores_per_host=1", "cluster.memory_per_host=1G", "cluster.interface=lo"]


def test_a_cluster_of_slurm_jobs_trains_with_tls(tls, slurm):
    result, parts = train_on([*SLURM, "cluster.partition=short", "cluster.time_limit=5"])
    assert result.world_size == 1
    assert result.losses[-1] < result.losses[0]
    assert len(parts) == 2
    assert all(part.startswith("tls://127.0.0.1:") for part in parts)


def run_program(paceline, kind, *overrides):
    process = paceline("run", "digits", *SMALL, "execution.accelerator=cpu", *overrides, "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["train"]["world_size"] == 1
    assert f"cluster.tls=on: kind {kind} reaches beyond this host" in err


@pytest.mark.slow
def test_the_program_runs_on_slurm(tls, slurm, paceline):
    run_program(paceline, "slurm", *SLURM, "cluster.time_limit=5")


@pytest.mark.slow
def test_the_program_runs_over_ssh(tls, ssh_home, paceline):
    run_program(paceline, "ssh", "cluster.kind=ssh", "cluster.hosts=[paceline-host]", "cluster.interface=lo")


def test_a_job_that_slurm_would_not_take_is_refused(tls, slurm):
    for override in ("cluster.partition=nowhere", "cluster.cores_per_host=9999"):
        with refused("cluster.partition", "Slurm"):
            training_host(load("digits", [*SLURM, "execution.accelerator=cpu", override]), Environment())


def test_a_job_that_stays_in_the_queue_is_named(tls, slurm):
    config = load("digits", [*SLURM, "execution.accelerator=cpu", "cluster.sbatch=[--hold]", "cluster.wait_seconds=3"])
    with (
        pytest.raises(RunError, match=r"Slurm job \d+.*\bPENDING\b.*\bJobHeldUser\b"),
        open_cluster(config.cluster, ONE),
    ):
        pass


def test_a_job_that_ends_at_once_is_told_with_its_last_words(tls, slurm, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    config = load("digits", [*SLURM, "execution.accelerator=cpu", "cluster.wait_seconds=60"])
    with (
        pytest.raises(RunError, match=r"Slurm job \d+.*\bFAILED\b.*/nowhere/python\b"),
        open_cluster(config.cluster, ONE),
    ):
        pass


def test_workers_that_do_not_answer_are_named(monkeypatch):
    config = load("digits", ["execution.num_devices=2"])
    with two_workers() as address, connect(address) as client:
        pids = client.run(os.getpid)
        assert seats.inspect(config, address).num_cores  # all have answered before: what follows needs no import
        silent, pid = next(iter(pids.items()))
        monkeypatch.setattr(seats, "FIRST_ANSWER_SECONDS", 3.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(InputError) as caught:
                seats.inspect(config, address)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert str(caught.value).startswith(f"1 workers do not answer, first {silent}; execution asks for 1 hosts with 2")
