"""Partitions of a listing, such as archives or folders of classes: Dask workers list them, or the caller.

A worker lists a partition and sends its samples as columns, so that the flow never has them as objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from distributed import Future

RETRIES = 2
P = TypeVar("P")
R = TypeVar("R")

_ADDRESS: ContextVar[str | None] = ContextVar("_ADDRESS", default=None)


@contextmanager
def list_on(address: str | None) -> Iterator[None]:
    """Have the workers of a scheduler list the partitions in the body; None for this process."""
    token = _ADDRESS.set(address)
    try:
        yield
    finally:
        _ADDRESS.reset(token)


def has_workers() -> bool:
    """Whether workers list partitions."""
    return _ADDRESS.get() is not None


def list_partitions(function: Callable[[P], R], partitions: Sequence[P]) -> Iterator[R]:
    """Yield the results of a function for all partitions, in their order; errors are those of the function."""
    address = _ADDRESS.get()
    if address is None or len(partitions) <= 1:
        yield from map(function, partitions)
        return
    from paceline.tasks.cluster.bounded_submit import connect_to_workers, iter_results  # Dask: half a second

    listed: dict[int, R] = {}
    following = 0
    with connect_to_workers(address, "listing") as client:

        def submit(number: int) -> Future[tuple[int, R]]:
            key = f"list-{number}-{uuid4().hex}"
            return client.submit(_call, function, number, partitions[number], key=key, pure=False, retries=RETRIES)

        with closing(iter_results(client, range(len(partitions)), submit)) as results:
            for number, result in results:
                listed[number] = result
                while following in listed:
                    yield listed.pop(following)
                    following += 1


def _call(function: Callable[[P], R], number: int, partition: P) -> tuple[int, R]:
    return number, function(partition)


def refuse_shared(root: str, listed_by: dict[str, str], partition: str, real_places: Sequence[str]) -> None:
    """Note a partition's folders or files without links in `listed_by`; InputError if another one has listed them."""
    for place in real_places:
        other = listed_by.setdefault(place, partition)
        if other != partition:
            fault = f"{other} and {partition} list the same samples ({place})"
            raise InputError(f"data.root={root}: {fault}; remove one of the links")
