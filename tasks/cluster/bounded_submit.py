"""Submits many tasks to a cluster, with a bounded number at its scheduler at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.tasks import deadline
from paceline.tasks.cluster.client import connect
from paceline.tasks.errors import InputError, OutsideError, PacelineError, RunError, one_line

if TYPE_CHECKING:
    from distributed import Client, Future

WAIT_FOR_WORKERS_SECONDS = 60.0
PER_THREAD = 8  # tasks at the scheduler for each thread of a worker: a million names at once would be 100 MB

T = TypeVar("T")


@contextmanager
def connect_to_workers(address: str, purpose: str) -> Iterator[Client]:
    """A client of a cluster that has a worker, for a body that gives it tasks.

    Raises RunError: none answered, with the purpose; OutsideError: a task failed by an error that is not ours.
    """
    try:
        with ExitStack() as stack:
            try:
                client = stack.enter_context(connect(address))
                client.wait_for_workers(1, timeout=WAIT_FOR_WORKERS_SECONDS)
            except (InputError, TimeoutError) as error:
                fault = f"cluster address {address}: no Dask worker answered ({error}); {purpose} needs one"
                raise RunError(f"{fault}; start workers or correct cluster.address") from error
            yield client
    except (PacelineError, OSError):
        raise
    except Exception as error:
        fault = f"{purpose} failed on the workers at {address}: {one_line(error)}"
        raise OutsideError(f"{fault}; see the workers' logs") from error


def iter_results(client: Client, tasks: Iterable[T], submit: Callable[[T], Future[Any]]) -> Generator[Any, None, None]:
    """Results as they come; close it to cancel what is left. Raises TimeLimitError: the stage's time is over."""
    from distributed import as_completed

    waiting = iter(tasks)
    window = PER_THREAD * max(1, sum(client.nthreads().values()))
    futures = {submit(task) for task in islice(waiting, window)}
    ready = as_completed(futures, loop=client.loop, timeout=deadline.seconds_left())
    try:
        for future in ready:
            futures.discard(future)
            yield future.result()
            deadline.check()
            for task in islice(waiting, 1):
                following = submit(task)
                futures.add(following)
                ready.add(following)
    except TimeoutError:
        deadline.check()  # or it was a task's own
        raise
    finally:
        if futures:
            client.cancel(list(futures))
