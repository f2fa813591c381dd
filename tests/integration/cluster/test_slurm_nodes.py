"""infra/slurm/run.sbatch on a real Slurm of two nodes, each with a network, a name and processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.tasks.train.launch.rank_process import running_ranks
from tests.integration.conftest import SMALL
from tests.support.hosts import lan, skip_unless_permitted
from tests.support.patience import until
from tests.support.slurm import run, slurm_on

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "infra" / "slurm" / "run.sbatch"
LONG = [*SMALL, "execution.checkpoint_steps=10", "execution.num_threads=1", "execution.memory_format=contiguous"]
LONG += ["execution.loading=resident", "execution.compile=off"]
"""Nothing of the execution is left open: an endless run would first search for minutes."""
ENDLESS = [*LONG, "recipe.num_epochs=100000", "recipe.schedule=constant"]
pytestmark = pytest.mark.slow


class Job:
    """A job of run.sbatch.

    Args:
        home: Its PACELINE_HOME.
        arguments: Of `paceline run`.
        nodes: Number of nodes.
        minutes: Time limit.
    """

    def __init__(self, home, *arguments, nodes=2, minutes=20):
        self.home = home
        self._log = home / "job.log"
        home.mkdir(exist_ok=True)
        own = {"PACELINE_HOME": str(home), "PACELINE_BIN": f"{sys.prefix}/bin", "PACELINE_INTERFACE": "lan0"}
        command = ["sbatch", "--parsable", f"--nodes={nodes}", "--gres=none", f"--time={minutes}"]
        done = subprocess.run(
            [*command, f"--output={self._log}", SCRIPT, *arguments, "--json"],
            cwd=ROOT,
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=True,
        )
        self.id = done.stdout.strip()

    def state(self):
        """Slurm's word for its state."""
        return run("squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%T").strip()

    def end(self):
        """Its state once it has ended."""
        return until(lambda: now if (now := self.state()) not in ("PENDING", "RUNNING", "COMPLETING") else None, "end")

    def log(self):
        """All that it has printed."""
        return self._log.read_text() if self._log.exists() else ""

    def summary(self):
        """What `--json` prints."""
        return json.loads([line for line in self.log().splitlines() if line.startswith("{")][-1])

    def run(self):
        """The run in MLflow; None before there is one."""
        if not (self.home / "runs").exists():
            return None
        client = MlflowClient(f"sqlite:///{self.home}/mlflow.db")
        experiment = client.get_experiment_by_name("paceline")
        return next(iter(client.search_runs([experiment.experiment_id])), None)

    def wait_for_checkpoint(self, after=0):
        """The step of a checkpoint, once there is one after a step."""

        def newest():
            assert self.state() in ("PENDING", "RUNNING"), self.log()
            return step if (step := self.newest_step()) > after else None

        return until(newest, "checkpoint")

    def newest_step(self):
        found = self.home.glob("runs/*/checkpoints/step-*.ckpt")
        return max((int(path.stem.partition("-")[2].partition("-")[0]) for path in found), default=0)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Two nodes of a running Slurm, by name."""
    skip_unless_permitted()
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with lan() as pair:
        found = dict(zip(("host-a", "host-b"), pair, strict=True))
        (tmp_path / "slurm").mkdir()
        with slurm_on(tmp_path / "slurm", found) as conf:
            monkeypatch.setenv("SLURM_CONF", str(conf))
            yield found


def ranks_on(host, job):
    """Ranks of the job on a host."""
    ranks = set(running_ranks(job.run().info.run_id))
    return [process for process in host.processes() if process.pid in ranks]


def test_a_job_of_two_nodes_trains_on_both_and_leaves_nothing(hosts, tmp_path):
    job = Job(tmp_path / "home", "digits", *SMALL, "recipe.num_epochs=2")
    assert job.end() == "COMPLETED", job.log()
    assert job.summary()["train"]["world_size"] == 2
    assert job.run().data.tags["paceline.hosts"] == "host-a, host-b"
    assert job.run().info.status == "FINISHED"
    assert f"tls://{hosts['host-a'].address}:" in job.log()
    assert list((job.home / "slurm").iterdir()) == []
    for host in hosts.values():
        left = [" ".join(process.cmdline()) for process in host.processes()]
        assert [line for line in left if "dask" in line or "paceline" in line] == []


def test_a_job_is_interrupted_before_its_time_ends_and_resumes(hosts, tmp_path):
    job = Job(tmp_path / "home", "digits", *ENDLESS, minutes=6)
    job.wait_for_checkpoint()
    assert job.end() == "FAILED", job.log()  # not TIMEOUT: it ended itself
    step = job.newest_step()
    run_id = job.run().info.run_id
    assert job.run().info.status == "KILLED"
    resumed = Job(tmp_path / "home", "--resume", run_id)
    resumed.wait_for_checkpoint(after=step)
    assert resumed.run().info.status == "RUNNING"
    assert "Resuming from" in resumed.log()
    run("scancel", "--batch", "--signal=TERM", resumed.id)
    assert resumed.end() == "FAILED", resumed.log()
    assert resumed.run().info.status == "KILLED"
    assert resumed.run().info.run_id == run_id


def test_a_run_recovers_from_a_killed_worker_and_outlives_a_node(hosts, tmp_path):
    job = Job(tmp_path / "home", "digits", *LONG, "recipe.num_epochs=150", "cluster.min_workers=1")
    step = job.wait_for_checkpoint()
    (rank,) = ranks_on(hosts["host-b"], job)
    rank.parent().kill()  # the Dask worker
    until(lambda: [one for one in ranks_on(hosts["host-b"], job) if one.pid != rank.pid], "rank in its place")
    job.wait_for_checkpoint(after=step + 20)
    hosts["host-b"].end()
    assert job.end() == "COMPLETED", job.log()
    summary = job.summary()
    assert len(summary["train"]["restarts"]) >= 2
    assert summary["train"]["world_size"] == 1
    steps = [
        one.step
        for one in MlflowClient(f"sqlite:///{job.home}/mlflow.db").get_metric_history(summary["run_id"], "train/loss")
    ]
    assert steps == sorted(set(steps))


def test_a_run_whose_node_died_ends_with_an_error_that_names_it(hosts, tmp_path):
    job = Job(tmp_path / "home", "digits", *ENDLESS)
    job.wait_for_checkpoint()
    hosts["host-b"].end()
    assert job.end() == "FAILED", job.log()
    (error,) = [line for line in job.log().splitlines() if line.startswith("error: ")]  # Slurm's have its name before
    assert "did not come back" in error
    assert hosts["host-b"].address in error
    assert job.run().info.status == "FAILED"
