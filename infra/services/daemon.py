"""A process that outlives the command which started it: recorded, recognised, ended with all that it has started.

It is known by its number *and* the moment of its start, so that a number that was given away again is never mistaken
for it; what it left behind, by a mark that it inherited in its environment, and nobody else has.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import ValidationError

from infra.services.home import Home
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.files import write_durably
from paceline.tasks.host import BOOT_ID, started_at
from paceline.tasks.records.record import Record
from paceline.tasks.redact import redact

MARK = "PACELINE_SERVICES"  # environment variable with the home and the service that a process belongs to
POLL_SECONDS = 0.1
KILL_SECONDS = 10.0
LARGE_LOG_BYTES = 10 * 2**20
PRIVATE_UMASK = 0o077


class ProcessRecord(Record):
    """A process as its file has it."""

    pid: int
    started: int  # clock ticks since the machine came up
    boot: str


class Daemon:
    """One service's process."""

    def __init__(self, name: str, home: Home) -> None:
        self.name = name
        self.log = home.logs / f"{name}.log"
        self._mark = f"{home.root}#{name}"
        self._file = home.pids / f"{name}.json"

    def pid(self) -> int | None:
        """Its process id, while it runs."""
        try:
            record = ProcessRecord.model_validate_json(self._file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return record.pid if record.boot == _boot() and started_at(record.pid) == record.started else None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, user: str | None = None
    ) -> None:
        """Start it, in a session of its own, after having ended what an earlier one has left behind.

        The command has no secret, since everybody can read it, and the environment is complete. Without a user it runs
        as the one who calls.
        """
        self.end(signal.SIGKILL, KILL_SECONDS)
        if self.log.exists() and self.log.stat().st_size > LARGE_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        descriptor = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment) | {MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=directory,
                user=user,
                group=user,
                extra_groups=[] if user else None,
                umask=PRIVATE_UMASK,
            )
        finally:
            os.close(descriptor)
        recorded = ProcessRecord(pid=process.pid, started=started_at(process.pid) or 0, boot=_boot())
        write_durably(self._file, recorded.model_dump_json().encode())

    def wait(self, check: Callable[[], None], seconds: float) -> None:
        """Wait until it is well. Raises RunError: it ended, or was not well in time; the message has its last words."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return check()
            except Exception as error:
                ended = self.pid() is None
                if ended or time.monotonic() >= deadline:
                    what = "ended" if ended else f"is not well within {seconds:g} s ({redact(one_line(error))})"
                    text = f"{self.name} {what}; the end of {self.log}:\n{redact(self.final_error())}"
                    raise RunError(text) from error
            time.sleep(POLL_SECONDS)

    def end(self, first: signal.Signals, seconds: float) -> bool:
        """End it and all that it has started: by a signal, after some seconds by force. Whether there was anything."""
        family = self.family()
        if self.ask(first):
            wait_until(lambda: not _living(family), seconds)
        for process in _living(family):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: not _living(family), KILL_SECONDS)
        self._file.unlink(missing_ok=True)
        return bool(family)

    def ask(self, number: signal.Signals) -> bool:
        """Send it a signal; whether it runs."""
        pid = self.pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid is not None

    def family(self) -> list[psutil.Process]:
        """It, its descendants, and what an earlier one has left behind."""
        members = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # ended meanwhile, or another user's
                if process.environ().get(MARK) == self._mark:
                    members.add(process)
        if (pid := self.pid()) is not None:
            with suppress(psutil.NoSuchProcess):
                leader = psutil.Process(pid)
                members |= {leader, *leader.children(recursive=True)}
        return sorted(_living(members), key=lambda process: process.pid)

    def final_error(self, num_lines: int = 15) -> str:
        """The end of its log."""
        if not self.log.exists():
            return "its log is empty"
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def _boot() -> str:
    return BOOT_ID.read_text(encoding="utf-8").strip()


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds
