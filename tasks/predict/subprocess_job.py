"""A fresh process for one measurement, in the environment of a rank, so that its times are comparable.

A worker starts it and waits for it; it ends with the worker. It reads `spec.json`, writes `result.json`, and prints to
`log.txt`.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.tasks.errors import RunError
from paceline.tasks.files import write_durably
from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.layout import rank_environment
from paceline.tasks.train.launch.rank_process import end_group
from paceline.tasks.train.launch.standby import PARENT, die_with_supervisor

SPAWNED_AT = "PACELINE_SPAWNED_AT"  # when it was started, by the clock that all processes of a host share
FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)')
CHAINED = "The above exception was the direct cause", "During handling of the above exception"
"""Beginnings of the line before the next error of a chain, as Python prints them."""
SOURCE = Path(__file__).parents[2]
SPEC, RESULT, LOG = "spec.json", "result.json", "log.txt"

Spec = TypeVar("Spec", bound=Record)


class SubprocessJob(Record):
    """Module and input of the process."""

    module: str  # that calls `subprocess_main`
    spec: str  # its work, as JSON
    directory: str  # its own, seen by the worker
    num_threads: int
    devices: tuple[str, ...] = ()  # UUIDs of GPUs that it may use
    interface: str | None = None  # network interface for gloo and NCCL


def _place_in(lines: list[str]) -> str:
    """The newest place in the last error and its causes that is neither ours, nor of Python or a package; or empty."""
    start = len(lines)
    for number in reversed(range(len(lines))):
        if lines[number].startswith("Traceback (most recent call last)"):
            start = number
            if not any(line.startswith(CHAINED) for line in lines[max(0, number - 2) : number]):
                break
    frames = [found for line in lines[start:] if (found := FRAME.match(line))]
    own = [found for found in frames if not found[1].startswith((sys.prefix, sys.base_prefix, str(SOURCE), "<"))]
    return f" in {own[-1][1]}, line {own[-1][2]}" if own else ""


def run_in_subprocess(job: SubprocessJob, seconds: float | None = None) -> str:
    """Run a job on this worker; return its result (JSON). RunError with its last line; TimeoutError after `seconds`."""
    place = Path(job.directory)
    place.mkdir(parents=True, exist_ok=True)
    (place / RESULT).unlink(missing_ok=True)
    write_durably(place / SPEC, job.spec.encode())
    environment = rank_environment(os.environ, job.num_threads, job.interface, job.devices)
    environment |= {SPAWNED_AT: repr(time.monotonic()), PARENT: str(os.getpid())}
    with (place / LOG).open("wb") as log:
        command = [sys.executable, "-P", "-m", job.module, str(place / SPEC)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{job.module} took longer than {seconds:.0f} s") from error
    finally:
        end_group(process)
    if status != 0:
        lines = (place / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        raise RunError(f"{job.module} ended with status {status}: {last}{_place_in(lines)}; see {place / LOG}")
    if not (place / RESULT).exists():
        fault = f"{job.module} ended with status 0 before it had a result, as code that calls sys.exit(0) does"
        raise RunError(f"{fault}; see {place / LOG}")
    return (place / RESULT).read_text(encoding="utf-8")


def subprocess_main(kind: type[Spec], work: Callable[[Spec], Record]) -> None:
    """Run the job of the file that is named on the command line."""
    die_with_supervisor()
    path = Path(sys.argv[1])
    result = work(kind.model_validate_json(path.read_bytes()))
    write_durably(path.with_name(RESULT), result.model_dump_json().encode())


def since_start() -> float:
    """Seconds since this process was started."""
    return time.monotonic() - float(os.environ[SPAWNED_AT])
