"""A rank as data: its place in the group, its environment, its command.

Pure, so that any cluster can be tested on paper. Starts nothing; `supervise` starts what is described here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import InputError
from tasks.records import Record

# Inherited values of these would make torch or Lightning join another group (Lightning#16313, #5651).
SCRUBBED_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_", "PL_", "LSB_", "JSM_")
SCRUBBED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    }
)
# A worker's nanny has its children give memory back at once (MALLOC_TRIM_THRESHOLD_=65536). A rank that inherits
# this faults its activations in again at every step: 1.9 x the time of a CIFAR-10 step in bf16, 2.6 x in fp32. With
# glibc's own defaults fp32 still takes 1.6 x, for activations above 32 MB are mapped anew each time. A rank lives for
# its training alone, so it keeps what it has. Measured 2026-11-21, see infra/LOG.md.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 * 2**30), "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30)}


class Seat(Record):
    """Where one rank sits."""

    rank: int
    worker: str
    """Address of the Dask worker that supervises the rank."""
    host: str
    node_rank: int
    local_rank: int


def seat_ranks(workers: list[tuple[str, str]], num_nodes: int, num_devices: int) -> list[Seat]:
    """Choose `num_devices` workers on each of `num_nodes` hosts, ranks of a host being neighbours.

    Args:
        workers: (worker address, host) in a stable order.
        num_nodes: hosts to use.
        num_devices: workers to use on each.

    Raises:
        InputError: there are not enough hosts with enough workers.
    """
    by_host: dict[str, list[str]] = {}
    for address, host in workers:
        by_host.setdefault(host, []).append(address)
    usable = [host for host, present in by_host.items() if len(present) >= num_devices]
    if len(usable) < num_nodes:
        found = ", ".join(f"{host}: {len(present)}" for host, present in by_host.items()) or "none"
        raise InputError(
            f"execution asks for {num_nodes} hosts with {num_devices} workers each, and the cluster has {found}; "
            "start more workers or ask for fewer devices"
        )
    return [
        Seat(
            rank=node * num_devices + local,
            worker=by_host[host][local],
            host=host,
            node_rank=node,
            local_rank=local,
        )
        for node, host in enumerate(usable[:num_nodes])
        for local in range(num_devices)
    ]


def rank_environment(
    inherited: Mapping[str, str], num_threads: int, interface: str | None, devices: tuple[str, ...]
) -> dict[str, str]:
    """Environment of a rank process: the worker's own, scrubbed of other groups, with threads, network and GPUs set.

    Args:
        inherited: environment of the Dask worker.
        num_threads: CPU threads of the rank.
        interface: network interface for gloo and NCCL, None to let them choose.
        devices: GPU UUIDs of the host, in one order for all its ranks; empty on CPUs.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in SCRUBBED and not name.startswith(SCRUBBED_PREFIXES)
    }
    environment["OMP_NUM_THREADS"] = str(num_threads)
    environment["MKL_NUM_THREADS"] = str(num_threads)
    environment["PYTHONUNBUFFERED"] = "1"
    environment |= KEEP_MEMORY
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        environment["NCCL_SOCKET_IFNAME"] = interface
    return environment


def rank_command(spec_path: Path) -> list[str]:
    """The command that runs, or replays, a rank."""
    return [sys.executable, "-m", "tasks.train.worker", str(spec_path)]
