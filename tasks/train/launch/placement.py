"""Seats on a cluster: which workers there are, what each could use, and who is to train where.

Knows workers and devices, not what is trained on them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import call_workers, connect, workers
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.records import Hardware, Plan, Record
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.layout import (
    Placement,
    WorkerSlot,
    devices_on_host,
    gpus_of_workers,
    layouts,
    place_ranks,
)
from paceline.tasks.train.launch.rank_group import ANSWER_SECONDS
from paceline.tasks.train.launch.rank_process import keep_ready

if TYPE_CHECKING:
    from distributed import Client
import threading
from collections.abc import Callable

FIRST_ANSWER_SECONDS = 20.0
"""A worker that was never asked first imports what answers: from a shared file system, or beside other work, slowly."""


class WorkerFacts(Record):
    """A Dask worker as it describes itself."""

    code: str
    hardware: Hardware
    visible_devices: str | None
    """Its CUDA_VISIBLE_DEVICES."""


def inspect(config: Config, address: str) -> Hardware:
    """Hardware of the first host that would train on the cluster at `address`.

    Raises:
        InputError: no scheduler answers, the cluster cannot seat the group, or other code runs there.
    """
    with connect(address) as client:
        facts, silent = _facts(client, FIRST_ANSWER_SECONDS)
        with _silent_told(silent):
            seats = _choose(_candidates(client, facts, "cpu"), config, config.cluster.min_workers)
        return facts[seats[0].worker].hardware


def find_placements(
    client: Client,
    config: Config,
    accelerator: str,
    fewest: int | None,
    spoken_for: Collection[Device] = (),
) -> list[Placement]:
    """As many as asked for, or as few as will do; on devices that are free and not spoken for, as far as there are any.

    Raises:
        InputError: there are fewer, or other code runs on one of them.
    """
    facts, silent = _facts(client)
    with _silent_told(silent):
        return _choose(_candidates(client, facts, accelerator, spoken_for), config, fewest)


def has_free_devices(client: Client, config: Config, accelerator: str, held: Collection[Device]) -> bool:
    """Whether a group that waits for a device could have free ones.

    Args:
        client: of the scheduler.
        config: of the training.
        accelerator: kind of device.
        held: devices that the group has already.
    """
    try:
        facts, _ = _facts(client)
        candidates = _candidates(client, facts, accelerator, reserved_devices())
        free = [found for found in candidates if not found.busy or (found.host, found.device) in held]
        return bool(_choose(free, config, None))
    except (PacelineError, OSError, TimeoutError):  # a look must not end what goes well
        return False


def prepare_seats(address: str, config: Config, plan: Plan) -> None:
    """Have a process kept ready on each worker that will probably have a rank.

    What fails here is left to the training, which will meet it again and say so.
    """
    with suppress(PacelineError, OSError, TimeoutError), connect(address) as client:
        seats = find_placements(client, config, plan.accelerator, None)
        requests = []
        for seat in seats:
            devices = devices_on_host(seat, seats) if plan.accelerator == "gpu" else ()
            requests.append((seat.worker, keep_ready, (plan.num_threads, seat.host, devices)))
        call_workers(client, requests, ANSWER_SECONDS)


def can_add_ranks(client: Client, config: Config, accelerator: str, num_ranks: int) -> bool:
    """Whether a group could have more ranks than it has, on workers that nobody uses."""
    try:
        facts, _ = _facts(client)
        candidates = _candidates(client, facts, accelerator)
        more = len(_choose(candidates, config, num_ranks)) - num_ranks
    except (PacelineError, OSError, TimeoutError):  # a look must not end what goes well
        return False
    return 0 < more <= sum(not candidate.busy for candidate in candidates)


def _choose(candidates: list[WorkerSlot], config: Config, fewest: int | None) -> list[Placement]:
    asked, *less = layouts(config.execution.num_nodes, config.execution.num_devices, fewest)
    try:
        return place_ranks(candidates, *asked)
    except InputError:
        for layout in less:
            with suppress(InputError):
                return place_ranks(candidates, *layout)
        raise


@contextmanager
def _silent_told(silent: list[str]) -> Iterator[None]:
    """A cluster with too few workers may have others, which have not described themselves in time."""
    try:
        yield
    except InputError as error:
        if not silent:
            raise
        raise type(error)(f"{len(silent)} workers do not answer, first {silent[0]}; {error}") from error


def _candidates(
    client: Client, facts: dict[str, WorkerFacts], accelerator: str, spoken_for: Collection[Device] = ()
) -> list[WorkerSlot]:
    """All workers that have a device."""
    by_host: dict[str, list[str]] = {}
    for worker in facts:
        by_host.setdefault(urlparse(worker).hostname or worker, []).append(worker)
    devices: dict[str, str] = {}
    for present in by_host.values():
        if accelerator == "gpu":
            seen = [([gpu.uuid for gpu in facts[one].hardware.gpus], facts[one].visible_devices) for one in present]
            found = gpus_of_workers(seen)
            devices |= {worker: gpu for worker, gpu in zip(present, found, strict=True) if gpu is not None}
        else:
            devices |= {worker: f"cpu {worker}" for worker in present}
    owners = call_workers(
        client, [(worker, is_leased, (device,)) for worker, device in devices.items()], ANSWER_SECONDS
    )
    busy = dict(zip(devices, owners, strict=True))
    return [
        WorkerSlot(
            worker=worker,
            host=host,
            device=devices[worker],
            busy=busy[worker] is True or (host, devices[worker]) in spoken_for,
        )
        for host, present in by_host.items()
        for worker in _in_device_order(present, devices, facts)
    ]


def _in_device_order(present: list[str], devices: dict[str, str], facts: dict[str, WorkerFacts]) -> list[str]:
    """The workers that have a device; those with GPUs in the host's order of GPUs."""
    seated = [worker for worker in present if worker in devices]
    order = {gpu.uuid: place for worker in seated for place, gpu in enumerate(facts[worker].hardware.gpus)}
    return sorted(seated, key=lambda worker: order.get(devices[worker], 0))


def is_leased(device: str) -> bool:
    """Whether a device of the host that this runs on is somebody's now."""
    return DeviceLock(Environment().leases, device).owner() is not None


def _facts(client: Client, seconds: float = ANSWER_SECONDS) -> tuple[dict[str, WorkerFacts], list[str]]:
    """Of all workers that answer in time; and those that do not.

    Raises:
        InputError: other code runs on one of them.
    """
    present = workers(client)
    answers = call_workers(client, [(worker, worker_facts, ()) for worker in present], seconds)
    strange = [answer for answer in answers if isinstance(answer, ImportError | AttributeError)]
    if strange:  # it has no such function
        raise InputError(f"a worker runs other code than this process ({strange[0]}); install the same on every host")
    facts = {worker: answer for worker, answer in zip(present, answers, strict=True) if isinstance(answer, WorkerFacts)}
    for worker, found in facts.items():
        if found.code != code_fingerprint():
            raise InputError(
                f"worker {worker} runs other code ({found.code}) than this process ({code_fingerprint()}); "
                "install the same version on every host and restart its workers"
            )
    return facts, [worker for worker in present if worker not in facts]


def worker_facts() -> WorkerFacts:
    """Describe the worker that this runs on."""
    return WorkerFacts(
        code=code_fingerprint(), hardware=describe(), visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES")
    )


Device = tuple[str, str]
"""Its host's address, and its name there."""

_choosing = threading.Lock()
_chosen: set[Device] = set()


def reserved_devices() -> frozenset[Device]:
    """Those that are chosen now."""
    with _choosing:
        return frozenset(_chosen)


@contextmanager
def reserve(choose: Callable[[frozenset[Device]], list[Placement]]) -> Iterator[list[Placement]]:
    """Choose seats; their devices are spoken for until the end of the body.

    Args:
        choose: is given the devices that others here have chosen, and should prefer other ones.
    """
    with _choosing:
        seats = choose(frozenset(_chosen))
        mine = {(seat.host, seat.device) for seat in seats} - _chosen  # of one that is shared, the first one speaks
        _chosen.update(mine)
    try:
        yield seats
    finally:
        with _choosing:
            _chosen.difference_update(mine)
