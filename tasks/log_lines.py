"""Logs as lines of JSON: one object on a line, with time, level, logger, message, run_id, stage and rank.

Our loggers write such lines. As a program, this module makes them of all else that a process and its children print,
native code included. It needs Python alone, and ends with the last process that writes to it.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

VARIABLE = "PACELINE_LOG_FORMAT"
START = '{"time": "'  # of each line
LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|^(error|warning):")

labels: dict[str, str | int | None] = {"run_id": None, "stage": None, "rank": None}
"""Labels of all lines that this process logs from now on."""
_converters: list[subprocess.Popen[bytes]] = []


class JsonFormatter(logging.Formatter):
    """Formats a record, with its traceback, as a line of JSON; the format of a logging configuration has no meaning."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102
        return _line(record.created, record.levelname, record.name, super().format(record))


def _line(created: float, level: str, logger: str, message: str) -> str:
    moment = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": moment, "level": level, "logger": logger, "message": message} | labels)


@contextmanager
def stage_label(stage: str | None) -> Iterator[None]:
    """Label the lines of the body with a stage."""
    before, labels["stage"] = labels["stage"], stage
    try:
        yield
    finally:
        labels["stage"] = before


def is_json() -> bool:
    """Whether this process is to write lines of JSON."""
    return os.environ.get(VARIABLE) == "json"


def convert(*descriptors: int) -> None:
    """Make lines of JSON of all that is written to descriptors of this process; they go where the first one led to."""
    reading, writing = os.pipe()
    place = os.dup(descriptors[0])  # stays open: `running_ranks` knows a rank by its log
    command = [sys.executable, "-I", "-S", __file__, json.dumps(labels)]
    _converters.append(subprocess.Popen(command, stdin=reading, stdout=place, stderr=place, start_new_session=True))
    for descriptor in descriptors:
        os.dup2(writing, descriptor)
    os.close(reading)
    os.close(writing)


def log_as_json() -> None:
    """Convert stdout and stderr, and log as lines of JSON, Python's warnings included."""
    convert(2, 1)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)


def main() -> None:
    """Copy lines of JSON from stdin to stdout, and make such lines of all others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the writers end first
    for raw in sys.stdin.buffer:
        text = raw.decode("utf-8", "replace").rstrip()
        if text.startswith(START) and text.endswith("}"):
            labels["run_id"] = json.loads(text)["run_id"] or labels["run_id"]
        elif text:
            level = LEVEL.search(text)
            text = _line(time.time(), (level[1] or level[2]).upper() if level else "INFO", "stderr", text)
        if text:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    labels |= json.loads(sys.argv[1])
    main()
