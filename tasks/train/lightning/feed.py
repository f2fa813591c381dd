"""The user's training loader, with the time that training waits for it, and with an exact place to resume.

Lightning starts a plain loader at its first batch after a resume, with other random numbers. A feed starts the epoch
again with the random numbers of its start, reads the batches that were trained, and hands out the next one. A loader
with a state of its own continues by that: Lightning stores it in its checkpoints, and restores it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from inspect import ismemberdescriptor
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.conf.lightning import NO_AVERAGES
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.train.lightning.cli import AVERAGES
from paceline.tasks.train.lightning.random_state import RandomState, random_state, set_random_state
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.step.distributed import adapt_reduction, shard_module

Wrap = Callable[[Any], Any]
"""Takes a loader, and returns the one that Lightning reads."""


@dataclass
class Position:
    """Where a rank is in an epoch."""

    random: RandomState
    """At the checkpoint."""
    epoch_random: RandomState
    """At the start of the epoch, before its iterator was made."""
    num_trained: int
    """Batches of the epoch before the checkpoint; 0 after its last one."""
    num_read: int
    """Batches that were read; Lightning reads one ahead where a loader has no length."""
    last_read_random: RandomState = field(default_factory=dict)
    """Before the last of them was read ahead."""
    had_iterator: bool = False
    """Whether the loader had an iterator before that of this epoch; not known in checkpoints of earlier versions."""
    first_random: RandomState = field(default_factory=dict)
    """Before the first batch of the epoch was read, after what hooks had drawn; none in older checkpoints."""
    hooks_random: RandomState = field(default_factory=dict)
    """Before the hooks of the epoch's start; none in older checkpoints."""


class FeedState:
    """State that the feeds of a trainer share with the callback that saves their position."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.is_training: Callable[[], bool] = lambda: False
        self.num_started: Callable[[], int] = lambda: sys.maxsize
        """Batches of the epoch whose training has started; fewer than were read where Lightning reads ahead."""
        self.loader: Any = None
        """The training loader that was read last."""
        self.epoch_random: RandomState = {}
        self.first_random: RandomState = {}
        self.hooks_random: RandomState = {}
        self.num_read = 0
        self.last_read_random: RandomState = {}
        self.had_iterator = False
        self.reloads = False
        """Whether each epoch has a new loader."""
        self.has_new_workers = False
        """Whether a resume has started persistent workers, whose own random numbers are not restored."""
        self.resume: Position | None = None
        """Position to resume at, until its epoch starts, or the first batch of the rest of it is read."""
        self.call_epoch_start_hooks: Callable[[], None] = lambda: None
        """Calls the hooks of an epoch's start in a resume inside an epoch."""
        self.training_loaders: Callable[[], Any] = lambda: None
        """What the training reads: a feed, or a tree of them."""

    def feeds(self) -> list["Feed"]:
        """The feeds of the training; of several, the places inside an epoch are not known."""
        return [leaf for leaf in _leaves(self.training_loaders()) if isinstance(leaf, Feed)]

    def start_epoch(self) -> None:
        """Before the hooks of an epoch's start: note the random numbers, or restore those of the epoch before."""
        feeds, resume = self.feeds(), self.resume
        if not feeds:  # in a container that is not known
            return
        loader = feeds[0]._loader
        if resume is not None and not resume.num_trained:
            self.resume = None
            set_random_state(resume.random, loader)
            if resume.had_iterator:
                self.loader = loader
            if self.reloads:
                for each in feeds:  # of a new loader, Lightning makes one iterator before these hooks
                    each.start()
        self.hooks_random = random_state(loader)

    def position(self, num_trained: int) -> Position:
        """The position after so many batches of the epoch."""
        random = random_state(self.loader)
        had_iterator = self.had_iterator if num_trained else not self.reloads  # at an epoch's end: that of this one
        place = num_trained, self.num_read, self.last_read_random, had_iterator
        return Position(random, self.epoch_random, *place, self.first_random, self.hooks_random)


def _leaves(tree: Any) -> list[Any]:
    """The loaders in a tree of dicts and lists."""
    if isinstance(tree, LoaderProxy):  # of any class of the user's, also one of a list
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [leaf for branch in tree for leaf in _leaves(branch)] if isinstance(tree, list | tuple) else [tree]


def is_for_trainer() -> bool:
    """Whether a loop of Lightning has called the `__iter__` that calls this, and not a hook of the user's code."""
    return sys._getframe(2).f_globals.get("__name__") == CombinedLoader.__module__


class LoaderProxy:
    """Stands in for the user's loader, whose class and attributes it shows; only its `__slots__` are its own."""

    __slots__ = ("_loader",)

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the loader, for `isinstance`; `type` returns that of the proxy."""
        return self._loader.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader, as hooks do, and Lightning for the seeds of its workers."""
        if ismemberdescriptor(getattr(type(self), name, None)):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is pickled, are those of the loader."""
        return copy, (self._loader,)

    def __len__(self) -> int:
        return len(self._loader)


class Feed(LoaderProxy):
    """The user's loader, from the position of a checkpoint on, with the time that training waits for it."""

    __slots__ = ("_is_first", "_state")

    def __init__(self, state: FeedState, loader: Any) -> None:
        super().__init__(loader)
        self._state = state
        self._is_first = True  # the only feed of the training, or the first of several

    def __iter__(self) -> Iterator[Any]:
        state = self._state
        feeds = state.feeds() if state.is_training() and is_for_trainer() else []
        if self not in feeds:
            return iter(self._loader)
        self._is_first, resume = self is feeds[0], state.resume
        if resume is None:
            return self._batches(self._start_epoch())
        if self._is_first and resume.had_iterator:
            state.has_new_workers = any([each.start_workers() for each in feeds])
        if not resume.num_trained:
            return repeat(None)  # Lightning asks again after the hooks of the epoch's start: workers get what these set
        return self._rest(resume)

    def start_workers(self) -> bool:
        """Start workers that stay from one epoch to the next, if the loader has them; return whether it has.

        Only the first iterator of such a loader draws a random number, for them.
        """
        is_persistent = bool(getattr(self._loader, "persistent_workers", False))
        if is_persistent and not self._takes_state():
            self.start()
        return is_persistent

    def start(self) -> Iterator[Any]:
        """Make an iterator of the user's loader: a DataLoader draws a random number for it, and starts its workers."""
        return iter(self._loader)

    def _takes_state(self) -> bool:
        """Whether the loader's next iterator takes a state of its own."""
        return False

    def _start_epoch(self) -> Iterator[Any]:
        state = self._state
        if self._is_first:
            state.had_iterator, state.loader, state.num_read = state.loader is self._loader, self._loader, 0
            state.epoch_random = random_state(self._loader)
        return self.start()

    def _start_epoch_again(self, resume: Position) -> tuple[Iterator[Any], RandomState]:
        """An iterator as at the start of the epoch, and the random numbers after it was made."""
        set_random_state(resume.epoch_random, self._loader)
        iterator = self._start_epoch()
        self._state.had_iterator = resume.had_iterator
        return iterator, random_state(self._loader)

    def _rest(self, resume: Position) -> Iterator[Any]:
        """The rest of an epoch, whose loader Lightning starts after the hooks of its start, and in epoch 0 before."""
        return self._resumed(resume, None if resume.had_iterator else self._start_epoch_again(resume))

    def _resumed(self, resume: Position, started: tuple[Iterator[Any], RandomState] | None) -> Iterator[Any]:
        """The rest of an epoch, from an iterator of the loader or from one that is made after the hooks."""
        state, state.resume, state.hooks_random = self._state, None, resume.hooks_random
        if resume.hooks_random:
            set_random_state(resume.hooks_random, self._loader)
        state.call_epoch_start_hooks()
        iterator, drawn = started or self._start_epoch_again(resume)
        state.first_random = resume.first_random or drawn  # hooks may have drawn other numbers since
        set_random_state(state.first_random, self._loader)
        ahead = self._read_again(iterator, resume)
        set_random_state(resume.random, self._loader)
        state.num_read = resume.num_read
        yield from ahead
        yield from self._read(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """A whole epoch; the rest of one if the position has been restored since, as with shared weights."""
        resume = self._state.resume if self._is_first else None
        if resume is not None and resume.num_trained:
            yield from self._rest(resume)
            return
        if self._is_first:
            self._state.first_random = random_state(self._loader)
        yield from self._read(iterator)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        state = self._state
        while True:
            self._note_place()
            with state.stopwatch.during("data_wait"):
                batch = next(iterator, state)  # the state is no batch
            if batch is state:
                return
            state.num_read += self._is_first
            yield batch

    def _read_again(self, iterator: Iterator[Any], resume: Position) -> list[Any]:
        """Skip what was trained of the epoch; the batches that were read ahead, with the random numbers of then."""
        for _ in islice(iterator, self._num_to_skip(resume)):
            pass
        num_ahead, random = resume.num_read - resume.num_trained, resume.last_read_random
        if num_ahead and random:  # none in checkpoints of earlier versions
            set_random_state(random, self._loader)
        self._state.last_read_random = random
        return list(islice(iterator, num_ahead))

    def _num_to_skip(self, resume: Position) -> int:
        """Batches that the loader gives again, though they were trained."""
        return resume.num_trained

    @property
    def _is_ahead(self) -> bool:
        """Whether a batch was read whose training has not started."""
        return self._state.num_read > self._state.num_started()

    def _note_place(self) -> None:
        """Called before a batch is read."""
        if self._is_ahead:
            self._state.last_read_random = random_state(self._loader)


class StartEpoch(Callback):
    """Starts the epochs of the feeds; it has to be the first callback, so that no hook has drawn before."""

    def __init__(self, state: FeedState) -> None:
        self._state = state

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._state.start_epoch()


class StatefulFeed(Feed):
    """The same for a loader with a state of its own, such as torchdata's StatefulDataLoader.

    Where Lightning has read a batch ahead, the state is that before this batch, which is read again after a resume.
    """

    __slots__ = ("_before",)

    def __init__(self, state: FeedState, loader: Any) -> None:
        super().__init__(state, loader)
        self._before: dict[str, Any] | None = None
        """The loader's state before it was read ahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batches that Lightning has handed out."""
        if self._before is not None and self._is_ahead:
            return self._before
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it inside an epoch. At the end of one, the loader would give an epoch without batches."""
        resume = self._state.resume
        if resume is None or resume.num_trained:
            self._loader.load_state_dict(state_dict)
            self._before = state_dict

    def _takes_state(self) -> bool:
        return self._before is not None

    def _num_to_skip(self, resume: Position) -> int:
        return 0

    def _note_place(self) -> None:
        super()._note_place()
        self._before = deepcopy(self._loader.state_dict()) if self._is_ahead else None  # it may be the loader's own


def feed(state: FeedState, loader: Any) -> Any:
    """The feed of a training loader; other loaders stay as they are."""
    if not state.is_training():
        return loader
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulFeed if has_state else Feed)(state, loader)


class _Fed(Strategy):
    """A strategy that wraps each loader, as in a `Feed`, and names a batch that cannot be moved."""

    def __init__(self, wrap: Wrap, **settings: Any) -> None:
        super().__init__(**settings)
        self._wrap = wrap

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._wrap(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        try:
            return super().batch_to_device(batch, device, dataloader_idx)
        except Exception as error:
            kind, place = type(batch).__name__, device or self.root_device
            raise InputError(
                f"a batch of type {kind} cannot be moved to {place} ({type(error).__name__}: {one_line(error)})",
                hint="define transfer_batch_to_device in your LightningDataModule or LightningModule",
            ) from error


class FedDevice(_Fed, SingleDeviceStrategy):
    """Lightning's strategy of one device."""


class FedGroup(_Fed, DDPStrategy):
    """Lightning's DDP."""


class FedShards(_Fed, ModelParallelStrategy):
    """Lightning's FSDP2 over all ranks, whose checkpoints are those of one device.

    A module that shards itself in `configure_model` stays as it is. Of others the ranks share each large block, and the
    rest together.
    """

    def __init__(self, wrap: Wrap, num_ranks: int) -> None:
        super().__init__(wrap, data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise InputError(
                "execution.strategy=fsdp cannot be used with manual optimization: weights are shared for a whole step",
                hint="use execution.strategy=ddp",
            )
        if self._layer_sync is not None:
            raise InputError(
                "trainer.sync_batchnorm=true cannot be used with execution.strategy=fsdp: Lightning ignores it there",
                hint="use execution.strategy=ddp",
                setting="trainer.sync_batchnorm",
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # its connector sets them
            if isinstance(callback, AVERAGES):
                raise InputError(NO_AVERAGES.format(type(callback).__name__))
        for name, weight in module.named_parameters():
            if not weight.dim():
                raise InputError(
                    f"the parameter {name} has no dimension, and execution.strategy=fsdp shares the rows of each one",
                    hint=f"give {name} the shape (1,), or use execution.strategy=ddp",
                )
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            self.model_to_device()
            for weights in (*module.parameters(), *module.buffers()):  # sharding copies none from rank 0
                distributed.broadcast(weights.detach(), src=0)
            shard_module(module, self.device_mesh["data_parallel"])
        adapt_reduction(module, self.device_mesh)
        if type(module).configure_model is LightningModule.configure_model:
            module.configure_model = _configured  # type: ignore[method-assign]  # Lightning requires one
        super().setup(trainer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, with parameters numbered as in the optimizer; Lightning takes the model's order.

        Other ranks return a state without use.
        """
        state = self._state_of(optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
        return state if self.global_rank else _renamed(state, range(len(_names(state))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read weights and optimizer states; Lightning cannot read one without values, as of SGD without momentum."""
        module, optimizers, self.optimizers = self.lightning_module, self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self.optimizers = optimizers
        assert module is not None
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=module.strict_loading)
        for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
            if state["state"]:
                named = _renamed(state, _names(self._state_of(optimizer)))
                set_optimizer_state_dict(module, optimizer, named, options=options)
            else:
                optimizer.load_state_dict(state)
        return checkpoint

    def _state_of(self, optimizer: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
        assert self.model is not None
        plain = getattr(optimizer, "_optimizer", optimizer)  # without Lightning's wrapper
        state: dict[str, Any] = get_optimizer_state_dict(self.model, plain, options=options)
        return state


def _names(state: Mapping[str, Any]) -> list[Any]:
    """Names or numbers of the parameters of an optimizer's state, in their order."""
    return [name for each in state["param_groups"] for name in each["params"]]


def _renamed(state: Mapping[str, Any], names: Sequence[Any]) -> dict[str, Any]:
    """An optimizer's state with other names of its parameters, in their order."""
    new = dict(zip(_names(state), names, strict=True))
    groups = [each | {"params": [new[name] for name in each["params"]]} for each in state["param_groups"]]
    return {"state": {new[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def _configured() -> None:
    """Stand in for `configure_model` of a module that is configured."""
