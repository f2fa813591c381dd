"""Placement of ranks on a cluster: its workers, their devices, and the choice among them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import Request, call_workers, connect, host_of, workers
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Record
from paceline.tasks.train.competent import process
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.layout import Placement, WorkerSlot, choose, gpus_of_workers, gpus_on_host
from paceline.tasks.train.launch.rank_group import ANSWER_SECONDS
from paceline.tasks.train.launch.rank_process import keep_ready, use_fork_server

if TYPE_CHECKING:
    from distributed import Client

FIT_MODULE = (
    "paceline.tasks.train.lightning.fit"  # that ranks of own Lightning code import; by name, as it takes seconds
)
FIRST_ANSWER_SECONDS = 20.0
"""Time for the first answer, before which a worker imports our code, perhaps from a slow shared file system."""


class WorkerFacts(Record):
    """Facts of a Dask worker."""

    code: str
    hardware: Hardware
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES of the worker


def inspect(config: Config, address: str) -> Hardware:
    """Hardware of the first host that would train on the cluster at `address`.

    Raises InputError: no scheduler answers, the cluster cannot place the group, or other code runs there.
    """
    with connect(address) as client:
        fewest, seconds = config.cluster.min_workers, FIRST_ANSWER_SECONDS
        placements, facts = find_placements(client, config, "cpu", fewest, seconds=seconds)
        return facts[placements[0].worker].hardware


def find_placements(
    client: Client,
    config: Config,
    accelerator: str,
    fewest: int | None,
    reserved: Collection[Device] = (),
    seconds: float = ANSWER_SECONDS,
) -> tuple[list[Placement], dict[str, WorkerFacts]]:
    """Place the configured number of ranks, or at least `fewest`; on free and unreserved devices where possible.

    Returns the facts of the workers too. Raises InputError: the cluster has too few workers, or other code runs on one
    of them.
    """
    facts, silent = _facts(client, seconds)
    try:
        return choose(_candidates(client, facts, accelerator, reserved), config.execution, fewest), facts
    except InputError as error:
        if not silent:
            raise
        raise type(error)(f"{len(silent)} workers do not answer, first {silent[0]}; {error}") from error


def find_seats(client: Client, accelerator: str) -> list[tuple[WorkerSlot, Hardware]]:
    """All devices of the workers that answer, with their hosts; `auto` takes GPUs where a worker sees one.

    Raises InputError: other code runs on a worker.
    """
    facts, _ = _facts(client, FIRST_ANSWER_SECONDS)
    if accelerator == "auto":
        accelerator = "gpu" if any(each.hardware.gpus for each in facts.values()) else "cpu"
    return [(slot, facts[slot.worker].hardware) for slot in _candidates(client, facts, accelerator)]


def has_free_devices(client: Client, config: Config, accelerator: str, held: Collection[Device]) -> bool:
    """Whether enough devices are free for a group that waits for one; `held` are those that it has already."""
    with suppress(PacelineError, OSError, TimeoutError):  # a check must not stop a training that works
        candidates = _candidates(client, _facts(client)[0], accelerator, reserved_devices())
        free = [slot for slot in candidates if not slot.busy or (slot.host, slot.device) in held]
        return bool(choose(free, config.execution, None))
    return False


def prepare_seats(address: str, config: Config, plan: Plan, fork_server: str | None = None) -> None:
    """Start a standby process on each worker that will probably have a rank; the training reports what fails.

    With the address of a fork server of this host, that starts the ranks.
    """
    with suppress(PacelineError, OSError, TimeoutError), connect(address) as client:
        placements, _ = find_placements(client, config, plan.accelerator, None, seconds=FIRST_ANSWER_SECONDS)
        if fork_server is not None:
            requests: list[Request] = [(each.worker, use_fork_server, (fork_server,)) for each in placements]
            call_workers(client, requests, ANSWER_SECONDS)
            return
        early = {process.__name__: process.is_wanted(config.speedup), FIT_MODULE: bool(config.lightning.settings)}
        before = tuple(name for name, is_needed in early.items() if is_needed)
        requests = []
        for each in placements:
            devices = gpus_on_host(each, placements, plan.accelerator)
            requests.append((each.worker, keep_ready, (plan.num_threads, each.host, devices, before)))
        call_workers(client, requests, ANSWER_SECONDS)


def can_add_ranks(client: Client, config: Config, accelerator: str, num_ranks: int) -> bool:
    """Whether free workers would allow a group more ranks than it has."""
    with suppress(PacelineError, OSError, TimeoutError):  # a check must not stop a training that works
        candidates = _candidates(client, _facts(client)[0], accelerator)
        more = len(choose(candidates, config.execution, num_ranks)) - num_ranks
        return 0 < more <= sum(not candidate.busy for candidate in candidates)
    return False


def _candidates(
    client: Client, facts: dict[str, WorkerFacts], accelerator: str, reserved: Collection[Device] = ()
) -> list[WorkerSlot]:
    by_host: dict[str, list[str]] = {}
    for worker in facts:
        by_host.setdefault(host_of(worker), []).append(worker)
    devices: dict[str, str] = {}
    for host_workers in by_host.values():
        if accelerator != "gpu":
            devices |= {worker: f"cpu {worker}" for worker in host_workers}
            continue
        uuids = {worker: [gpu.uuid for gpu in facts[worker].hardware.gpus] for worker in host_workers}
        gpus = gpus_of_workers([(uuids[worker], facts[worker].visible_devices) for worker in host_workers])
        given = {worker: gpu for worker, gpu in zip(host_workers, gpus, strict=True) if gpu is not None}
        order = {uuid: position for worker in given for position, uuid in enumerate(uuids[worker])}
        devices |= dict(sorted(given.items(), key=lambda item: order.get(item[1], 0)))
    requests = [(worker, is_device_in_use, (device,)) for worker, device in devices.items()]
    answers = call_workers(client, requests, ANSWER_SECONDS, batched=True)
    slots = []
    for (worker, device), answer in zip(devices.items(), answers, strict=True):
        busy = answer is True or (host_of(worker), device) in reserved
        slots.append(WorkerSlot(worker=worker, host=host_of(worker), device=device, busy=busy))
    return slots


def is_device_in_use(device: str) -> bool:
    """Whether a device of the host that this runs on is locked."""
    return DeviceLock(Environment().leases, device).owner() is not None


def _facts(client: Client, seconds: float = ANSWER_SECONDS) -> tuple[dict[str, WorkerFacts], list[str]]:
    """Facts of the workers that answer in time, and addresses of those that do not."""
    addresses, facts = workers(client), dict[str, WorkerFacts]()
    answers = call_workers(client, [(worker, worker_facts, ()) for worker in addresses], seconds, batched=True)
    for answer in answers:
        if isinstance(answer, ImportError | AttributeError):  # its code lacks the function
            raise InputError(f"a worker runs other code than this process ({answer}); install the same on every host")
    for worker, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, WorkerFacts):
            facts[worker] = answer
            if answer.code != code_fingerprint():
                fault = f"worker {worker} runs other code ({answer.code}) than this process ({code_fingerprint()})"
                raise InputError(f"{fault}; install the same version on every host and restart its workers")
    return facts, [worker for worker in addresses if worker not in facts]


def worker_facts() -> WorkerFacts:
    """Facts of the worker that this runs on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return WorkerFacts(code=code_fingerprint(), hardware=describe(), visible_devices=visible)


Device = tuple[str, str]  # address of its host, and its name there

_reservation_lock = threading.Lock()
_reserved: set[Device] = set()


def reserved_devices() -> frozenset[Device]:
    """Devices that groups of this process have reserved."""
    with _reservation_lock:
        return frozenset(_reserved)


@contextmanager
def reserve(find: Callable[[frozenset[Device]], list[Placement]]) -> Iterator[list[Placement]]:
    """Choose placements, and reserve their devices until the end of the body."""
    with _reservation_lock:
        placements = find(frozenset(_reserved))
        chosen = {(placement.host, placement.device) for placement in placements}
        mine = chosen - _reserved  # a shared device stays reserved by the first group
        _reserved.update(mine)
    try:
        yield placements
    finally:
        with _reservation_lock:
            _reserved.difference_update(mine)
