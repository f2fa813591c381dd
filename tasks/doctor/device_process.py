"""Process that measures one device alone, or all-reduces as a rank of a group.

A process of its own, as of a rank: the Dask worker that starts it never holds a CUDA context.
"""

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed

from paceline.tasks.doctor.figures import COPY, DISK, MEMORY, DeviceJob, LinkFigures, Measurements
from paceline.tasks.measure.device_limit import best_seconds, measure_limit
from paceline.tasks.measure.validity import ValidityWatch, cached_fraction
from paceline.tasks.model.threads import use_threads
from paceline.tasks.predict.subprocess_job import subprocess_main
from paceline.tasks.train.rank import process_group as group

COPY_BYTES, COPY_SECONDS = 128 * 2**20, 0.05
FILE_BYTES, BLOCK_BYTES = 256 * 2**20, 4 * 2**20
FILE_SECONDS = 5.0  # to write a file at most, and to read it
MAX_CACHED = 0.1  # of the file; with more in memory, a read says little of the disk
MESSAGE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
NUM_MESSAGES = 5  # after two that are not timed
MAX_PAIRS = 120  # of 16 devices; of more, each device and the next one


def measure(job: DeviceJob) -> Measurements:
    """Measure what the job asks for."""
    use_threads(job.num_threads)
    device, uuids = torch.device("cpu"), []
    if job.device.num_threads is None:
        device, uuids = torch.device("cuda", job.index), [job.device.device]
        torch.cuda.set_device(device)
    if job.group:
        group.meet(job.group.index(job.device.name), len(job.group), job.address, job.port, device)
        return Measurements(links=tuple(_links(job.group, device)))
    watch = ValidityWatch([os.getpid(), os.getppid()], gpu_uuids=uuids)
    limit = measure_limit(device)
    disturbed = watch.stop().reasons
    rates: dict[str, float | None] = {**limit.flops_per_second, MEMORY: limit.bytes_per_second}
    rates[COPY] = _copy_rate(device) if uuids else None
    rates[DISK] = disk_rate(Path(job.directory)) if job.directory is not None else None
    return Measurements(devices=(job.device.model_copy(update={"rates": rates, "disturbed": disturbed}),))


def _copy_rate(device: torch.device) -> float:
    """Bytes per second from pinned memory to the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    return COPY_BYTES / best_seconds(lambda: target.copy_(source, non_blocking=True), device, COPY_SECONDS)


def disk_rate(directory: Path, num_bytes: int = FILE_BYTES) -> float | None:
    """Bytes per second of reading a new file; None without room, or where the file system keeps it in memory."""
    if shutil.disk_usage(directory).free < 2 * num_bytes:
        return None
    path = directory / "disk.bin"
    try:
        with path.open("wb") as file:
            _pass_blocks(lambda: file.write(os.urandom(BLOCK_BYTES)), num_bytes)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (cached_fraction([path]) or 0.0) > MAX_CACHED:
            return None
        with path.open("rb", buffering=0) as file:
            started = time.perf_counter()
            size = _pass_blocks(lambda: len(file.read(BLOCK_BYTES)), num_bytes)
            return size / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def _pass_blocks(pass_block: Callable[[], int], num_bytes: int) -> int:
    """Pass blocks until there is none, or the bytes or the time are reached; the bytes."""
    end, size = time.perf_counter() + FILE_SECONDS, 0
    while size < num_bytes and time.perf_counter() < end and (passed := pass_block()):
        size += passed
    return size


def _links(names: Sequence[str], device: torch.device) -> Iterator[LinkFigures]:
    """Rates of all-reduces, one group after another: between each pair, then among all. The same on every rank."""
    everyone = tuple(range(len(names)))
    pairs: Sequence[tuple[int, ...]] = list(itertools.combinations(everyone, 2))
    if len(pairs) > MAX_PAIRS:
        pairs = [(rank, (rank + 1) % len(names)) for rank in everyone]
    message = torch.ones(MESSAGE_BYTES[device.type] // 4, device=device)
    for ranks in dict.fromkeys([*pairs, everyone]):
        team = distributed.new_group(list(ranks))
        is_member = distributed.get_rank() in ranks
        seconds = max(group.all_gather(_all_reduce_seconds(message, team) if is_member else 0.0))
        if is_member:
            distributed.destroy_process_group(team)
        rate = 2 * (len(ranks) - 1) / len(ranks) * message.nbytes / seconds
        yield LinkFigures(devices=tuple(names[rank] for rank in ranks), bytes_per_second=rate)


def _all_reduce_seconds(message: torch.Tensor, team: distributed.ProcessGroup | None) -> float:
    """Least seconds of an all-reduce."""
    times = []
    for _ in range(2 + NUM_MESSAGES):
        distributed.barrier(team)
        started = time.perf_counter()
        distributed.all_reduce(message, distributed.ReduceOp.MAX, group=team)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        times.append(time.perf_counter() - started)
    return min(times[2:])


if __name__ == "__main__":
    subprocess_main(DeviceJob, measure)
