"""Joins a running Dask scheduler, and asks it which workers and hosts there are; those that a run needs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from paceline.conf.environment import Environment
from paceline.conf.execution import Execution
from paceline.tasks.cluster import renewal
from paceline.tasks.cluster.tls import SCHEME, security_of
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.records.record import Record

if TYPE_CHECKING:
    from distributed import Client, Future, Security

T = TypeVar("T")

CONNECT_SECONDS, ANSWER_SECONDS, POLL_SECONDS = 10, 5, 0.2
CLOSE_SECONDS = 2.0  # for a farewell to the scheduler, which may be gone
MAX_MESSAGES = 64  # at once: Dask opens a connection for each, and a message takes 1 to 2 ms of a core
MARGIN_SECONDS = 1.0  # between the limit of a connection, which is retried that long, and that of the answer


class ClusterResources(Record):
    """Hosts, and on each of them workers: one worker is one device and one thread."""

    num_hosts: int
    workers_per_host: int
    gpus: bool  # a worker holds a GPU, else an equal share of its host's cores
    prepares: bool = True  # data are prepared on all cores of this host; else its workers seat ranks alone

    @property
    def num_workers(self) -> int:
        """Workers on all hosts."""
        return self.num_hosts * self.workers_per_host

    def is_met(self, workers_by_host: Mapping[str, int]) -> bool:
        """Whether so many workers by host can seat the run."""
        enough = [host for host, number in workers_by_host.items() if number >= self.workers_per_host]
        return len(enough) >= self.num_hosts


def demand_of(
    executions: Iterable[Execution], accelerator: Literal["cpu", "gpu"], *, prepares: bool = True
) -> ClusterResources:
    """Resources that suffice for each of the executions, one after the other."""
    listed = list(executions)
    return ClusterResources(
        num_hosts=max(execution.num_nodes for execution in listed),
        workers_per_host=max(execution.num_devices for execution in listed),
        gpus=accelerator == "gpu",
        prepares=prepares,
    )


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """Yield a client of the scheduler at `address`; for tls:// with the certificates of this site.

    Raises InputError: no scheduler answers there, something else does, it refuses us, or there are no certificates.
    """
    from distributed import Client

    site = Environment()
    security = security_of(address, site)
    remedy = "use tls:// where the scheduler wants certificates"
    if address.startswith(SCHEME):
        remedy = f"have its certificates of the authority in PACELINE_TLS={site.tls_directory}"

    def refusal(why: str) -> InputError:
        refused = f"cluster.address={address}: no Dask scheduler answers within {CONNECT_SECONDS} s{why}"
        port = "host and port, which `dask scheduler` prints at its start"
        return InputError(f"{refused}; start it, or correct {port}, and {remedy}")

    fault, cause = _find_fault(address, security)
    if fault:
        raise refusal(f" ({fault})") from cause
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, security=security)
    except (OSError, ValueError) as error:
        raise refusal("") from error
    loop: Any = client.loop
    loop.add_callback(renewal.dask_setup, client)
    try:
        yield client
    finally:
        with suppress(TimeoutError):
            client.close(timeout=CLOSE_SECONDS)


def _find_fault(address: str, security: Security | None) -> tuple[str, Exception | None]:
    """Why no Dask scheduler speaks at an address, asked in bounded time, and the error behind it; empty if one does."""
    from distributed.comm.core import CommClosedError

    # Dask's client does not limit the time of its handshake, and takes the first bytes of any server for a length.
    try:
        part = run_in_thread(_ask_part(address, security))
    except TimeoutError as error:
        return "something accepts connections there and does not answer", error
    except CommClosedError as error:
        return "something accepts connections there and closes them", error
    except OSError as error:
        return "nothing accepts connections there", error
    except Exception as error:  # noqa: BLE001  whatever another server's bytes lead to
        return "something answers there in another protocol than Dask's", error
    return "" if part == "Scheduler" else f"a Dask {part.lower()} answers there, not a scheduler", None


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own and wait: the current one may run an event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _ask_part(address: str, security: Security | None) -> str:
    """The part of Dask that answers: Scheduler, Worker, Nanny."""
    from distributed.comm.core import connect

    arguments: dict[str, Any] = security.get_connection_args("client") if security else {}
    async with asyncio.timeout(CONNECT_SECONDS + MARGIN_SECONDS):
        comm = await connect(address, timeout=CONNECT_SECONDS, deserialize=False, **arguments)
        try:
            await comm.write({"op": "identity", "reply": True})
            return str((await comm.read())["type"])
        finally:
            comm.abort()


def workers(client: Client) -> list[str]:
    """Addresses of the workers present, ordered by host and name so that ranks of one host are neighbours."""
    # Not client.scheduler_info(): it raced to an empty answer once in 20,156 calls.
    scheduler: Any = client.scheduler
    if scheduler is None:
        raise OSError("the connection to the Dask scheduler is closed")
    info: dict[str, Any] = client.sync(scheduler.identity, n_workers=-1, callback_timeout=ANSWER_SECONDS)
    infos: dict[str, dict[str, Any]] = info["workers"]
    return sorted(infos, key=lambda address: (infos[address]["host"], str(infos[address]["name"]), address))


def host_of(worker: str) -> str:
    """The host in a worker's address."""
    return urlsplit(worker).hostname or worker


def count_workers(address: str) -> dict[str, int]:
    """Workers of a scheduler by their hosts' addresses. Raises InputError: no scheduler answers there."""
    with connect(address) as client:
        return dict(Counter(map(host_of, workers(client))))


def wait_for_workers(address: str, demand: ClusterResources, seconds: float, check: Callable[[], str]) -> None:
    """Wait for the workers that a run needs. Raises RunError: too late; it names their number and what `check` says."""
    deadline = time.monotonic() + seconds
    with connect(address) as client:
        while not demand.is_met(num_by_host := Counter(map(host_of, workers(client)))):
            status = check()
            if time.monotonic() > deadline:
                arrived = ", ".join(f"{host}: {number}" for host, number in num_by_host.items()) or "none"
                needed = f"{demand.num_hosts} hosts with {demand.workers_per_host} workers each are needed"
                fault = f"{needed}, and after cluster.wait_seconds={seconds:g} these have joined: {arrived}"
                raise RunError(f"{fault}; {status}")
            time.sleep(POLL_SECONDS)


Request = tuple[str, Callable[..., Any], tuple[Any, ...]]  # a worker's address, a function and its arguments


def call_workers(client: Client, requests: Sequence[Request], seconds: float, *, batched: bool = False) -> list[Any]:
    """Run functions on workers at the same time, none waiting for another; each result, or the exception instead.

    At most `MAX_MESSAGES` are under way. `batched`: one message may carry the requests of several workers. Each of them
    gets all of it, so use this for small arguments. A batch that is not answered in time is asked again one by one.
    """
    size = max(1, -(-len(requests) // MAX_MESSAGES)) if batched else 1
    places = asyncio.Semaphore(MAX_MESSAGES)

    async def ask(batch: Sequence[Request]) -> list[Any]:
        calls = {worker: (function, arguments) for worker, function, arguments in batch}
        try:
            async with places:
                if len(batch) == 1:
                    ((worker, function, arguments),) = batch
                    answer = await asyncio.wait_for(client.run(function, *arguments, workers=[worker]), seconds)
                else:
                    running = client.run(_run_own, calls, workers=list(calls), on_error="return")
                    answer = await asyncio.wait_for(running, seconds)
            return [answer[worker] for worker, *_ in batch]
        except Exception as error:  # noqa: BLE001  an answer as well
            return [error] if len(batch) == 1 else await ask_each([[request] for request in batch])

    async def ask_each(batches: list[Sequence[Request]]) -> list[Any]:
        return [answer for answers in await asyncio.gather(*map(ask, batches)) for answer in answers]

    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    answers: list[Any] = client.sync(ask_each, batches)
    return answers


def fetch(client: Client, futures: Sequence[Future[T]], seconds: float) -> list[T]:
    """Results of finished tasks, all at the same time. Raises TimeoutError, OSError and others: one of them is gone."""
    gather = partial(client.gather, futures, asynchronous=True)
    results: list[T] = client.sync(gather, callback_timeout=seconds)
    return results


async def _run_own(calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], dask_worker: Any) -> Any:
    """Run what a batch holds for the worker that this runs on."""
    function, arguments = calls[dask_worker.contact_address]
    return function(*arguments)
