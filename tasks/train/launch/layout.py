"""Layout of a group of ranks as data: placements on workers, and environments. Pure functions."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline.conf.execution import Execution
from paceline.tasks.errors import InputError
from paceline.tasks.host import keep_memory
from paceline.tasks.records.record import Record

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of launchers such as torchrun, from which a user's code may read its rank."""
# With inherited values of these, torch or Lightning would join another group (Lightning#16313, #5651).
SCRUBBED_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_", "PL_", "LSB_", "JSM_")
SCRUBBED = (
    *LAUNCHER_VARIABLES,
    *("GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
)
PROBE_FILE = "probe.json"  # file in rank 0's directory: its probe before training
STEPS_FILE = "steps.npz"  # file in rank 0's directory: the time of each step of its probe
SEARCH_FILE = "search.json"  # file in rank 0's directory: its autotuning result
KEPT_FOLDER = "paceline"  # folder in a run's directory: what the user's ModelCheckpoint callbacks keep by default
EXAMPLES_FILE = "examples.npz"  # file in rank 0's directory: example images of the test split with predictions


class WorkerSlot(Record):
    """A Dask worker that could supervise a rank."""

    worker: str  # its address
    host: str  # its host's address
    device: str  # the rank's device: a GPU's UUID, or on CPUs the worker's own name
    busy: bool = False  # the device is in use; a rank would wait for it


class Placement(WorkerSlot):
    """Worker and device of one rank."""

    rank: int
    node_rank: int
    local_rank: int


def place_ranks(candidates: list[WorkerSlot], num_nodes: int, num_devices: int) -> list[Placement]:
    """Choose `num_devices` workers on each of `num_nodes` hosts, ranks of a host being neighbours; free ones first.

    Raises InputError: there are not enough hosts with enough workers.
    """
    by_host: dict[str, list[WorkerSlot]] = {}
    for candidate in candidates:
        by_host.setdefault(candidate.host, []).append(candidate)
    usable = []
    for slots in by_host.values():
        if len(slots) >= num_devices:  # free ones before busy ones, then in the host's own order
            chosen = sorted(slots, key=lambda slot: slot.busy)[:num_devices]
            usable.append([slot for slot in slots if slot in chosen])
    if len(usable) < num_nodes:
        counts = ", ".join(f"{host}: {len(slots)}" for host, slots in by_host.items()) or "none"
        fault = f"execution asks for {num_nodes} hosts with {num_devices} workers each, and the cluster has {counts}"
        remedy = "start more workers or ask for fewer devices"
        raise InputError(f"{fault}; {remedy}", setting="execution.num_devices")
    hosts = sorted(usable, key=lambda slots: sum(slot.busy for slot in slots))[:num_nodes]
    return [
        Placement(**dict(slot), rank=node * num_devices + local, node_rank=node, local_rank=local)
        for node, slots in enumerate(hosts)
        for local, slot in enumerate(slots)
    ]


def choose(candidates: list[WorkerSlot], execution: Execution, fewest: int | None) -> list[Placement]:
    """Place the configured number of ranks, or as many as possible but at least `fewest`; raises as `place_ranks`."""
    configured, *smaller = layouts(execution.num_nodes, execution.num_devices, fewest)
    try:
        return place_ranks(candidates, *configured)
    except InputError:
        for layout in smaller:
            with suppress(InputError):
                return place_ranks(candidates, *layout)
        raise


def gpus_on_host(placement: Placement, placements: Sequence[Placement], accelerator: str) -> tuple[str, ...]:
    """UUIDs of a group's GPUs on a placement's host, in one order for all its ranks; none on CPUs."""
    return tuple(each.device for each in placements if each.host == placement.host) if accelerator == "gpu" else ()


def layouts(num_nodes: int, num_devices: int, fewest: int | None) -> list[tuple[int, int]]:
    """(hosts, devices on each) that a group may have: as configured first, then with fewer and fewer ranks."""
    if fewest is None:
        return [(num_nodes, num_devices)]
    possible = [(nodes, devices) for nodes in range(1, num_nodes + 1) for devices in range(1, num_devices + 1)]
    enough = [layout for layout in possible if layout[0] * layout[1] >= fewest]
    return sorted(enough, key=lambda layout: (layout[0] * layout[1], layout[1]), reverse=True)


def gpus_of_workers(workers: Sequence[tuple[Sequence[str], str | None]]) -> list[str | None]:
    """The GPU of each Dask worker of one host, by the GPUs it sees and its CUDA_VISIBLE_DEVICES; None without one."""
    # A dask-cuda worker's CUDA_VISIBLE_DEVICES names all GPUs, its own first. Workers started in another way may all
    # see the same list: then they get its GPUs in turn. The UUIDs that a worker sees are in the host's order.
    first_gpus = [_first_visible(gpus, setting) for gpus, setting in workers]
    if None not in first_gpus and len(set(first_gpus)) == len(first_gpus):
        return first_gpus
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
    """Environment of a rank: the worker's, without variables of other groups, with threads, network and GPUs set."""
    scrubbed = {name for name in inherited if name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES)}
    environment = {name: value for name, value in inherited.items() if name not in scrubbed} | keep_memory()
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(num_threads)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if interface is not None:  # a site's own choice stays, such as the interfaces of a faster network
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" eth1 stands for eth10 too
    return environment
