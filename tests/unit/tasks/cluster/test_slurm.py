import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.conf.cluster import Cluster
from paceline.flows.cli import main
from paceline.tasks.cluster.client import ClusterResources
from paceline.tasks.cluster.dask_config import exports
from paceline.tasks.cluster.slurm import job_script, requested_host, slurm_arguments
from paceline.tasks.cluster.tls import Certificates
from tests.support.refusals import refused

FILES = Certificates(authority="/tls/ca.pem", certificate="/tls/cert.pem", key="/tls/key.pem")
LOGS = Path("/shared/paceline/slurm")
ASKED = {"cores_per_host": 16, "memory_per_host": "64G"}


def script_of(hosts, workers, gpus=False, certificates=None, **settings):
    cluster = Cluster(kind="slurm", **ASKED, **settings)
    demand = ClusterResources(num_hosts=hosts, workers_per_host=workers, gpus=gpus)
    return job_script(cluster, demand, certificates, LOGS)


def directives(script):
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def command(script):
    return script.splitlines()[-1].split()


def option(words, name):
    return words[words.index(name) + 1]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", range(1, 9))
def test_cpu_jobs(hosts, devices):
    script = script_of(hosts, devices)
    assert {"-J paceline", "-n 1", "--nodes=1", "--cpus-per-task=16", "--mem=64G"} < directives(script)
    assert f"--output={LOGS}/%j.log" in directives(script)
    assert ("--exclusive" in directives(script)) == (hosts > 1)
    assert not [line for line in directives(script) if "gpu" in line or line.startswith("-t")]
    assert set(exports()) <= set(script.splitlines())
    words = command(script)
    assert words[:4] == [sys.executable, "-m", "distributed.cli.dask_worker", "tcp://SCHEDULER:PORT"]
    assert option(words, "--nthreads") == "1"
    assert (option(words, "--nworkers") if devices > 1 else "1") == str(devices)
    assert option(words, "--memory-limit") == f"{64 / devices:.2f}GiB"


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", range(1, 9))
def test_gpu_jobs(hosts, devices):
    script = script_of(hosts, devices, gpus=True)
    assert f"--gres=gpu:{devices}" in directives(script)
    words = command(script)
    assert words[:4] == [sys.executable, "-m", "distributed.cli.dask_worker", "tcp://SCHEDULER:PORT"]
    assert option(words, "--nthreads") == "1"
    assert (option(words, "--nworkers") if devices > 1 else "1") == str(devices)
    assert option(words, "--preload-nanny") == "paceline.tasks.cluster.gpu_workers"
    assert option(words, "--memory-limit") == f"{64 / devices:.2f}GiB"


def test_what_a_site_asks_for_is_in_the_job():
    script = script_of(
        2,
        4,
        certificates=FILES,
        partition="gpu",
        account="vision",
        time_limit="1-12",
        interface="ib0",
        sbatch=["--constraint=a100"],
    )
    assert {"-p gpu", "-A vision", "-t 1-12", "--constraint=a100"} < directives(script)
    words = command(script)
    assert words[3] == "tls://SCHEDULER:PORT"
    assert option(words, "--interface") == "ib0"
    assert option(words, "--tls-ca-file") == "/tls/ca.pem"
    assert option(words, "--tls-cert") == "/tls/cert.pem"
    assert option(words, "--tls-key") == "/tls/key.pem"
    assert option(words, "--dashboard-address") == "127.0.0.1:0"


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "gpu\n{code}"},
        {"account": "vision\n{code}"},
        {"sbatch": ["--constraint=a100\n{code}"]},
        {"interface": "lo; {code}"},
        {"interface": "$({code})"},
    ],
    ids=str,
)
def test_no_setting_runs_code_on_the_node(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")  # instead of a worker
    marker = tmp_path / "marker"

    def planted(value):
        return [planted(one) for one in value] if isinstance(value, list) else value.format(code=f"touch {marker}")

    script = ""
    with suppress(ValidationError):
        script = script_of(1, 1, **{name: planted(value) for name, value in settings.items()})
    subprocess.run(["bash"], input=script, text=True, check=True)
    assert not marker.exists()


def test_an_interpreter_with_blanks_is_one_word(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my env/python")
    assert shlex.split(script_of(1, 1).splitlines()[-1])[0] == "/my env/python"


@pytest.mark.parametrize("character", [" ", "\n", ";", "$", "'"])
def test_a_path_that_the_script_would_take_apart_is_refused(character):
    demand = ClusterResources(num_hosts=1, workers_per_host=1, gpus=False)
    files = FILES.model_copy(update={"authority": f"/t{character}ls/ca.pem"})
    home = Path(f"/sh{character}ared/slurm")
    for variable, certificates, logs in (("PACELINE_HOME", FILES, home), ("PACELINE_TLS", files, LOGS)):
        with refused(variable):
            job_script(Cluster(kind="slurm", **ASKED), demand, certificates, logs)


def test_the_scheduler_listens_where_the_workers_do():
    cluster = Cluster(kind="slurm", interface="ib0", **ASKED)
    arguments = slurm_arguments(cluster, ClusterResources(num_hosts=1, workers_per_host=1, gpus=False), FILES, LOGS)
    assert arguments["scheduler_options"]["interface"] == arguments["interface"] == "ib0"
    assert arguments["protocol"] == "tls://"


def test_the_host_is_what_is_asked_for_until_the_job_runs():
    cluster = Cluster(kind="slurm", partition="gpu", **ASKED)
    host = requested_host(cluster, ClusterResources(num_hosts=2, workers_per_host=8, gpus=True))
    assert (host.num_cores, host.memory_bytes, len(host.gpus)) == (16, 64 * 2**30, 8)


def test_show_prints_the_job_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    asked = ["cluster.kind=slurm", "cluster.cores_per_host=8", "cluster.memory_per_host=16G", "cluster.time_limit=2:00"]
    assert main(["run", "digits", *asked, "execution.accelerator=gpu", "execution.num_nodes=2", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "tls: auto  # -> on (kind slurm reaches beyond this host)" in shown
    assert "auto  # -> to be chosen (by the hardware of the hosts that the cluster gives)" in shown
    script = "\n".join(line.removeprefix("# ") for line in shown[shown.index("# #!/") :].splitlines())
    assert {"--gres=gpu:1", "--exclusive", "-t 2:00"} < directives(script)
    assert f"--tls-key {tmp_path}/home/tls/key.pem" in script
    assert not (tmp_path / "home").exists()
