"""A rank as data: its place in the group, its environment, its command.

Pure, so that any cluster can be tested on paper. Starts nothing; `supervise` starts what is described here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.tasks.errors import InputError
from paceline.tasks.host import keep_memory
from paceline.tasks.records import Record

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
PROBE_FILE = "probe.json"
"""In rank 0's directory: what it has measured before training."""
SEARCH_FILE = "search.json"
"""Likewise: what it has searched for."""
EXAMPLES_FILE = "examples.npz"
"""Likewise: pictures of what was told of some test samples."""


class WorkerSlot(Record):
    """A Dask worker that could supervise a rank."""

    worker: str
    """Its address."""
    host: str
    """Its host's address."""
    device: str
    """What the rank would use: a GPU's UUID, or on CPUs the worker's own name."""
    busy: bool = False
    """The device is somebody's now; a rank would wait for it."""


class Placement(Record):
    """Where one rank sits."""

    rank: int
    worker: str
    """Address of the Dask worker that supervises the rank."""
    host: str
    device: str
    node_rank: int
    local_rank: int


def place_ranks(candidates: list[WorkerSlot], num_nodes: int, num_devices: int) -> list[Placement]:
    """Choose `num_devices` workers on each of `num_nodes` hosts, ranks of a host being neighbours; free ones first.

    Args:
        candidates: in a stable order, their devices in each host's own order.
        num_nodes: hosts to use.
        num_devices: workers to use on each.

    Raises:
        InputError: there are not enough hosts with enough workers.
    """
    by_host: dict[str, list[WorkerSlot]] = {}
    for candidate in candidates:
        by_host.setdefault(candidate.host, []).append(candidate)
    usable = {
        host: _free_first(present, num_devices) for host, present in by_host.items() if len(present) >= num_devices
    }
    if len(usable) < num_nodes:
        found = ", ".join(f"{host}: {len(present)}" for host, present in by_host.items()) or "none"
        raise InputError(
            f"execution asks for {num_nodes} hosts with {num_devices} workers each, and the cluster has {found}; "
            "start more workers or ask for fewer devices"
        )
    chosen = sorted(usable.values(), key=lambda seated: sum(candidate.busy for candidate in seated))[:num_nodes]
    return [
        Placement(
            rank=node * num_devices + local,
            worker=candidate.worker,
            host=candidate.host,
            device=candidate.device,
            node_rank=node,
            local_rank=local,
        )
        for node, seated in enumerate(chosen)
        for local, candidate in enumerate(seated)
    ]


def devices_on_host(seat: Placement, seats: Sequence[Placement]) -> tuple[str, ...]:
    """The devices of a seat's host, in one order for all its ranks."""
    return tuple(other.device for other in seats if other.host == seat.host)


def layouts(num_nodes: int, num_devices: int, fewest: int | None) -> list[tuple[int, int]]:
    """(hosts, devices on each) that a group may have, the best first: as asked, then with ever fewer ranks.

    Args:
        num_nodes: hosts asked for.
        num_devices: devices on each asked for.
        fewest: ranks that will do; None for all.
    """
    if fewest is None:
        return [(num_nodes, num_devices)]
    possible = [(nodes, devices) for nodes in range(1, num_nodes + 1) for devices in range(1, num_devices + 1)]
    enough = [layout for layout in possible if layout[0] * layout[1] >= fewest]
    return sorted(enough, key=lambda layout: (layout[0] * layout[1], layout[1]), reverse=True)


def _free_first(present: list[WorkerSlot], num: int) -> list[WorkerSlot]:
    """`num` of a host's workers, free ones before busy ones, in the host's own order."""
    chosen = sorted(present, key=lambda candidate: candidate.busy)[:num]
    return [candidate for candidate in present if candidate in chosen]


def gpus_of_workers(workers: Sequence[tuple[Sequence[str], str | None]]) -> list[str | None]:
    """The GPU of each Dask worker of one host; None for one that is left without.

    A dask-cuda worker's CUDA_VISIBLE_DEVICES names all GPUs, its own one first. Workers that were started otherwise may
    all see the same list: then they are given its GPUs in turn.

    Args:
        workers: (UUIDs of the GPUs that it sees, in the host's order; its CUDA_VISIBLE_DEVICES).
    """
    own = [_first_visible(gpus, setting) for gpus, setting in workers]
    if None not in own and len(set(own)) == len(own):
        return own
    gpus = max((gpus for gpus, _ in workers), key=len)
    return [gpus[position] if position < len(gpus) else None for position in range(len(workers))]


def _first_visible(gpus: Sequence[str], setting: str | None) -> str | None:
    names = [name.strip() for name in (setting or "").split(",") if name.strip()]
    if not names:
        return gpus[0] if gpus else None
    if all(name.isdigit() for name in names):
        position = sorted(names, key=int).index(names[0])
        return gpus[position] if position < len(gpus) else None
    return names[0] if names[0] in gpus else None


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
    environment |= keep_memory()
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        environment["NCCL_SOCKET_IFNAME"] = interface
    return environment


def rank_command(spec_path: Path) -> list[str]:
    """The command that runs, or replays, a rank."""
    return [sys.executable, "-m", "paceline.tasks.train.rank.main", str(spec_path)]
