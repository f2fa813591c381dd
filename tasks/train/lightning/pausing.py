"""Pauses the processes that read for a loader, so that they do nothing while other arms are measured."""

import multiprocessing
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess

_paused: set[BaseProcess] = set()


def pause(workers: Iterable[BaseProcess]) -> bool:
    """Stop child processes; return whether all that live are stopped.

    A process that was not forked cannot be stopped safely. The kernel ends a forked one with this process: it has a
    process group of its own, which loses its last parent then, and a stopped group without a parent gets SIGHUP.
    """
    alive = {*multiprocessing.active_children()}.intersection(workers)
    for worker in alive:
        assert worker.pid is not None
        with suppress(OSError):  # it was not forked, or has ended
            os.setpgid(worker.pid, worker.pid)
            _paused.add(worker)
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until it has stopped
    return alive <= _paused


def resume(workers: Iterable[BaseProcess] | None = None) -> None:
    """Continue what is paused of these, or all."""
    alive = {*multiprocessing.active_children()}
    for worker in _paused.intersection(_paused if workers is None else workers):
        _paused.discard(worker)
        if worker in alive:
            assert worker.pid is not None
            with suppress(OSError):  # it has ended
                os.kill(worker.pid, signal.SIGCONT)
                os.setpgid(worker.pid, os.getpgrp())  # whose end it shares while it runs
