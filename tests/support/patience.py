"""Waiting for what other processes do."""

import socket
import time

SECONDS = 240


def until(found, what, seconds=SECONDS, process=None, every=0.1):
    """What `found` returns, once that is true.

    Args:
        found: is asked again and again.
        what: to be found, for the error.
        seconds: to wait.
        process: that must not end meanwhile.
        every: seconds between two questions.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        if process is not None and process.poll() is not None:
            said = process.communicate()[1]
            raise AssertionError(f"{process.args} ended before there was a {what}:\n{said}")
        time.sleep(every)
    raise TimeoutError(f"no {what} within {seconds} s")


def listens(port):
    """Whether somebody listens on a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
