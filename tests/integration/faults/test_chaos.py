"""Twenty minutes of what clusters do, at random times, against the program itself: nothing is lost and nothing is left.

CHAOS_MINUTES sets another length, CHAOS_SEED another course. Prints what came of each fault.
"""

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter

import psutil
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.integration.conftest import SMALL
from tests.integration.faults.test_recovery import told_steps
from tests.support.scratch_cluster import ScratchCluster
from tests.support.small_disk import fill, small_disk

MINUTES = float(os.environ.get("CHAOS_MINUTES", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
RUN = [*SMALL, "recipe.num_epochs=75", "execution.num_devices=2", "execution.num_threads=1"]
RUN += ["execution.checkpoint_steps=10", "track.experiment=chaos", "cluster.kind=address"]
NUM_STEPS = 75 * 21
NUM_TEST = 359
LATEST = 25.0
"""Seconds after a command's start: beyond its start-up, most of its training."""
NAMED = ("RankError", "LostError", "InputError", "paceline:")


class Chaos:
    """Faults by name; each is given the process of the command."""

    def __init__(self, cluster, mlflow_server, filler):
        self._cluster = cluster
        self._mlflow_server = mlflow_server
        self._filler = filler
        self._random = random.Random(SEED)

    def draw(self):
        name = self._random.choice([name for name in vars(type(self)) if not name.startswith("_") and name != "draw"])
        return name, self._random.uniform(2.0, LATEST)

    def kill_a_rank(self, command):
        self._signal_a_rank(signal.SIGKILL)

    def stop_a_rank(self, command):
        self._signal_a_rank(signal.SIGSTOP)

    def truncate_the_newest_checkpoint_and_kill_a_rank(self, command):
        found = sorted(Environment().root.glob("runs/*/checkpoints/step-*.ckpt"), key=lambda path: path.stat().st_mtime)
        if found:
            found[-1].write_bytes(found[-1].read_bytes()[:-50])
        self._signal_a_rank(signal.SIGKILL)

    def kill_a_worker(self, command):
        self._cluster.kill(self._cluster.worker_pid(self._random.randrange(2)))

    def stop_a_worker_for_a_while(self, command):
        pid = self._cluster.worker_pid(self._random.randrange(2))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(20)
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)

    def kill_a_nanny_and_start_another(self, command):
        number = self._random.randrange(2)
        self._cluster.kill(self._cluster.nannies[number].pid)
        time.sleep(3)
        self._cluster.nannies[number] = self._cluster.start_worker(number)

    def restart_the_cluster(self, command):
        self._cluster.stop()
        self._cluster.start()

    def fill_the_disk_for_a_while(self, command):
        fill(self._filler)
        time.sleep(4)
        self._filler.unlink()

    def take_mlflow_away_for_a_while(self, command):
        self._mlflow_server.stop()
        time.sleep(8)
        self._mlflow_server.start()

    def kill_the_flow(self, command):
        command.kill()

    def end_the_flow(self, command):
        command.terminate()

    def _signal_a_rank(self, number):
        living = ranks()
        if living:
            os.kill(self._random.choice(living), number)


def finished(client, run_id, summary):
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert summary["train"]["num_steps"] == NUM_STEPS
    assert summary["evaluate"]["num_samples"] == NUM_TEST
    steps = [metric.step for metric in client.get_metric_history(run_id, "train/loss")]
    assert steps == told_steps(75), "no step is missing or told twice"
    return summary["train"]["restarts"]


class Course:
    """Command after command, each with its fault."""

    def __init__(self, paceline, cluster, mlflow_server, filler):
        self._paceline = paceline
        self._address = cluster.address
        self._uri = mlflow_server.url
        self._chaos = Chaos(cluster, mlflow_server, filler)
        self._client = MlflowClient(self._uri)
        self.outcomes, self.restarts, self.num_resumed = Counter(), [], 0

    def disturbed(self):
        """One training, one fault."""
        fault, after = self._chaos.draw()
        command = self._begin()
        disturber = threading.Timer(after, getattr(self._chaos, fault), [command])
        disturber.start()
        stdout, stderr = command.communicate(timeout=300)
        disturber.cancel()
        disturber.join()
        self.outcomes[fault, self._outcome(command.returncode, stdout, stderr)] += 1

    def undisturbed(self):
        """One training, as if nothing had ever happened."""
        command = self._begin()
        stdout, stderr = command.communicate(timeout=300)
        assert command.returncode == 0, stderr
        assert finished(self._client, *run_of(stdout)) == []

    def check_nothing_is_left(self):
        assert ranks() == []
        leases = [
            path.stem for path in Environment().leases.iterdir() if DeviceLock(Environment().leases, path.stem).owner()
        ]
        assert leases == []
        assert [run.info.run_id for run in unfinished(self._client)] == []
        assert list(Environment().root.glob("runs/*/checkpoints/.*")) == [], "temporary files"

    def _begin(self):
        settings = [*RUN, f"cluster.address={self._address}"]
        return self._paceline("run", "digits", *settings, "--json", MLFLOW_TRACKING_URI=self._uri)

    def _outcome(self, status, stdout, stderr):
        if status == 0 or (status == -signal.SIGTERM and stdout):  # ended when it had told all, in Python's own exit
            found = finished(self._client, *run_of(stdout))
            self.restarts += found
            return "restarted" if found else "went on"
        last = " ".join(stderr.splitlines()[-2:])  # error and hint
        if status in (1, 2):
            assert any(name in last for name in NAMED), stderr
            return last[:100]
        assert status in (-signal.SIGKILL, 128 + signal.SIGTERM), stderr
        return self._resumed()

    def _resumed(self):
        left = unfinished(self._client)
        if not left:
            return "ended before its run began"
        where = ["cluster.kind=address", f"cluster.address={self._address}"]
        command = self._paceline(
            "run", "--resume", left[0].info.run_id, *where, "--json", MLFLOW_TRACKING_URI=self._uri
        )
        stdout, stderr = command.communicate(timeout=300)
        assert command.returncode == 0, stderr
        self.restarts += finished(self._client, *run_of(stdout))
        self.num_resumed += 1
        return "resumed"

    def __str__(self):
        lines = [f"{count:3} {fault}: {outcome}" for (fault, outcome), count in sorted(self.outcomes.items())]
        lines.append(
            f"{sum(self.outcomes.values())} faults; {len(self.restarts)} restarts within a run, "
            f"{self.num_resumed} runs resumed"
        )
        seconds = [restart["seconds"] for restart in self.restarts]
        lost = [restart["lost_steps"] for restart in self.restarts]
        if self.restarts:
            lines.append(f"to recover: median {statistics.median(seconds):.1f} s, largest {max(seconds):.1f} s")
            lines.append(f"steps done again: median {statistics.median(lost):.0f}, largest {max(lost)} of {NUM_STEPS}")
        return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_chaos(paceline, mlflow_server):
    deadline = time.monotonic() + MINUTES * 60
    with small_disk(Environment().root / "runs", megabytes=512) as filler, ScratchCluster(2) as cluster:
        course = Course(paceline, cluster, mlflow_server, filler)
        try:
            while time.monotonic() < deadline:
                course.disturbed()
        finally:
            sys.stdout.write(f"\n{course}\n")
        course.undisturbed()
        course.check_nothing_is_left()


def ranks():
    """Process ids of all ranks of this test's trainings."""
    home = str(Environment().root)
    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [
        pid for pid, command in commands.items() if "paceline.tasks.train.rank.main" in command and home in command[-1]
    ]


def run_of(stdout):
    summary = json.loads(stdout.splitlines()[-1])
    return summary["run_id"], summary


def unfinished(client):
    """Runs that are neither finished nor failed, the newest first."""
    experiment = client.get_experiment_by_name("chaos")
    if experiment is None:
        return []
    found = client.search_runs([experiment.experiment_id], "attributes.status != 'FINISHED'")
    return [run for run in found if run.info.status in ("RUNNING", "KILLED")]
