"""A real Prefect server on a free port, with its UI."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

START_SECONDS = 120


@contextmanager
def prefect_server(directory):
    """The address of a server that runs while the body does.

    Args:
        directory: existing, for its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}/api"
    # What the UI's own pages ask, and where they lie; else a fixed port, and a folder that all servers share.
    pages = {"PREFECT_UI_API_URL": url, "PREFECT_UI_STATIC_DIRECTORY": str(directory / "ui")}
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PREFECT_API_URL": ""} | pages)
        try:
            _wait_until_healthy(url, server)
            yield url
        finally:
            server.terminate()
            server.wait(30)


def _wait_until_healthy(url, server):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the Prefect server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    raise TimeoutError(f"no Prefect server within {START_SECONDS} s")
