"""A real Prefect server on a free port, with its UI. It can be killed, and come back with all that it held."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

START_SECONDS = 120


class PrefectServer:
    """A server that runs between `start` and `stop` or `kill`.

    Args:
        directory: existing, for its log and its pages.
        environment: of its own.
    """

    def __init__(self, directory, **environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._directory = directory
        # What the UI's own pages ask, and where they lie; else a fixed port, and a folder that all servers share.
        pages = {"PREFECT_UI_API_URL": self.url, "PREFECT_UI_STATIC_DIRECTORY": str(directory / "ui")}
        self._environment = os.environ | {"PREFECT_API_URL": ""} | pages | environment
        self._process = None

    def start(self):
        """Start it, and wait until it answers."""
        _make_database(Path(self._environment["PREFECT_HOME"]))
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        command += ["--port", str(self._port)]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        _wait_until_healthy(self.url, self._process)

    def is_ready(self):
        """Whether it answers and has its database."""
        try:
            urllib.request.urlopen(f"{self.url}/ready", timeout=2).close()
        except OSError:
            return False
        return True

    def stop(self):
        """End it in order."""
        self._process.terminate()
        self._process.wait(30)

    def kill(self):
        """End it at once, with all its processes, as a power failure does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def prefect_server(directory):
    """The address of a server that runs while the body does.

    Args:
        directory: existing, for its log.
    """
    server = PrefectServer(directory)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def _make_database(home):
    """Put a migrated database into a new home. Migrating takes half of a start, so it is done once for all tests."""
    if (home / "prefect.db").exists():
        return
    made = Path(tempfile.gettempdir()) / f"paceline-tests-{os.getuid()}-prefect-{version('prefect')}.db"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as place:
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
            subprocess.run(command, env=os.environ | {"PREFECT_HOME": place}, check=True, capture_output=True)
            (Path(place) / "prefect.db").replace(made)  # at once, as other processes of the tests do
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, home / "prefect.db")


def _wait_until_healthy(url, server):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the Prefect server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    server.kill()
    server.wait(30)
    raise TimeoutError(f"no Prefect server within {START_SECONDS} s")
