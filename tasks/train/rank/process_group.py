"""The process group from inside a rank: joining, agreement, and small collectives; on one rank they do nothing."""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import distributed, nn

from paceline.tasks.errors import RunError, one_line
from paceline.tasks.train.launch.layout import LAUNCHER_VARIABLES
from paceline.tasks.train.rank_spec import RankSpec

# The default of 30 minutes would hide a lost rank for as long; no step of a healthy group takes 2 minutes.
GROUP_SECONDS = 120
# Before training, ranks wait while rank 0 compiles and runs an arm alone, and in a user's training for what it does on
# one rank. It is the default of torch and of Lightning. A rank that ends is noticed at once anyway.
ALONE_SECONDS = 1800
LOOK_SECONDS = 1.0  # between two looks whether another rank has left
COMPLETE, LEFT, WAITED = "complete", "left", "waited"
"""Outcomes of work on all ranks: all have ended it; one on which it failed has left; one has waited for too long."""
_joined: dict[str, Any] = {"number": 1_000_000}
"""Of the group that was joined: its `store`, the group of this rank alone (`own`), and the number of the next group of
a user's code in it."""
_arrivals = itertools.count()


class RankEnvironment(LightningEnvironment):
    """Gives Lightning the rank's position from its spec, because environment variables may be stale."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__()
        self._spec = spec
        self.set_world_size(spec.world_size)
        self.set_global_rank(spec.rank)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._spec.master_address

    @property
    def main_port(self) -> int:
        return self._spec.master_port

    def local_rank(self) -> int:
        return self._spec.local_rank

    def node_rank(self) -> int:
        return self._spec.node_rank

    def teardown(self) -> None:
        """Do nothing: Lightning's method removes WORLD_SIZE, which the next trainer of this rank needs."""


def lightning_environment(spec: RankSpec, is_group: bool) -> LightningEnvironment:
    """The environment of a trainer, on all of the group's ranks or on this one alone; to be given in both cases.

    Without one, Lightning looks for that of a launcher and starts MPI where mpi4py is installed. MPI ends the process
    on a host that cannot start MPI's daemon.
    """
    return RankEnvironment(spec) if is_group else LightningEnvironment()


def set_launcher_variables(spec: RankSpec) -> None:
    """Set the variables by which a user's code finds its part of the data, as the launchers of Lightning and torch do.

    A training on one device has none, like a script without a launcher. Nor has an arm on one rank: see `alone`.
    """
    if spec.world_size > 1:
        local = spec.rank, spec.local_rank, spec.node_rank, spec.world_size, spec.num_devices
        values = (*local, spec.master_address, spec.master_port)
        os.environ.update(zip(LAUNCHER_VARIABLES, map(str, values), strict=True))


def pick_device(spec: RankSpec) -> torch.device:
    """The rank's device; all ranks of a host see the same list of GPUs."""
    if spec.plan.accelerator == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", spec.local_rank)
    torch.cuda.set_device(device)
    return device


def join(spec: RankSpec, device: torch.device) -> None:
    """Join the process group, if there are several ranks."""
    if spec.world_size > 1:
        meet(spec.rank, spec.world_size, spec.master_address, spec.master_port, device)


def meet(rank: int, world_size: int, address: str, port: int, device: torch.device) -> None:
    """Make a process group at rank 0's address."""
    timeout = timedelta(seconds=GROUP_SECONDS)
    store = distributed.TCPStore(  # type: ignore[attr-defined]  # stubs do not export it
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listen(address, port) if rank == 0 else None,
    )
    backend = "gloo" if device.type == "cpu" else "nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _joined.update(store=store, own=distributed.new_group([rank], use_local_synchronization=True))


@contextmanager
def wait_for_rank_0() -> Iterator[None]:
    """Give collectives the time of what rank 0 does alone, in the body."""
    if not distributed.is_initialized():
        yield
        return
    # Of torch's own tests and tools, in all versions that are supported; there is no public name.
    set_timeout = distributed.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=ALONE_SECONDS))
    try:
        yield
    finally:
        if distributed.is_initialized():  # a user's hook may have ended it
            set_timeout(timedelta(seconds=GROUP_SECONDS))


def _has_met() -> bool:
    """Whether this rank is in a group of `meet`: where it trains alone, a user's code may make one of its own."""
    return distributed.is_initialized() and "store" in _joined


@contextmanager
def alone() -> Iterator[None]:
    """Let this rank be the whole default group, in the body, so that collectives of a user's code wait for nobody.

    The launcher's variables are removed in the body, because a script on one device has none.
    """
    if not _has_met():
        yield
        return
    variables = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    world, whole = distributed.distributed_c10d._world, distributed.group.WORLD
    # Names of groups have numbers, which must stay the same on all ranks.
    number, world.group_count = world.group_count, _joined["number"]
    distributed.group.WORLD = _joined["own"]
    try:
        yield
    finally:
        os.environ |= variables
        distributed.group.WORLD = whole
        _joined["number"], world.group_count = world.group_count, number


def arrive(seconds: float | None = None) -> bool:
    """Tell the other ranks that this one is here. With a time to wait, return whether all came within it.

    Call it on all ranks. It uses the store and no collective: another rank may still be in a collective of its own.
    """
    if not _has_met():
        return True
    point, store = f"arrival-{next(_arrivals)}", _joined["store"]
    try:
        store.set(f"{point}-{distributed.get_rank()}", "")
        if seconds is not None:
            keys = [f"{point}-{rank}" for rank in range(distributed.get_world_size())]
            store.wait(keys, timedelta(seconds=seconds))
    except distributed.DistStoreError:  # after that time
        return False
    except RuntimeError:  # the store is gone, which the next collective reports
        return True
    return True


def run_on_all(work: Callable[[], str], patience: float) -> tuple[str, bool]:
    """Run the user's code on all ranks, where it may fail on one of them alone.

    `work` returns why it failed, or nothing. A rank on which it failed waits for the others for `patience` seconds. If
    they take longer, they may wait for this rank in a collective. So it leaves: its process is to end. Then collectives
    of gloo fail on the other ranks at once. Those of NCCL do not, and each rank aborts its own. A rank on which it did
    not fail waits for `ALONE_SECONDS`.

    Returns:
        Why it failed on the first rank on which it did, and whether all ranks have ended it.
    """
    if not _has_met():
        return work(), True
    point, store, rank = f"work-{next(_arrivals)}", _joined["store"], distributed.get_rank()
    ended = [f"{point}-{each}" for each in range(distributed.get_world_size())]
    failed, outcome = f"{point}-failed", f"{point}-outcome"
    with _abort_nccl(store, outcome):
        failure = work()
    try:
        if failure:
            store.compare_set(failed, "", f"rank {rank}: {failure}")
        store.set(ended[rank], "")
        seen = COMPLETE
        try:
            store.wait(ended, timedelta(seconds=patience if failure else ALONE_SECONDS))
        except distributed.DistStoreError:  # after that time
            seen = LEFT if failure else WAITED
        decided = store.compare_set(outcome, "", seen).decode()  # by the first rank, for all
        first = store.get(failed).decode() if store.check([failed]) else ""
        return first, decided == COMPLETE
    except RuntimeError as error:  # rank 0 has left, and the store with it
        return failure or one_line(error), False


@contextmanager
def _abort_nccl(store: Any, outcome: str) -> Iterator[None]:
    """Abort NCCL's collectives of this rank, in the body, when a rank has left by a key of the store."""
    if distributed.get_backend() != "nccl":
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_SECONDS):
            try:
                has_left = store.check([outcome]) and store.get(outcome).decode() == LEFT
            except RuntimeError:  # rank 0 has
                has_left = True
            if has_left:
                distributed.distributed_c10d._abort_process_group()
                return

    watcher = threading.Thread(target=watch, name="watch-ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _listen(address: str, port: int) -> int:
    """Listen on the group's address only: torch would listen on all addresses of the host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024).detach()


def check_agreement(spec: RankSpec, facts: dict[str, Any], same: tuple[str, ...], unique: tuple[str, ...]) -> None:
    """Compare facts of all ranks before training: ranks that differ raise RunError with them, instead of a deadlock."""
    if spec.world_size == 1:
        return
    table: list[dict[str, Any]] = [{} for _ in range(spec.world_size)]
    distributed.all_gather_object(table, facts)
    wrong = [name for name in same if len({str(row[name]) for row in table}) > 1]
    wrong += [name for name in unique if len({str(row[name]) for row in table}) < len(table)]
    if wrong:
        rows = "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(table))
        fault = f"the ranks do not agree on {', '.join(wrong)}: {rows}"
        raise RunError(fault, hint="install the same code on all hosts, and check each host with paceline doctor")


def broadcast(value: float) -> float:
    """Rank 0's value, on every rank."""
    if not distributed.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=_collective_device())
    distributed.broadcast(tensor, src=0)
    return float(tensor.item())


def all_gather(value: float) -> tuple[float, ...]:
    """Every rank's value in the order of the ranks, on every rank."""
    if not distributed.is_initialized():
        return (value,)
    tensor = torch.tensor([value], dtype=torch.float64, device=_collective_device())
    values = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(values, tensor)
    return tuple(float(each.item()) for each in values)


def all_reduce(values: torch.Tensor, operation: str) -> torch.Tensor:
    """Sum, mean or maximum (`sum`, `mean`, `max`) of a tensor over all ranks, in place."""
    if not distributed.is_initialized():
        return values
    kind = distributed.ReduceOp.MAX if operation == "max" else distributed.ReduceOp.SUM
    distributed.all_reduce(values, op=kind)
    return values.div_(distributed.get_world_size()) if operation == "mean" else values


def average_buffers(network: nn.Module, others: Iterable[torch.Tensor] = ()) -> None:
    """Average the running statistics of batch norm, and `others`, over the ranks, so that all evaluate one network."""
    # DistributedDataParallel would broadcast rank 0's in every step instead; once before an evaluation is enough.
    if not distributed.is_initialized():
        return
    buffers = [*(buffer for buffer in network.buffers() if buffer.is_floating_point()), *others]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten().double() for buffer in buffers])
    all_reduce(flat, "mean")
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def _collective_device() -> torch.device:
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
