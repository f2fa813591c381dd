"""A real `paceline ui`, as its user starts it, and what it printed."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.services.home import free_port

START_SECONDS = 120


@contextmanager
def paceline_ui(home, log, **environment):
    """The process and the address that it printed, while the body runs.

    Args:
        home: PACELINE_HOME, and the user's home too.
        log: file for what it prints.
        environment: more variables.
    """
    port = free_port()
    program = str(Path(sys.executable).with_name("paceline"))
    places = {"PACELINE_HOME": str(home), "HOME": str(home), "MLFLOW_WORKERS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "ui", "--port", str(port)],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | places | environment,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no server within {START_SECONDS} s: {log.read_text()}"
            time.sleep(0.2)
        yield process, re.search(r"http://\S+", log.read_text())[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except urllib.error.HTTPError as refusal:
        refusal.close()
    except OSError:
        return False
    return True
