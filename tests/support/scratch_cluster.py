"""A Dask cluster of the program `dask`, as an operator starts it, whose parts can be killed one by one."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil

from paceline.conf.load import DASK_SETTINGS
from paceline.tasks.cluster import renewal
from paceline.tasks.cluster.client import connect, workers

START_SECONDS = 60


class ScratchCluster:
    """A scheduler and its workers on loopback, each worker with its nanny.

    Args:
        num_workers: single-threaded.
        tls: directory of `infra/certificates`, in PACELINE_TLS too; None for a cluster without TLS.
    """

    def __init__(self, num_workers, tls=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._scheme = "tls" if tls else "tcp"
        self.address = f"{self._scheme}://127.0.0.1:{port}"
        files = {"ca-file": "ca.pem", "cert": "cert.pem", "key": "key.pem"} if tls else {}
        self._tls = [word for name, file in files.items() for word in (f"--tls-{name}", str(tls / file))]
        self._num_workers = num_workers
        self._processes = []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def start(self):
        """Start everything, and wait until all workers are there."""
        port = self.address.rsplit(":", 1)[1]
        self.scheduler = self._start("dask_scheduler", "--host", f"{self._scheme}://127.0.0.1", "--port", port)
        self.nannies = [self.start_worker(number) for number in range(self._num_workers)]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                with connect(self.address) as client:
                    while time.monotonic() < deadline:
                        if len(workers(client)) == self._num_workers:
                            return
                        time.sleep(0.1)
            except Exception:  # noqa: BLE001  not yet
                continue
        raise TimeoutError("the cluster did not come up")

    def start_worker(self, number):
        """Start one more worker; its nanny's process."""
        preload = ["--preload-nanny", renewal.__name__]
        return self._start("dask_worker", self.address, "--nthreads", "1", "--name", str(number), *preload)

    def stop(self):
        """Kill everything."""
        for process in self._processes:
            for one in family(process.pid):
                one.kill()
            process.wait()
        self._processes.clear()

    def worker_pid(self, number):
        """Process of a worker itself, not of its nanny."""
        nanny = psutil.Process(self.nannies[number].pid)
        found = [child for child in nanny.children() if "spawn_main" in " ".join(child.cmdline())]
        return found[0].pid

    def kill(self, pid):
        """As the kernel does when memory is short."""
        os.kill(pid, signal.SIGKILL)

    def _start(self, module, *arguments):
        status_page = ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments, *status_page, *self._tls]
        environment = os.environ | {"DASK_CONFIG": str(DASK_SETTINGS)}
        process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        self._processes.append(process)
        return process


def family(pid):
    """A process and its descendants, as far as they live."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []
