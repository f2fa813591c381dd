"""Sharded checkpoints: each rank writes its part of weights and optimizer state in a thread, while training continues.

A checkpoint is a directory `step-0000000352.ckpt` of files `part-K-of-N.pt` with their digests (see `checkpoint`). A
part holds rows of the sharded tensors, part 0 all else. Any number of ranks joins the rows that it needs. The reader of
`torch.distributed.checkpoint` executes pickled code (torch 2.13); this one reads tensors and plain types only.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.tasks.train.rank.checkpoint import part_path
from paceline.tasks.train.rank.checkpoint_io import Place, Rows, join, prune, write_with_digest


def split_off_rows(value: Any, place: Place, rows: Rows) -> Any:
    """Copy a checkpoint to the host without its sharded tensors, whose rows of this rank are added to `rows`."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, DTensor):
                _, offset = compute_local_shape_and_global_offset(entry.shape, entry.device_mesh, entry.placements)
                rows[*place, key] = offset[0], entry.shape[0], entry.to_local().detach().to("cpu", copy=True)
        return {
            key: split_off_rows(entry, (*place, key), rows)
            for key, entry in value.items()
            if not isinstance(entry, DTensor)
        }
    if isinstance(value, list):
        return [split_off_rows(entry, (*place, index), rows) for index, entry in enumerate(value)]
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class ShardedStrategy(ModelParallelStrategy):
    """Data parallelism without tensor parallelism, with asynchronous checkpoints of one part per rank."""

    def __init__(self, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)
        self._executor = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's rows of the weights."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's rows of the optimizer state."""
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Copy this rank's part to the host, and write it in a thread. Raises OSError: the part before was lost."""
        path, rank = Path(filepath), self.global_rank
        self._wait()
        self.barrier()  # all ranks have written their parts of the checkpoint before
        if rank == 0:
            prune(path.parent)
            shutil.rmtree(path, ignore_errors=True)
        self.barrier()
        path.mkdir(parents=True, exist_ok=True)
        rows: Rows = {}
        unsharded = split_off_rows(checkpoint, (), rows)
        part = {"rows": rows, "rest": unsharded if rank == 0 else {}}
        self._written = self._executor.submit(write_with_digest, part_path(path, rank, self.world_size), part)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's rows of weights and optimizer state."""
        path = Path(checkpoint_path)
        if not path.is_dir():  # of an older version
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None
        mesh, device = self.device_mesh["data_parallel"], self.root_device

        def shard(read: Callable[[int, int], torch.Tensor], num_rows: int) -> torch.Tensor:
            shape = torch.Size((num_rows, *read(0, 0).shape[1:]))
            (num_own, *_), (start, *_) = compute_local_shape_and_global_offset(shape, mesh, (Shard(0),))
            rows, stride = read(start, start + num_own).to(device), torch.empty(shape, device="meta").stride()
            return DTensor.from_local(rows, mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)

        checkpoint = join(path, shard)
        self.model.load_state_dict(checkpoint["state_dict"])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        return checkpoint

    def teardown(self) -> None:
        """Wait for the last part, then do what Lightning does."""
        self._wait()
        self._executor.shutdown()
        super().teardown()

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()
