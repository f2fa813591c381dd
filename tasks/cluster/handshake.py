"""Asks an address whether a Dask scheduler speaks there, in bounded time.

Dask's client does not limit the time of its handshake, and takes the first bytes of any other server for a length.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Security

MARGIN_SECONDS = 1.0  # between the limit of a connection, which is retried that long, and that of the answer


class NoSchedulerError(Exception):
    """Why no scheduler answers."""


def greet(address: str, security: Security | None, seconds: float) -> None:
    """Return once a Dask scheduler has answered.

    Args:
        address: of the scheduler.
        security: with what it is joined.
        seconds: to wait for a connection and an answer at most.

    Raises:
        NoSchedulerError: nothing listens there, or something else does.
    """
    try:
        part = asyncio.run(_ask(address, security, seconds))
    except TimeoutError as error:
        raise NoSchedulerError("something accepts connections there and does not answer") from error
    except OSError as error:
        raise NoSchedulerError(_reason(error)) from error
    except Exception as error:
        raise NoSchedulerError("something answers there in another protocol than Dask's") from error
    if part != "Scheduler":
        raise NoSchedulerError(f"a Dask {part.lower()} answers there, not a scheduler")


async def _ask(address: str, security: Security | None, seconds: float) -> str:
    """The part of Dask that answers: Scheduler, Worker, Nanny."""
    from distributed.comm.core import connect

    arguments: dict[str, Any] = security.get_connection_args("client") if security else {}
    async with asyncio.timeout(seconds + MARGIN_SECONDS):
        comm = await connect(address, timeout=seconds, deserialize=False, **arguments)
        try:
            await comm.write({"op": "identity", "reply": True})
            return str((await comm.read())["type"])
        finally:
            comm.abort()


def _reason(error: OSError) -> str:
    from distributed.comm.core import CommClosedError

    if isinstance(error, CommClosedError):
        return "something accepts connections there and closes them"
    return "nothing accepts connections there"
