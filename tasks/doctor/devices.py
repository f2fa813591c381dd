"""Measures the devices of a cluster: each alone, then the links between them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import call_workers, connect
from paceline.tasks.doctor.figures import DeviceFigures, DeviceJob, DeviceRates, LinkFigures, Measurements
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.predict.subprocess_job import SubprocessJob, run_in_subprocess
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.layout import WorkerSlot
from paceline.tasks.train.launch.placement import find_seats
from paceline.tasks.train.launch.rank_process import interface_of
from paceline.tasks.train.launch.supervisor import free_port

if TYPE_CHECKING:
    from distributed import Client

Request = tuple[str, Callable[..., Any], tuple[Any, ...]]

MODULE = "paceline.tasks.doctor.device_process"
DEVICE_SECONDS, GROUP_SECONDS = 120.0, 300.0  # at most, for one device and for all links
ANSWER_SECONDS = 20.0


class Seat(Record):
    """A device to measure."""

    slot: WorkerSlot
    hardware: Hardware
    index: int
    """Among the devices of its host that are measured."""
    num_threads: int

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return not self.slot.device.startswith("cpu ")

    @property
    def gpus(self) -> tuple[str, ...]:
        """Its UUID; empty for a share of cores."""
        return (self.slot.device,) if self.is_gpu else ()

    @property
    def device(self) -> str:
        """A name that stays the same from one measurement to the next; a worker's address does not."""
        return self.slot.device if self.is_gpu else f"cpu-{self.index}"

    @property
    def name(self) -> str:
        """Host and device."""
        return f"{self.hardware.host} {self.device}"

    @property
    def model(self) -> str:
        """Model of the GPU or CPU."""
        named = [gpu.name for gpu in self.hardware.gpus if gpu.uuid == self.slot.device]
        return named[0] if named else self.hardware.cpu_name


def measure_devices(address: str, site: Environment, accelerator: str) -> Measurements:
    """Measure the free devices of a cluster's workers; those in use are skipped.

    Hosts are measured at the same time, devices of one host one after another.

    Raises:
        InputError: no scheduler answers, or other code runs on a worker.
    """
    directory = site.root / "doctor" / uuid4().hex
    with connect(address) as client, _scratch(directory):
        seats = _seats(client, accelerator)
        skipped = _owners(client, [seat for seat in seats if seat.slot.busy])
        by_host: dict[str, list[Seat]] = {}
        for seat in seats:
            if seat.name not in skipped:
                by_host.setdefault(seat.slot.host, []).append(seat)
        rates: dict[str, DeviceRates] = {}
        for number, turn in enumerate(itertools.zip_longest(*by_host.values())):
            present = [seat for seat in turn if seat is not None]
            jobs = [_job_alone(seat, directory, with_disk=number == 0) for seat in present]
            answers = _run(client, present, jobs, DEVICE_SECONDS)
            for seat, answer in zip(present, answers, strict=True):
                if isinstance(answer, DeviceRates):
                    rates[seat.name] = answer
                else:
                    skipped[seat.name] = answer
        measured = [seat for seat in seats if seat.name in rates]
        links, reason = _measure_links(client, measured, directory)
    devices = tuple(_figures(seat, rates[seat.name]) for seat in measured)
    return Measurements(devices=devices, links=links, skipped=skipped | ({"links": reason} if reason else {}))


@contextmanager
def _scratch(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _seats(client: Client, accelerator: str) -> list[Seat]:
    """All devices, in the order of hosts; `auto` takes GPUs where there are any."""
    found = find_seats(client, accelerator)
    workers_of = {host: [slot for slot, _ in found if slot.host == host] for host in {slot.host for slot, _ in found}}
    return [
        Seat(
            slot=slot,
            hardware=hardware,
            index=workers_of[slot.host].index(slot),
            num_threads=max(1, hardware.num_cores // len(workers_of[slot.host])),
        )
        for slot, hardware in found
    ]


def _owners(client: Client, seats: Sequence[Seat]) -> dict[str, str]:
    requests: list[Request] = [(seat.slot.worker, owner_of, (seat.slot.device,)) for seat in seats]
    answers = call_workers(client, requests, ANSWER_SECONDS)
    return {seat.name: f"in use by {answer}" for seat, answer in zip(seats, answers, strict=True)}


def owner_of(device: str) -> str:
    """Who uses a device; runs on its worker."""
    owner = DeviceLock(Environment().leases, device).owner()
    return f"run {owner.run_id}" if owner is not None else "a run that has ended since"


def _job_alone(seat: Seat, directory: Path, *, with_disk: bool) -> SubprocessJob:
    place = directory / f"{seat.slot.host.replace(':', '_')}-{seat.index}"
    job = DeviceJob(
        gpu=seat.is_gpu,
        uuids=seat.gpus,
        num_threads=seat.num_threads,
        directory=str(place) if with_disk else None,
    )
    return _subprocess_job(seat, place, job, seat.gpus, None)


def _subprocess_job(
    seat: Seat, place: Path, job: DeviceJob, devices: tuple[str, ...], interface: str | None
) -> SubprocessJob:
    return SubprocessJob(
        module=MODULE,
        spec=job.model_dump_json(),
        directory=str(place),
        num_threads=seat.num_threads,
        devices=devices if seat.is_gpu else (),
        interface=interface,
    )


def _run(
    client: Client, seats: Sequence[Seat], jobs: Sequence[SubprocessJob], seconds: float
) -> list[DeviceRates | str]:
    """Run a job on each seat at the same time; its result, or the reason why there is none."""
    futures = [
        client.submit(
            run_on_device,
            *(job, seat.slot.device, seconds),
            workers=[seat.slot.worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        for seat, job in zip(seats, jobs, strict=True)
    ]
    answers: list[DeviceRates | str] = []
    for future in futures:
        try:
            answers.append(DeviceRates.model_validate_json(future.result(seconds + ANSWER_SECONDS)))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the reason
            answers.append(one_line(error) or type(error).__name__)
    client.cancel(futures, force=True)
    return answers


def run_on_device(job: SubprocessJob, device: str, seconds: float) -> str:
    """Run a job while this process holds the device; runs on its worker.

    Raises:
        RunError: the job failed, or somebody uses the device.
        TimeoutError: it took longer than `seconds`.
    """
    lock = DeviceLock(Environment().leases, device)
    if not lock.take("paceline-doctor", 0):
        raise RunError(f"in use by {owner_of(device)}")
    try:
        return run_in_subprocess(job, seconds)
    finally:
        lock.release()


def _measure_links(
    client: Client, seats: Sequence[Seat], directory: Path
) -> tuple[tuple[LinkFigures, ...], str | None]:
    """All-reduces between the devices, or why there are none."""
    if len(seats) < 2:  # noqa: PLR2004
        return (), None
    if any(gpu.board is not None for seat in seats for gpu in seat.hardware.gpus):
        return (), "NCCL cannot connect slices of divided GPUs (MIG)"
    requests: list[Request] = [
        (seats[0].slot.worker, free_port, ()),
        *((s.slot.worker, interface_of, (s.slot.host,)) for s in seats),
    ]
    port, *interfaces = call_workers(client, requests, ANSWER_SECONDS)
    jobs = []
    for rank, (seat, interface) in enumerate(zip(seats, interfaces, strict=True)):
        neighbours = [other.slot.device for other in seats if other.slot.host == seat.slot.host]
        job = DeviceJob(
            gpu=seat.is_gpu,
            index=neighbours.index(seat.slot.device),
            num_threads=seat.num_threads,
            rank=rank,
            world_size=len(seats),
            address=seats[0].slot.host,
            port=port,
        )
        jobs.append(_subprocess_job(seat, directory / f"rank-{rank}", job, tuple(neighbours), interface))
    answers = _run(client, seats, jobs, GROUP_SECONDS)
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors or not isinstance(answers[0], DeviceRates):
        return (), errors[0]
    links = [
        LinkFigures(devices=tuple(seats[rank].name for rank in link.ranks), bytes_per_second=link.bytes_per_second)
        for link in answers[0].links
    ]
    return tuple(links), None


def _figures(seat: Seat, rates: DeviceRates) -> DeviceFigures:
    assert rates.limit is not None
    return DeviceFigures(
        host=seat.hardware.host,
        device=seat.device,
        model=seat.model,
        num_threads=None if seat.is_gpu else seat.num_threads,
        flops_per_second=rates.limit.flops_per_second,
        memory_bytes_per_second=rates.limit.bytes_per_second,
        host_to_device_bytes_per_second=rates.host_to_device,
        disk_bytes_per_second=rates.disk,
        disturbed=rates.disturbed,
    )
