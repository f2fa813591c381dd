"""What the coordinator costs with 8 to 4,096 ranks: `python -m tests.simulation.scale [dask]`.

Without an argument: its own CPU time and messages while it watches a group, and the time from a loss to the decision to
restart and until all ranks of the next attempt run, with the real coordinator on simulated workers. The simulated clock
advances by the CPU time that it takes, and by the cost of Dask's messages. `dask` measures that cost, with real workers
in one other process.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

from paceline.tasks.cluster import client as dask_client
from paceline.tasks.train.launch import recovery
from paceline.tasks.train.launch.supervisor import claim_status
from tests.simulation import faults, world
from tests.simulation.cluster import Cluster
from tests.simulation.kernel import Kernel
from tests.simulation.patches import simulated
from tests.simulation.system import kernel

NUM_RANKS = (8, 64, 512, 4096)
PER_HOST = 8
WATCH_SECONDS = 20.0
RESTART_SECONDS = 300.0  # until all ranks must run again
MESSAGE_SECONDS, ANSWER_SECONDS = 2.0e-3, 1.0e-4
"""CPU time of the coordinator's process for a message to a worker or a batch of them, and for each answer in it; from
`python -m tests.simulation.scale dask`."""


class Meter:
    """CPU seconds of the flow's own code by the clock of this process, and messages; charged to the simulated clock."""

    def __init__(self, stack):
        self.cpu, self.messages, self.answers, self.decided = 0.0, 0, 0, None
        self._excluded = 0.0
        self._resume, self._answer, self._call, self._restart = (
            *(Kernel.resume, Cluster._answer, Cluster.call),
            recovery.Recovery.restart,
        )
        for owner, name in (
            (Kernel, "resume"),
            (Cluster, "_answer"),
            (Cluster, "call"),
            (recovery.Recovery, "restart"),
        ):
            replacement = getattr(self, name.strip("_"))
            stack.enter_context(
                patch.object(owner, name, lambda *given, call=replacement, **more: call(*given, **more))
            )

    @property
    def figures(self):
        return self.cpu, self.messages, self.answers

    def since(self, before):
        return [after - earlier for after, earlier in zip(self.figures, before, strict=True)]

    def resume(self, kernel, thread, token, value):
        if not thread.process.name.startswith("flow-"):
            self._resume(kernel, thread, token, value)
            return
        self._excluded, started = 0.0, time.process_time()
        self._resume(kernel, thread, token, value)
        spent = time.process_time() - started - self._excluded
        self.cpu += spent
        kernel.now += spent

    def answer(self, cluster, *arguments):
        started = time.process_time()
        try:
            return self._answer(cluster, *arguments)
        finally:
            self._excluded += time.process_time() - started  # a worker's

    def call(self, cluster, client, requests, seconds, batched=False):
        num_messages = min(len(requests), dask_client.MAX_MESSAGES) if batched else len(requests)
        self.messages, self.answers = self.messages + num_messages, self.answers + len(requests)
        spent = num_messages * MESSAGE_SECONDS + len(requests) * ANSWER_SECONDS
        self.cpu += spent
        cluster.world.kernel.wait(spent)
        return self._call(cluster, client, requests, seconds, batched)

    def restart(self, recovery, *arguments):
        if self.decided is None:
            self.decided = kernel().now
        self._restart(recovery, *arguments)


def site(num_ranks):
    return {
        "is_single": False,
        "has_locks": True,
        "num_nodes": num_ranks // PER_HOST,
        "num_devices": PER_HOST,
        "num_spare": 0,
        "min_workers": None,
        "trainings": ("a",),
        "has_two_clusters": False,
        "checkpoint_steps": 1000,
        "step_seconds": 1.0,
        "is_impatient": False,
    }


def simulate(num_ranks, lost):
    """Start a group, watch it, kill something, wait until all ranks run again; figures of it."""
    simulation = world.World(1, site(num_ranks))
    simulation.num_steps = 100_000
    clock, started = simulation.kernel, time.process_time()
    with ExitStack() as stack:
        stack.callback(clock.close)
        meter = Meter(stack)
        clock.run(1e6, lambda: len(simulation.ledger._devices) == num_ranks)
        start = (clock.now, *meter.figures)
        clock.run(clock.now + 5.0)
        assert clock.failure is None, clock.failure
        before, at = meter.figures, clock.now
        clock.run(at + WATCH_SECONDS)
        watched = [spent / (clock.now - at) for spent in meter.since(before)]
        first = newest(simulation)
        meter.decided = None
        faults._happen(simulation, faults.Fault(0.0, f"kill a {lost}", num_ranks // 2, 1.0))
        killed, before = clock.now, meter.figures
        clock.run(killed + RESTART_SECONDS, lambda: newest(simulation) is not first and newest(simulation).round)
        assert clock.failure is None, clock.failure
        assert newest(simulation) is not first, "the ranks did not start again"
        assert newest(simulation).round, "not all ranks met again"
    restart = (meter.decided - killed, clock.now - killed, *meter.since(before))
    return SimpleNamespace(start=start, watched=watched, restart=restart, spent=time.process_time() - started)


def newest(simulation):
    """The group of the newest attempt; its `round` is 0 until all of its ranks have met for the first time."""
    return list(simulation.groups.values())[-1]


def measure_scale(sizes):
    print("ranks  start: s  CPU s  messages | watch: cores  messages/s  answers/s", end=" ")
    print("| lost    decided: s  all run: s  CPU s  messages")
    for num_ranks in sizes:
        for lost in ("rank", "worker"):
            found = simulate(num_ranks, lost)
            cores, messages, answers = found.watched
            decision, restart, cpu, num_messages, _ = found.restart
            print(
                f"{num_ranks:5}  {found.start[0]:8.1f}  {found.start[1]:5.2f}  {found.start[2]:8} |"
                f" {cores:12.3f}  {messages:10.1f}  {answers:9.1f} | {lost:6}  {decision:10.2f}  {restart:10.1f}"
                f"  {cpu:5.2f}  {num_messages:8}   ({found.spent:.0f} s of this program)",
                flush=True,
            )


WORKERS = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    options = dict(processes=False, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None)
    with LocalCluster(n_workers=int(sys.argv[1]), **options, protocol="tcp") as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


def measure_dask(sizes):
    print("workers  batched  messages  CPU ms a round  ms a message  wall s a round")
    for number in sizes:
        command = [sys.executable, "-W", "ignore", "-c", WORKERS, str(number)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, **pipes) as process:
            address = process.stdout.readline().strip()
            with dask_client.connect(address) as client:
                requests = [(worker, claim_status, ("key", "device")) for worker in dask_client.workers(client)]
                for batched in (False, True):
                    dask_client.call_workers(client, requests, 60.0, batched=batched)
                    started, cpu = time.perf_counter(), time.process_time()
                    for _ in range(3):
                        answers = dask_client.call_workers(client, requests, 60.0, batched=batched)
                    cpu, wall = (time.process_time() - cpu) / 3, (time.perf_counter() - started) / 3
                    assert all(answer.state == "queued" for answer in answers), answers[0]
                    num = min(number, dask_client.MAX_MESSAGES) if batched else number
                    figures = f"{num:8}  {1e3 * cpu:14.1f}  {1e3 * cpu / num:12.2f}  {wall:.2f}"
                    print(f"{number:7}  {batched!s:7}  {figures}", flush=True)
            process.stdin.close()


if __name__ == "__main__":
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "error")
    chosen = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if "dask" in sys.argv[1:]:
        measure_dask(chosen or (8, 64, 256))
    else:
        with simulated():
            measure_scale(chosen or NUM_RANKS)
