"""A real MLflow server, which can go away and come back with all that it held."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

START_SECONDS = 120


class MlflowServer:
    """A server on a free port of loopback, running between `start` and `stop`.

    Args:
        directory: existing, for its database, its artifacts and its log.
    """

    def __init__(self, directory):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._directory = directory
        self._process = None

    def start(self):
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._directory}/mlflow.db"]
        command += ["--artifacts-destination", str(self._directory / "artifacts")]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 2 processes in place of 10
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, "the MLflow server ended"
            assert time.monotonic() < deadline, f"no MLflow server within {START_SECONDS} s"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)

    def stop(self):
        """End it at once, as a crash does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
