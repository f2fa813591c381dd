"""Checkpoints written atomically by Lightning in a thread, while training continues, and loaded without executing code.

Of a sharded network, each rank writes its part of weights and optimizer state. A checkpoint is then a directory
`step-0000000352.ckpt` of files `part-K-of-N.pt` with their digests (see `checkpoint`). A part holds rows of the sharded
tensors, part 0 all else. Any number of ranks joins the rows that it needs. The reader of `torch.distributed.checkpoint`
executes pickled code (torch 2.13); this one reads tensors and plain types only.
"""

import hashlib
import io
import os
import pickle
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.tasks.errors import RunError
from paceline.tasks.files import make_directory, write_durably
from paceline.tasks.metrics_file import FILE, require_newest
from paceline.tasks.train.rank.checkpoint import NUM_CHECKPOINTS, digest_path, part_path, parts_of

Place = tuple[Any, ...]  # keys that lead to a value inside a checkpoint
Rows = dict[Place, tuple[int, int, torch.Tensor]]
"""For each sharded tensor: first row in the tensor, number of all rows, and a part's rows."""


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises RunError: it holds more than tensors and plain types; none is executed."""
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError, KeyError, ValueError):
        # Torch's own message advises to load it anyway.
        fault = f"{path} is not a checkpoint of tensors and plain types; nothing of it was executed"
        raise RunError(f"{fault}; remove it, and training resumes from the one before") from None
    return checkpoint


def join(path: Path, wrap: Callable[[Callable[[int, int], torch.Tensor], int], torch.Tensor]) -> dict[str, Any]:
    """Read a sharded checkpoint; `wrap` makes each tensor from a function of (first row, stop) and its number of rows.

    Raises as `load` does.
    """
    parts = [load(part) for part in parts_of(path)]
    checkpoint: dict[str, Any] = parts[0]["rest"]
    for place, (_, num_rows, _) in parts[0]["rows"].items():
        pieces = [part["rows"][place] for part in parts]

        def read(start: int, stop: int, pieces: list[tuple[int, int, torch.Tensor]] = pieces) -> torch.Tensor:
            return torch.cat([rows[max(0, start - first) : max(0, stop - first)] for first, _, rows in pieces])

        *parents, name = place
        holder: Any = checkpoint
        for key in parents:
            holder = holder[key]
        holder[name] = wrap(read, num_rows)
    return checkpoint


def load_full(path: Path) -> dict[str, Any]:
    """Read a checkpoint with all its rows, sharded or not."""
    return join(path, lambda read, num_rows: read(0, num_rows)) if path.is_dir() else load(path)


def load_rest(path: Path) -> dict[str, Any]:
    """Read what of a checkpoint is not sharded."""
    unsharded: dict[str, Any] = load(parts_of(path)[0])["rest"] if path.is_dir() else load(path)
    return unsharded


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoint plugin with atomic writes in a thread, one at a time, for the attempt with a directory.

    Where `checkpoints` is given, only those in this directory are written so, and others at once, as by Lightning, in
    the context `during`. The user's file that the training started from, `start`, is not removed. Lightning
    would keep it too, but was given the run's copy.
    """

    # Lightning's `AsyncCheckpointIO` (2.6) copies on the GPU, queues checkpoints, reports errors a checkpoint later.
    def __init__(
        self,
        attempt: Path,
        checkpoints: Path | None = None,
        during: Callable[[], AbstractContextManager[object]] = nullcontext,
        start: str | None = None,
    ) -> None:
        self._attempt, self._checkpoints, self._during = attempt, checkpoints, during
        self._start = None if start is None else Path(start).resolve()
        self._executor = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None
        self._may_write, self._is_dropped = threading.Event(), False
        self._may_write.set()
        self.write_seconds = 0.0  # seconds of the last write in the thread
        self.before_user_checkpoint: Callable[[], None] = lambda: None
        """Called before a checkpoint of the user's code is written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy the checkpoint to the host, and write it in the thread. Raises OSError: the one before was lost."""
        if self._is_foreign(path):
            self.before_user_checkpoint()
            with self._during(), _no_part_of(path):
                TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options)
            return
        if self._written is not None:  # else `hold` has waited, which `wait` would undo
            self.wait()
        self.submit(write_and_prune, Path(path), split_off_rows(checkpoint, (), {}))

    def submit(self, write: Callable[[Path, dict[str, Any], Path], None], path: Path, content: dict[str, Any]) -> None:
        """Call `write` in the thread; the caller has waited for the write before."""

        def write_timed() -> None:
            self._may_write.wait()
            if self._is_dropped:
                return
            started = time.monotonic()
            write(path, content, self._attempt)
            self.write_seconds = time.monotonic() - started

        self._written = self._executor.submit(write_timed)

    def hold(self) -> None:
        """Let the next checkpoint be written when the metrics of its steps are logged: at `release`, or `wait`.

        A resume does not log them again. One that was not released when the training ended is not written.
        """
        self.wait()
        self._may_write.clear()

    def release(self) -> None:
        """Let the checkpoint be written that is held."""
        self._may_write.set()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises OSError: it cannot be."""
        self.release()
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def is_idle(self) -> bool:
        """Whether the last checkpoint is written. Raises OSError: it cannot be."""
        if self._written is not None and self._written.done():
            self.wait()
        return self._written is None

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; the caller has verified it."""
        if self._is_foreign(path) and not weights_only:
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return load_full(Path(path))

    def _is_foreign(self, path: str | Path) -> bool:
        """Whether the user's code saves or reads this checkpoint."""
        return self._checkpoints not in (None, Path(path).parent)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file or the directory, unless the training started from it."""
        if Path(path).resolve() == self._start:
            return
        if self._is_foreign(path):
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            remove(Path(path))

    def teardown(self) -> None:
        """Wait for the last checkpoint."""
        self._is_dropped = not self._may_write.is_set()
        self.release()
        self._executor.shutdown()
        self.wait()


@contextmanager
def _no_part_of(path: str | Path) -> Iterator[None]:
    """Remove a new local file if the body could not write it completely."""
    is_new = "://" not in str(path) and not os.path.lexists(path)
    try:
        yield
    except OSError:
        if is_new:
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
        raise


def write_and_prune(path: Path, content: dict[str, Any], attempt: Path) -> None:
    """Write a checkpoint of one file, then remove all but the newest two."""
    make_directory(path.parent)
    if path.is_dir():  # what a sharded training left that resumes on one rank
        remove(path)
    write_with_digest(path, content, attempt)
    prune(path.parent)


def write_with_digest(path: Path, content: dict[str, Any], attempt: Path) -> None:
    """Write the digest, then the file, then rename. Raises SupersededError: there is a newer attempt than this."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    confirm = partial(require_newest, attempt)
    metrics = attempt / "rank-0" / FILE
    if metrics.exists():  # a resume does not log the steps before this checkpoint again
        with metrics.open("rb") as stream:
            os.fsync(stream.fileno())
    write_durably(digest_path(path), hashlib.sha256(payload).hexdigest().encode(), confirm)
    write_durably(path, payload, confirm)


def prune(directory: Path) -> None:
    """Remove all but the newest two checkpoints, and what crashes have left of others; no rank may be writing one."""
    paths = sorted(directory.glob("step-*.ckpt"))
    complete = [path for path in paths if not path.is_dir() or parts_of(path)]
    for old in set(paths) - set(complete[-NUM_CHECKPOINTS:]):
        remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint: the directory, or the file and then its digest."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    digest_path(path).unlink(missing_ok=True)


def split_off_rows(value: Any, place: Place, rows: Rows) -> Any:
    """Copy a checkpoint to the host without its sharded tensors, whose rows of this rank are added to `rows`."""
    if isinstance(value, dict):
        copied: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, entry in value.items():
            if isinstance(entry, DTensor):
                _, offset = compute_local_shape_and_global_offset(entry.shape, entry.device_mesh, entry.placements)
                rows[*place, key] = offset[0], entry.shape[0], entry.to_local().detach().to("cpu", copy=True)
            else:
                copied[key] = split_off_rows(entry, (*place, key), rows)
        if isinstance(value, OrderedDict):
            vars(copied).update(vars(value))  # versions of modules
        return copied
    if isinstance(value, list | tuple):
        entries = [split_off_rows(entry, (*place, index), rows) for index, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class ShardedStrategy(ModelParallelStrategy):
    """Data parallelism without tensor parallelism, with checkpoints of one part per rank."""

    def __init__(self, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's rows of the weights."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's rows of the optimizer state."""
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Copy this rank's part to the host, and write it in a thread. Raises OSError: the part before was lost."""
        path, rank, writer = Path(filepath), self.global_rank, self.checkpoint_io
        assert isinstance(writer, AtomicCheckpointIO)
        writer.wait()
        self.barrier()  # all ranks have written their parts of the checkpoint before
        if rank == 0:
            prune(path.parent)
            shutil.rmtree(path, ignore_errors=True)
        self.barrier()
        make_directory(path)
        rows: Rows = {}
        unsharded = split_off_rows(checkpoint, (), rows)
        part = {"rows": rows, "rest": unsharded if rank == 0 else {}}
        writer.submit(write_with_digest, part_path(path, rank, self.world_size), part)

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
