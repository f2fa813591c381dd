"""Training steps in Lightning's own Trainer, a few at a time, for measurements next to a training.

Each trainer has a thread, which waits in the training loader until steps are asked for. So several trainers take turns
in one process, each with its own module, optimizers and batches, and only one works at any time. Processes that read
for its loaders are paused in between, or steps would find batches that were read in the time of others; where that is
not possible, a trainer of one rank does not time these batches. A step lasts from the request for its batch to the
request for the next one: all that Lightning does for it counts.
"""

import copy
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import DataLoader

from paceline.tasks.errors import InputError, RunError
from paceline.tasks.model.flops import StepCount
from paceline.tasks.records.cost import Cost
from paceline.tasks.train.lightning import pausing
from paceline.tasks.train.lightning.feed import LoaderProxy, is_for_trainer
from paceline.tasks.train.lightning.step_parts import loss_value, num_samples, require_loss
from paceline.tasks.train.step.benchmark_step import exchange

NUM_BATCHES = 100_000
"""Least length of a loader for its trainer, so that no epoch ends: at its end, metrics would wait for other ranks."""
STUCK_SECONDS = 30.0
"""After so long without an answer, paused processes of other trainers continue."""


class TrainerSteps(Callback):
    """Steps of one trainer; it is a callback of it, and `wrap` must be around its training loaders.

    `fit` makes the trainer and calls its `fit`. On a GPU the times of a call are their mean.
    """

    def __init__(self, fit: Callable[["TrainerSteps"], object], device: torch.device) -> None:
        self._fit, self._is_on_gpu = fit, device.type == "cuda"
        self._turn, self._answer = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name="trainer-steps", daemon=True)
        self._num_left = 0
        self._times: list[float] = []
        self._error: BaseException | None = None
        self._ends = False
        self._loaders: list[_EndlessLoader] = []
        self._is_alone = False
        self.change_loader: Callable[[Any], Any] = lambda loader: loader
        """Takes the loader, and returns what the steps read."""
        self.splits = False
        """Whether a batch serves two steps, half of its samples each, so that half of it is read for each."""
        self.replays = False
        """Whether all steps get the first batch, which is there already."""
        self.batch_size = math.nan
        """Samples of the first batch; NaN where it has no tensor."""
        self.length: int | None = None
        """Batches of an epoch of the loader; None where it has no length."""
        self.loss: torch.Tensor | None = None
        """Of the last step."""
        self.num_trained = 0
        """Weights that get gradients."""
        self.counts = False
        """Whether to count the operations of the next steps, which takes time."""
        self.cost: tuple[Cost | None, str] = None, ""
        """Operations of a sample in the last counted step, or why they are not known."""
        self._count = StepCount()

    @property
    def num_workers(self) -> list[int]:
        """Of each loader that the steps read, after the first step."""
        return [loader.count("num_workers") for loader in self._loaders]

    def run(self, number: int) -> list[float]:
        """Take steps; the seconds of each. Raises what the module, the loader or Lightning has raised in them."""
        if self._error is not None:
            raise self._error
        self._num_left, self._times = number, []
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        while not self._answer.acquire(timeout=STUCK_SECONDS):
            pausing.resume()  # one of them may have a lock that this step waits for
        if self._error is not None:
            raise self._error
        return [sum(self._times) / number] * number if self._is_on_gpu else self._times

    def close(self) -> None:
        """End the trainer."""
        if self._thread.is_alive():
            self._ends = True
            self._turn.release()
            self._thread.join()

    def wrap(self, loader: Any) -> Any:
        """A loader for the trainer, of which the first one waits between the steps."""
        is_first = not self._loaders
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)  # one with persistent workers has one iterator at a time
        between = self._wait_between if is_first else iter
        endless = _EndlessLoader(self.change_loader(loader), between, splits=self.splits)
        if is_first:
            self.length = endless.length
        self._loaders.append(endless)
        return endless

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        attributes: Any = trainer  # its connectors set them
        places = [each.dirpath for each in attributes.callbacks if isinstance(each, ModelCheckpoint)]
        unused = ModelCheckpoint(next(iter(places), None), save_top_k=0)  # which the module may read, and saves nothing
        unused.setup(trainer, pl_module, stage)
        attributes.callbacks = [*(each for each in attributes.callbacks if not isinstance(each, Checkpoint)), unused]
        for owner in (*attributes.callbacks, attributes.datamodule):
            # `close` ends the trainer by an error, which is not the module's.
            if owner is not None and vars(owner).get("on_exception") is not do_nothing:
                _silenced.append((owner, vars(owner).get("on_exception")))
                object.__setattr__(owner, "on_exception", do_nothing)  # of frozen ones too

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._is_alone = trainer.world_size == 1
        if batch_idx == 0:
            require_loss(pl_module, outputs)
            self.num_trained = sum(weights.numel() for weights in pl_module.parameters() if weights.requires_grad)
        self.loss = loss_value(outputs)
        if self.counts:
            self.cost = self._count.cost(pl_module, self.batch_size)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self.counts:
            self._count.note_backward()

    def _work(self) -> None:
        try:
            self._fit(self)
            self._error = RunError("Lightning's trainer ended its epoch")
        except BaseException as error:  # noqa: BLE001  for the thread that asks for steps
            self._error = error
        finally:
            self._answer.release()

    def _wait_between(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, each when its step is asked for; in the thread of the trainer."""
        first = None
        while True:
            if self._num_left == 0:
                workers = set[BaseProcess]().union(*(loader.workers for loader in self._loaders))
                are_paused = pausing.pause(workers)
                self._answer.release()
                self._turn.acquire()
                pausing.resume(workers)
                if self._ends:
                    raise RunError("no more steps are wanted")
                if self._is_alone and not (are_paused or self.replays):  # ranks of a group must take as many steps
                    yield from islice(batches, max(loader.num_ahead for loader in self._loaders))
            self._synchronize()
            started = time.perf_counter()
            number = self._num_left if self._is_on_gpu else 1
            for _ in range(number):
                if first is None or not self.replays:
                    first = next(batches)
                    if math.isnan(self.batch_size):
                        self.batch_size = num_samples(first)
                with self._count.count() if self.counts else nullcontext():
                    yield first
            self._synchronize()
            self._times.append(time.perf_counter() - started)
            self._num_left -= number

    def _synchronize(self) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize()


class _EndlessLoader(LoaderProxy):
    """One epoch of a loader after the other, each without its last batch, which may be smaller."""

    __slots__ = ("_between", "_splits", "length", "workers")

    def __init__(self, loader: Any, between: Callable[[Iterator[Any]], Iterator[Any]], *, splits: bool) -> None:
        super().__init__(loader)
        self._between, self._splits = between, splits
        self.workers: set[BaseProcess] = set()
        """Processes that read for the loader."""
        self.length: int | None = None
        """Of the loader; None where it has none."""
        with suppress(TypeError, NotImplementedError):
            self.length = len(loader)

    def __len__(self) -> int:
        return max(NUM_BATCHES, self.length or 0)

    def __iter__(self) -> Iterator[Any]:
        return self._between(self._batches()) if is_for_trainer() else iter(self._loader)

    def _batches(self) -> Iterator[Any]:
        while True:
            is_empty, others = True, {*multiprocessing.active_children()}
            for batch in islice(self._loader, self.length and max(1, self.length - 1)):
                if is_empty:
                    now = {*multiprocessing.active_children()}
                    self.workers = self.workers & now | now - others  # some loaders keep them for the next epoch
                is_empty = False
                yield from map(halve, (batch, batch), (0, 1)) if self._splits else (batch,)
            if is_empty:
                raise InputError("the training loader has no batch", hint="check the data of your training loader")

    @property
    def num_ahead(self) -> int:
        """Batches that its workers read ahead."""
        return self.count("num_workers") * self.count("prefetch_factor")

    def count(self, name: str) -> int:
        """A number among the loader's attributes; 0 without it, as not every loader is torch's."""
        number = getattr(self._loader, name, 0)
        return number if isinstance(number, int) else 0


class TokenSync(Callback):
    """Lets the ranks exchange a single number for each bucket of gradients, in place of the gradients."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        token = torch.zeros(1, device=pl_module.device)
        # A lambda, because torch rejects annotations that are text.
        wrapped: Any = trainer.strategy.model
        wrapped.register_comm_hook(token, lambda token, bucket: exchange(token, bucket))  # noqa: PLW0108


def halve(batch: Any, part: int) -> Any:
    """The first (0) or the second (1) half of the samples of a batch, a tree of tensors; other values stay."""
    if isinstance(batch, torch.Tensor):
        number = len(batch) // 2 if batch.dim() else 0
        return batch[part * number : (part + 1) * number] if number else batch
    if isinstance(batch, MutableMapping):
        halved = copy.copy(batch)
        halved.update({name: halve(value, part) for name, value in batch.items()})
        return halved
    if is_dataclass(batch) and not isinstance(batch, type):
        halves = {field.name: halve(getattr(batch, field.name), part) for field in fields(batch) if field.init}
        return replace(batch, **halves)
    if not isinstance(batch, (list, tuple)):
        return batch
    parts = [halve(value, part) for value in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a hook that has run, or must not run."""


_silenced: list[tuple[Any, Any]] = []
"""Callbacks and data of arms, and the `on_exception` of each one's own, if any."""


def restore_on_exception() -> None:
    """Let callbacks hear of errors again when all arms are closed: the user's code may share them with the training."""
    while _silenced:
        owner, own = _silenced.pop()
        if own is None:
            object.__delattr__(owner, "on_exception")
        else:
            object.__setattr__(owner, "on_exception", own)


def without_workers(loader: Any) -> Any:
    """A DataLoader that reads in the process of the training."""
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        loader.num_workers, loader.timeout, loader.prefetch_factor = 0, 0, None
    return loader
