"""Measures the devices of a cluster: each alone, then the links between them."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import Request, call_workers, connect
from paceline.tasks.doctor.figures import DeviceFigures, DeviceJob, LinkFigures, Measurements
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.predict.subprocess_job import SubprocessJob, run_in_subprocess
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.layout import WorkerSlot
from paceline.tasks.train.launch.placement import find_seats
from paceline.tasks.train.launch.rank_process import interface_of
from paceline.tasks.train.launch.supervisor import free_port

if TYPE_CHECKING:
    from distributed import Client

Outcome = Measurements | str
MODULE = "paceline.tasks.doctor.device_process"
DEVICE_SECONDS, GROUP_SECONDS = 120.0, 300.0  # at most, for one device and for all links
ANSWER_SECONDS = 20.0


class Seat(NamedTuple):
    """A device to measure."""

    slot: WorkerSlot
    device: DeviceFigures  # without rates
    num_threads: int


def measure_devices(address: str, site: Environment, accelerator: str) -> Measurements:
    """Measure the free devices of a cluster's workers; those in use are skipped.

    Hosts are measured at the same time, devices of one host one after another. Raises InputError: no scheduler
    answers, or other code runs on a worker.
    """
    directory = site.root / "doctor" / uuid4().hex
    with connect(address) as client, ExitStack() as stack:
        directory.mkdir(parents=True)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        seats = _seats(client, accelerator)
        busy = [seat for seat in seats if seat.slot.busy]
        requests = [(seat.slot.worker, owner_of, (seat.slot.device,)) for seat in busy]
        owners = call_workers(client, requests, ANSWER_SECONDS)
        skipped = {seat.device.name: f"in use by {owner}" for seat, owner in zip(busy, owners, strict=True)}
        by_host: dict[str, list[Seat]] = {}
        for seat in seats:
            if seat.device.name not in skipped:
                by_host.setdefault(seat.slot.host, []).append(seat)
        measured: dict[str, DeviceFigures] = {}
        for number, turn in enumerate(itertools.zip_longest(*by_host.values())):
            at_once = [seat for seat in turn if seat is not None]
            jobs = [_job(seat, directory, [seat], with_disk=number == 0) for seat in at_once]
            for seat, answer in zip(at_once, _run(client, at_once, jobs, DEVICE_SECONDS), strict=True):
                if isinstance(answer, Measurements):
                    measured[seat.device.name] = answer.devices[0]
                else:
                    skipped[seat.device.name] = answer
        links = _measure_links(client, [seat for seat in seats if seat.device.name in measured], directory)
    if isinstance(links, str):
        skipped["links"], links = links, ()
    return Measurements(devices=tuple(measured.values()), links=links, skipped=skipped)


def _seats(client: Client, accelerator: str) -> list[Seat]:
    """All devices, named so that names stay the same from one measurement to the next."""
    slots = find_seats(client, accelerator)
    seats, totals, numbers = [], Counter(slot.host for slot, _ in slots), Counter[str]()
    for slot, host in slots:
        gpu = next((gpu for gpu in host.gpus if gpu.uuid == slot.device), None)
        num_threads = max(1, (host.num_cores if gpu else host.compute_threads) // totals[slot.host])
        device = DeviceFigures(
            host=host.host,
            device=gpu.uuid if gpu else f"cpu-{numbers[slot.host]}",
            model=gpu.name if gpu else host.cpu_name,
            num_threads=None if gpu else num_threads,
        )
        seats.append(Seat(slot, device, num_threads))
        numbers[slot.host] += 1
    return seats


def owner_of(device: str) -> str:
    """Who uses a device; runs on its worker."""
    owner = DeviceLock(Environment().leases, device).owner()
    return f"run {owner.run_id}" if owner is not None else "a run that has ended since"


def _job(
    seat: Seat,
    directory: Path,
    seats: Sequence[Seat],
    meeting: tuple[str, int] = ("", 0),
    interface: str | None = None,
    *,
    with_disk: bool = False,
) -> SubprocessJob:
    """The process of a seat, alone or in the group of several seats."""
    place = directory / f"{seat.slot.host}-{seat.device.device}-{len(seats)}".replace(":", "_")
    on_host = [other.slot.device for other in seats if other.slot.host == seat.slot.host]
    job = DeviceJob(
        device=seat.device,
        num_threads=seat.num_threads,
        index=on_host.index(seat.slot.device),
        directory=str(place) if with_disk else None,
        group=tuple(other.device.name for other in seats) if len(seats) > 1 else (),
        address=meeting[0],
        port=meeting[1],
    )
    return SubprocessJob(
        module=MODULE,
        spec=job.model_dump_json(),
        directory=str(place),
        num_threads=seat.num_threads,
        devices=tuple(on_host) if seat.device.num_threads is None else (),
        interface=interface,
    )


def _run(client: Client, seats: Sequence[Seat], jobs: Sequence[SubprocessJob], seconds: float) -> list[Outcome]:
    """Run a job on each seat at the same time; its result, or the reason why there is none."""
    options: dict[str, Any] = {"allow_other_workers": False, "pure": False, "retries": 0}
    futures = [
        client.submit(run_on_device, job, seat.slot.device, seconds, workers=[seat.slot.worker], **options)
        for seat, job in zip(seats, jobs, strict=True)
    ]
    answers: list[Outcome] = []
    for future in futures:
        try:
            answers.append(Measurements.model_validate_json(future.result(seconds + ANSWER_SECONDS)))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the reason
            answers.append(one_line(error) or type(error).__name__)
    client.cancel(futures, force=True)
    return answers


def run_on_device(job: SubprocessJob, device: str, seconds: float) -> str:
    """Run a job on the device's worker, which holds the device meanwhile.

    Raises RunError: the job failed, or somebody uses the device; TimeoutError: it took longer than `seconds`.
    """
    lock = DeviceLock(Environment().leases, device)
    if not lock.take("paceline-doctor", 0):
        raise RunError(f"in use by {owner_of(device)}")
    try:
        return run_in_subprocess(job, seconds)
    finally:
        lock.release()


def _measure_links(client: Client, seats: Sequence[Seat], directory: Path) -> tuple[LinkFigures, ...] | str:
    """All-reduces between the devices, or why there are none."""
    if len(seats) < 2:  # noqa: PLR2004
        return ()
    if any(seat.device.device.startswith("MIG-") for seat in seats):
        return "NCCL cannot connect slices of divided GPUs (MIG)"
    first = seats[0].slot
    requests: list[Request] = [(first.worker, free_port, ())]
    requests += [(seat.slot.worker, interface_of, (seat.slot.host,)) for seat in seats]
    port, *interfaces = call_workers(client, requests, ANSWER_SECONDS)
    lost = next((answer for answer in (port, *interfaces) if isinstance(answer, BaseException)), None)
    if lost is not None:
        return one_line(lost)
    pairs = zip(seats, interfaces, strict=True)
    jobs = [_job(seat, directory, seats, (first.host, port), interface) for seat, interface in pairs]
    answers = _run(client, seats, jobs, GROUP_SECONDS)
    errors = [answer for answer in answers if isinstance(answer, str)]
    return errors[0] if errors else next(answer.links for answer in answers if isinstance(answer, Measurements))
