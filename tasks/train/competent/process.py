"""The process of the competent loop, as a rank starts it and speaks with it."""

import pickle
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from paceline.conf.config import Speedup

LOOP = Path(__file__).with_name("loop.py")
MIN_PROBE_SECONDS = 10.0  # a shorter probe has no time for the loop, whose start takes some seconds
POLL_SECONDS = 0.1
END_SECONDS = 5.0  # for workers that are killed


class LoopError(RuntimeError):
    """The loop has failed, ended, or not answered in time."""


class LoopProcess:
    """A process that imports torch, and then waits."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:  # -P: modules in the script's folder must not hide packages
            command = [sys.executable, "-P", str(LOOP), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request; LoopError without one within these seconds."""
        end = time.monotonic() + seconds
        try:
            self._pipe.send_bytes(pickle.dumps(request))  # `send` would share the memory of tensors
            while not self._pipe.poll(POLL_SECONDS):  # workers of the loop hold its end open when it has ended
                if self._process.poll() is not None:
                    raise LoopError("its process ended")
                if time.monotonic() > end:
                    raise LoopError(f"it did not answer within {seconds:.0f} s")
            outcome, answer = self._pipe.recv()
        except (OSError, EOFError) as error:
            raise LoopError("its process ended") from error
        if outcome == "failed":
            raise LoopError(answer)
        return answer

    def close(self) -> None:
        """End the process and its workers, which would keep its context on a GPU alive for seconds."""
        self._pipe.close()
        workers: list[psutil.Process] = []
        with suppress(psutil.Error):  # it has ended
            workers = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        for worker in workers:
            with suppress(psutil.Error):
                worker.kill()
        self._process.wait()
        end = time.monotonic() + END_SECONDS
        while any(map(_is_alive, workers)) and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)


def _is_alive(process: psutil.Process) -> bool:
    try:  # a zombie has ended, and waits for its parent
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


_ready: list[LoopProcess] = []


def is_wanted(speedup: Speedup) -> bool:
    """Whether a run measures the loop."""
    return speedup.baseline == "probe" and speedup.competent_loop and speedup.max_seconds >= MIN_PROBE_SECONDS


def start_early() -> None:
    """Start the loop next to the imports of this process, which will be a rank."""
    _ready.append(LoopProcess())


def take_process() -> LoopProcess:
    """The process that was started early, or a new one."""
    return _ready.pop() if _ready else LoopProcess()
