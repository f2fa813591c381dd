"""The group of ranks from inside one of them: joining, agreeing, and the small collectives beside training.

Everything works on one rank too, where each collective is the identity.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch import distributed, nn

from paceline.tasks.errors import RunError
from paceline.tasks.records import RankSpec

# The default of 30 minutes would hide a lost peer for as long; no step of a healthy group takes this.
GROUP_SECONDS = 120


class RankEnvironment(ClusterEnvironment):
    """Tells Lightning the rank's place from its spec instead of from environment variables that may be stale."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__()
        self._spec = spec

    @property
    def creates_processes_externally(self) -> bool:
        """The coordinator has started all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return self._spec.master_address

    @property
    def main_port(self) -> int:
        """Port of rank 0."""
        return self._spec.master_port

    @staticmethod
    def detect() -> bool:
        """Never chosen by guessing."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._spec.world_size

    def set_world_size(self, size: int) -> None:
        """The spec decides."""

    def global_rank(self) -> int:
        """Rank in the group."""
        return self._spec.rank

    def set_global_rank(self, rank: int) -> None:
        """The spec decides."""

    def local_rank(self) -> int:
        """Rank on this host."""
        return self._spec.local_rank

    def node_rank(self) -> int:
        """Number of this host."""
        return self._spec.node_rank


def pick_device(spec: RankSpec) -> torch.device:
    """The rank's device; the visible GPUs are the host's list, the same for all its ranks."""
    if spec.plan.accelerator == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", spec.local_rank)
    torch.cuda.set_device(device)
    return device


def join(spec: RankSpec, device: torch.device) -> None:
    """Join the process group; nothing to do for one rank."""
    if spec.world_size == 1:
        return
    timeout = timedelta(seconds=GROUP_SECONDS)
    store = distributed.TCPStore(  # type: ignore[attr-defined]  # stubs do not export it
        spec.master_address,
        spec.master_port,
        spec.world_size,
        is_master=spec.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listen(spec) if spec.rank == 0 else None,
    )
    distributed.init_process_group(
        backend="gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timeout,
    )


def _listen(spec: RankSpec) -> int:
    """Descriptor of a socket on the group's own address: torch would listen on all of the host's."""
    family = socket.AF_INET6 if ":" in spec.master_address else socket.AF_INET
    return socket.create_server((spec.master_address, spec.master_port), family=family, backlog=1024).detach()


def check_agreement(spec: RankSpec, facts: dict[str, Any], same: tuple[str, ...], unique: tuple[str, ...]) -> None:
    """Compare facts of all ranks before the first collective of training, and refuse with a table instead of a hang.

    Args:
        spec: this rank.
        facts: by name; exchanged between the ranks.
        same: names that must be equal on all ranks.
        unique: names that must differ between any two.

    Raises:
        RunError: with one line per rank.
    """
    if spec.world_size == 1:
        return
    table: list[dict[str, Any]] = [{} for _ in range(spec.world_size)]
    distributed.all_gather_object(table, facts)
    wrong = [name for name in same if len({str(row[name]) for row in table}) > 1]
    wrong += [name for name in unique if len({str(row[name]) for row in table}) < len(table)]
    if wrong:
        rows = "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(table))
        raise RunError(
            f"the ranks do not agree on {', '.join(wrong)}: {rows}",
            hint="install the same code on all hosts, and check each host with paceline doctor",
        )


def agreed(value: float) -> float:
    """Rank 0's value, on every rank."""
    if not distributed.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=_collective_device())
    distributed.broadcast(tensor, src=0)
    return float(tensor.item())


def gathered(value: float) -> tuple[float, ...]:
    """Every rank's value in the order of the ranks, on every rank."""
    if not distributed.is_initialized():
        return (value,)
    own = torch.tensor([value], dtype=torch.float64, device=_collective_device())
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    return tuple(float(one.item()) for one in found)


def reduced(values: torch.Tensor, operation: str) -> torch.Tensor:
    """Sum, mean or maximum (`sum`, `mean`, `max`) of a tensor over all ranks, in place."""
    if not distributed.is_initialized():
        return values
    kind = distributed.ReduceOp.MAX if operation == "max" else distributed.ReduceOp.SUM
    distributed.all_reduce(values, op=kind)
    return values.div_(distributed.get_world_size()) if operation == "mean" else values


def average_buffers(network: nn.Module) -> None:
    """Average the running statistics of batch norm over the ranks, so that all evaluate the same network.

    DistributedDataParallel would broadcast rank 0's in every step instead; once before an evaluation is enough.
    """
    if not distributed.is_initialized():
        return
    buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten().double() for buffer in buffers])
    reduced(flat, "mean")
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def _collective_device() -> torch.device:
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
