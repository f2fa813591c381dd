"""A process of a side: started, timed, read, and ended with all that it started."""

import ctypes
import json
import math
import os
import re
import resource
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from paceline.tasks.errors import InputError
from paceline.tasks.judge.logged_metric import NOT_INHERITED, logging_environment, new_token, read_logged
from paceline.tasks.judge.records import Defer, ProcessRun, Question, Side
from paceline.tasks.measure.step_marks import VARIABLE

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 1.0  # for helpers of a program, such as Python's resource tracker, that end by themselves after it
STOP_SECONDS = 30.0  # for a training by Paceline to end its run, and what it has started on other hosts
KILL_SECONDS = 10.0  # a process that waits for a file system cannot be killed
POLL_SECONDS = 0.02
MOST = 1.79e308  # as which the database of MLflow keeps an infinite number
REASONS_KEY = "train.validity.reasons"  # in the JSON of a training
BLOCK_BYTES = 512  # of what Linux counts as read from disks
MAX_WARM_UP = 10  # marked steps that do not count, but at most half of them


def run_process(side: Side, question: Question, defer: Defer = nullcontext) -> ProcessRun:
    """Run a side once, and leave nothing behind; `defer` delays a signal while processes are ended.

    Raises InputError: it fails, takes longer than its limit, leaves processes behind, does not print what is read, or
    does not mark steps as the process before it did.
    """
    is_training = question.rate_key is not None
    command = ["/bin/sh", "-c", f"{'exec ' if is_training else ''}{side.command}"]  # a shell would keep its signals
    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        tempfile.TemporaryFile() as output,
        _end_descendants(defer) as remaining,
    ):
        marks = Path(folder, "steps")
        started = time.monotonic()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        streams["env"] = os.environ | {VARIABLE: str(marks), "PACELINE_WARM": "off"}  # each process starts cold
        token = new_token()
        if question.logged:
            given = {name: value for name, value in streams["env"].items() if name not in NOT_INHERITED}
            streams["env"] = given | logging_environment(question.logged, token)
        num_blocks = _num_blocks_read()
        process = subprocess.Popen(command, cwd=side.directory, start_new_session=True, **streams)
        try:
            has_ended = _wait(process.pid, question.limit_seconds)
            seconds = time.monotonic() - started
        finally:
            if is_training:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
            process.kill()  # as `terminate`, it does nothing to a process that has ended
            status = process.wait()
        if not has_ended:
            fault = f"--{side.name} {side.label}: it has not ended after {question.limit_seconds:g} seconds"
            raise InputError(f"{fault} and was ended", hint=f"--limit {4 * question.limit_seconds:g}")
        output.seek(0)
        text = output.read().decode(errors="replace")
        if status != 0:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
            reason, hint = (_last_value(text, name) if is_training else None for name in ("error", "hint"))
            how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
            raise InputError(
                f"--{side.name} {side.label}: it {how} ({str(reason or last).strip()[:200]})",
                hint=hint or f"run it alone first: {side.command}",
            )
        if left := remaining():
            names = ", ".join(left)
            raise InputError(
                f"--{side.name} {side.label}: it left processes behind, which were ended ({names[:200]})",
                hint="let the command wait for all processes that it starts",
            )
        times = [float(line) for line in marks.read_text().split()] if marks.exists() else []
        read_bytes = BLOCK_BYTES * (_num_blocks_read() - num_blocks)
    run = read_output(text, seconds, side, question).model_copy(update={"read_bytes": read_bytes})
    if question.logged:
        value, run_id = read_logged(question.logged, token, side)
        metric = _number(value, "--mlflow-metric", question.logged.name, side)
        run = run.model_copy(update={"metric": metric, "run_id": run_id})
    return run if question.steps or question.rate_key else _read_marks(times, run, side, question)


def read_output(text: str, seconds: float, side: Side, question: Question) -> ProcessRun:
    """Read the metric and the steps from the output of a process that took so many seconds."""
    metric = None
    if question.metric is not None:
        matches = list(re.finditer(question.metric, text, re.MULTILINE))
        found = matches[-1][matches[-1].re.groups and 1] if matches else None
        metric = _number(found, "--metric", question.metric, side)
    elif question.metric_key is not None:
        metric = _number(_last_value(text, question.metric_key), "--metric-key", question.metric_key, side)
    if question.steps is not None:
        found_steps = [match[match.re.groups and 1] for match in re.finditer(question.steps, text, re.MULTILINE)]
        steps = [_number(step, "--steps", question.steps, side) for step in found_steps or [None]]
        seconds = float(np.mean(steps[len(steps) // 2 :]))  # the first half is warm-up
        if seconds <= 0:
            raise InputError(f"--steps {question.steps}: the --{side.name} side prints steps of {seconds:g} seconds")
    if question.rate_key is None:
        return ProcessRun(seconds=seconds, metric=metric)
    rate = _last_value(text, question.rate_key)
    if rate is None:
        fault = f"--{side.name} {side.label}: the training is too short to have a steady state after its warm-up"
        raise InputError(fault, hint="train for two epochs or more", setting=f"--{side.name}")
    reasons = tuple(_last_value(text, REASONS_KEY) or ())
    return ProcessRun(seconds=1 / rate, metric=metric, run_id=_last_value(text, "run_id"), contaminated=reasons)


def _read_marks(times: list[float], run: ProcessRun, side: Side, question: Question) -> ProcessRun:
    """The run with the median of its marked steps, without the first ones, in place of the time of the process."""
    fault = f"--{side.name} {side.label}: it marks"
    hint = "call step() in each step of both sides, or begin the command with: env -u PACELINE_STEPS"
    if question.is_marked not in (None, bool(times)):
        raise InputError(f"{fault} {'' if times else 'no '}steps, unlike the process before it", hint=hint)
    if not times:
        return run
    steps = np.diff(times)
    counted = steps[min(MAX_WARM_UP, len(steps) // 2) :]
    seconds = float(np.median(counted)) if len(counted) else 0.0
    if seconds <= 0:
        raise InputError(f"{fault} {len(times)} steps, too few for a time", hint=hint)
    return run.model_copy(update={"seconds": seconds, "num_steps": len(counted)})


def _number(found: Any, option: str, pattern: str, side: Side) -> float:
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < MOST:
        what = "nothing that matches" if found is None else f"{found}, which is not a finite number"
        fault = f"{option} {pattern}: the --{side.name} side prints {what}"
        raise InputError(fault, hint=f"compare it with the output of: {side.command}", setting=option)
    return number


def _last_value(text: str, key: str) -> Any:
    """The value of a dotted key in the last line of JSON that has it; None where no line has."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            value = json.loads(line)
            for part in key.split("."):
                value = value[part]
            return value
    return None


def _num_blocks_read() -> int:
    """Blocks that children which have ended, and theirs, have read from disks."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock


def _wait(pid: int, seconds: float) -> bool:
    """Wait for the end of a child; return whether it came. `Popen.wait` with a limit is 50 ms late."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@contextmanager
def _end_descendants(defer: Defer) -> Iterator[Any]:
    """End the processes that the body starts; its value lists those that remain after a moment.

    Meanwhile this process becomes the parent of all descendants that lose theirs, also in sessions of their own.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))

    def alive() -> list[psutil.Process]:
        seen = None
        while True:  # a process may end after it was listed and its last child started after that: list again
            started = set(psutil.Process().children(recursive=True)) - before
            states = {process: _is_running(process) for process in started}
            if any(states.values()) or states == seen:
                return [process for process, runs in states.items() if runs]
            seen = states

    def remaining() -> list[str]:
        until = time.monotonic() + GRACE_SECONDS
        while (found := alive()) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        names = []
        for process in found:
            with suppress(psutil.Error):
                names.append(" ".join(process.cmdline()) or process.name())
        return names

    try:
        yield remaining
    finally:
        with defer():
            until = time.monotonic() + KILL_SECONDS
            while (found := alive()) and time.monotonic() < until:
                for process in found:
                    with suppress(psutil.Error):
                        process.kill()
                time.sleep(POLL_SECONDS)
            prctl(PR_SET_CHILD_SUBREAPER, 0)


def _is_running(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has, and that this process has adopted, is removed."""
    with suppress(psutil.NoSuchProcess, ChildProcessError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        os.waitpid(process.pid, os.WNOHANG)
    return False
