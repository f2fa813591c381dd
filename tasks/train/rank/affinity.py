"""CPU affinity of a rank: cores near its memory or its GPU, on hosts with several memory (NUMA) nodes.

Ranks of one host are spread over its nodes, because reading another node's memory takes twice as long. On hosts with
one node nothing is bound: two ranks bound to one core each were not faster there (infra/LOG.md).
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def bind(local_rank: int, num_ranks: int, gpu: str | None) -> None:
    """Bind this process to cores, before it starts threads; `gpu` is the UUID of the rank's GPU."""
    if not hasattr(os, "sched_setaffinity"):
        return
    nodes = memory_nodes(os.sched_getaffinity(0))
    if len(nodes) < 2:  # noqa: PLR2004
        return
    if gpu is not None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):  # a driver that names no cores changes nothing
            pynvml.nvmlInit()
            pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(gpu))
    elif cores := cores_of(local_rank, num_ranks, nodes):
        os.sched_setaffinity(0, cores)


def memory_nodes(allowed: set[int], root: Path = NODES) -> list[set[int]]:
    """The cores of each memory node that this process may use; nodes without any are omitted."""
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [parse_cpus(path.read_text(encoding="utf-8")) & allowed for path in lists]
    return [cores for cores in nodes if cores]


def parse_cpus(text: str) -> set[int]:
    """Cores of a list such as `0-3,8-11`, as the kernel writes it."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def cores_of(local_rank: int, num_ranks: int, nodes: Sequence[set[int]]) -> set[int] | None:
    """The cores of a rank's node, or nodes; None where ranks cannot be spread evenly."""
    if num_ranks % len(nodes) == 0:
        return nodes[local_rank * len(nodes) // num_ranks]
    if len(nodes) % num_ranks == 0 and num_ranks > 1:
        each = len(nodes) // num_ranks
        return set().union(*nodes[local_rank * each : (local_rank + 1) * each])
    return None
