"""Work of threads on the items of an iterator, a few of them ahead of the consumer."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(pool: Executor, work: Callable[[T], R], items: Iterable[T], num_ahead: int) -> Generator[tuple[T, R]]:
    """Yield items with their results in order, while the pool works on the next `num_ahead`; the end cancels these."""
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > num_ahead:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        for _, result in waiting:
            result.cancel()
