"""The clock of a training loop, which hooks move from part to part, and the order of its blocks.

A block of steps as the user wrote them is measured next to one whose batches were read before. That takes no further
step and no other order of the batches. A loader is read ahead only as long as that draws no random number in this
process, so that the losses stay the same bit for bit.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from paceline.conf.environment import Environment
from paceline.tasks.measure.paired_ratio import MIN_INTERVAL_ROUNDS, estimate_ratio, planned_looks
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.records.measurement import Validity
from paceline.tasks.train.lightning.random_state import differ, random_state, set_random_state
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.watch.flops import StepFlops
from paceline.tasks.watch.ranks import own_pids
from paceline.tasks.watch.records import PARTS, Blocks, Kind, Step

NUM_WARM_UP = 6  # counted steps before the first block
BLOCK_SECONDS = 0.1
"""Of a block. Shorter than a probe's, because a block takes the steps of a training, and many are short."""
MIN_BLOCK, MAX_BLOCK = 3, 50  # steps
MAX_ROUNDS = 24
TARGET_HALF_WIDTH = 0.02  # of the ratio, at which an attempt ends
MAX_AHEAD_BYTES = 2**28  # batches that are read ahead
UNCOUNTED = str, bytes, int, float, complex, type(None)
"""Types of the parts of a batch whose bytes are not counted, such as file names."""
SEVERAL_LOADERS = "a step takes batches of several loaders"
DRAWS_RANDOM = "the loader draws random numbers in the process of the training"
SAMPLES_BY_CODE = "the sampler runs code of its own for each batch"
PALINDROME: tuple[Kind, ...] = ("normal", "at_hand", "at_hand", "settle", "normal")

Role = Literal["step", "other"]
"""Role of a loader in a step: `step` for the one with which the step starts, `other` for further ones."""


class Account:
    """The account of one training loop; only the thread that made it is followed."""

    def __init__(
        self,
        *,
        why_not_measured: str = "",
        after_receive: str = "forward",
        is_training: Callable[[], bool] = lambda: True,
        num_ranks: int = 1,
    ) -> None:
        self.stopwatch = Stopwatch("outside")
        self.why_not_measured, self.is_training, self.num_ranks = why_not_measured, is_training, num_ranks
        site = Environment()
        self.environment = site.model_copy(update={"home": site.root})  # also once the script is in another directory
        self.num_steps, self.num_backward, self._num_samples, self._num_batches = 0, 0, 0, 0
        self.blocks = Blocks([], [])
        self.split: list[Step] = []  # on a GPU, steps that waited for it after each part
        self.validity = Validity()
        self.time_budget: dict[str, float] = {}  # once it is stopped
        self.flops: StepFlops | None = None
        self._after_receive = after_receive
        self._thread = threading.get_ident()
        self._loader: Any = None
        self._iterator: Callable[[], object] = lambda: None  # the one over the loader, while there is a reference to it
        self._trained: Any = None  # the loader of the newest step with a backward pass
        self._before: dict[str, float] | None = None  # the budget at the start of the open step
        self._has_backward = self._has_other = self._is_left_out = self._is_irregular = False
        self._has_ended = self._is_untrained = False  # the loader: whether a batch of it is still to be trained on
        self._in_update = self._syncs = self._is_done = False
        self._item_since = self._busy_since = self._idle = 0.0
        self._num_in_epoch, self._num_to_settle = 0, 1  # of the newest batch, from 0
        self._num_trained = 0  # steps of the epoch
        self._warm_up: list[Step] = []
        self._block: list[Step] = []
        self._order: tuple[Kind, ...] = ("normal",)
        self._place, self._num_in_block = 0, 0
        self._watch = ValidityWatch(own_pids())
        self._disturbed: tuple[Blocks, list[Step], Validity] | None = None  # the newest attempt on a busy machine

    def is_followed(self) -> bool:
        """Whether this is the thread of the training, in the training."""
        return threading.get_ident() == self._thread and self.is_training()

    def switch(self, item: str, *, relabel: str | None = None) -> str:
        """Start the clock of a part; the part that ends counts as `relabel`, where that is given."""
        if self._syncs:
            torch.cuda.synchronize()
        if relabel is not None:
            self.stopwatch.relabel(relabel)
        now, busy = time.monotonic(), time.thread_time()
        ended = self.stopwatch.switch(item)
        if ended in ("forward", "backward"):
            self._idle += max(0.0, now - self._item_since - (busy - self._busy_since))
        self._item_since, self._busy_since = now, busy
        return ended

    def request(self, loader: Any, iterator: object, *, is_first: bool) -> Role | None:
        """Note that the loop requests a batch of a loader, start a step if needed, and return the loader's role in it.

        `is_first` marks the first batch of an iterator. None: the batch belongs to no step, such as in a validation.
        """
        is_own, is_trained = loader is self._loader, self._before is not None and self._has_backward
        if not torch.is_grad_enabled():
            self._is_left_out |= is_trained  # a validation in the middle of a step
            return None
        is_over = self._has_ended or (self._num_in_epoch > 0 and self._iterator() is None)
        if is_trained and not is_own and is_over:
            self.leave()  # a loop over the loader has ended, or was left before that: no other one can continue it
            is_trained = False
        if is_trained and not is_own:
            self._has_other = True
            return "other"
        if self._before is None or is_trained or is_first or not is_own:
            self.leave(is_counted=True)
            self._is_untrained = self._has_ended = False
            self._loader, self._iterator = loader, weakref.ref(iterator)
            self.start_step()
        return "step"

    def start_step(self) -> None:
        """Start the time of a step: at the request, or when the batches of a block have been read."""
        self._before, self._idle = self.stopwatch.budget(), 0.0
        self._has_backward = self._has_other = self._is_left_out = False
        self._num_batches = self._num_samples = 0

    def note_loader_end(self) -> None:
        """End the open step: the loader has no more batches. A loop that reads ahead trains on the last one later."""
        self.leave()
        self._has_ended, self._is_untrained = True, self._num_trained <= self._num_in_epoch

    def leave_out(self) -> None:
        """Do not count the open step: another loader has ended in it."""
        self._is_left_out = True

    def num_ahead(self, num_read: int) -> int:
        """Number of batches to read before the step starts; 0 where it reads its own batch.

        A loader is not read to its end ahead: samplers may draw a random number there.
        """
        is_settled = self._loader is self._trained and self._num_in_epoch + 1 >= self._num_to_settle
        if self._is_done or self._kind != "at_hand" or not is_settled or self._num_batches:
            return 0
        number = int(min(self._find_length(self._loader) - num_read, self._num_in_block + 1 - len(self._block)))
        if number < 0:
            self.stop_replay("the loader has more batches than its length")
        return 0 if self.why_not_measured else number

    def receive(self, batch: Any, *, is_first: bool, was_ahead: bool) -> None:
        """Take note that a batch was handed to the loop, and whether it was read before the step."""
        self._num_in_epoch = 0 if is_first else self._num_in_epoch + 1
        self._num_trained = 0 if is_first else self._num_trained
        self._is_left_out |= was_ahead != (self._kind == "at_hand")
        self._num_batches += 1
        self._num_samples += num_samples_of(batch)
        is_split = self._kind == "normal" and not self._block and not self._is_done
        self._syncs = is_split and torch.cuda.is_initialized()
        if self.flops is None and len(self._warm_up) == NUM_WARM_UP // 2:
            self.flops = StepFlops.start()
        if len(self._warm_up) == NUM_WARM_UP - 1 and self._num_batches == 1:
            self._choose_order(self._loader, num_bytes_of(batch))
        self.switch(self._after_receive)

    def stop_replay(self, reason: str) -> None:
        """Read no further batch ahead, and measure again without that; a finished measurement stays."""
        if self._is_done:
            return
        self.why_not_measured = self.why_not_measured or reason
        if self._order != ("normal",):
            self._order, self._place, self._block = ("normal",), 0, []
            self.blocks, self.split = Blocks([], []), []

    def start_backward(self) -> None:
        """Start a backward pass. What came before it was its forward pass, also in the closure of an optimizer."""
        self.num_backward += 1
        if self._before is None and self._is_untrained:  # a loop that reads a batch ahead
            self.start_step()
            self._is_left_out, self._is_untrained = True, False
        if self._before is not None:
            if self._has_other:  # it is trained on, so that it is not a validation
                self.stop_replay(SEVERAL_LOADERS)
                self._has_other = False
            self._has_backward, self._trained = True, self._loader
            self.switch("backward", relabel="forward")

    def end_backward(self) -> None:
        """End a backward pass."""
        if self._before is not None:
            self.switch("optimizer" if self._in_update else "rest")

    def start_update(self) -> None:
        """Start an optimizer's step, which may call a closure with a forward and a backward pass."""
        self._in_update = True
        if self._before is not None:
            self.switch("optimizer")

    def end_update(self) -> None:
        """End an optimizer's step."""
        self._in_update = False
        if self._before is not None:
            self.switch("rest")

    def leave(self, item: str = "outside", *, is_counted: bool = False) -> None:
        """End the open step, if there is one, and start the clock of what follows."""
        if self._before is None:
            self.switch(item)
            return
        if self._has_backward:
            self._leave_out_irregular()
        num_done = len(self._block)
        if not self._is_done and num_done in (0, self._num_in_block) and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the first step of a block does not count, so that the others end it
        self.switch(item)
        self._syncs = False
        if self.flops is not None and self.flops.is_counting:
            self.flops.stop()
            self.flops = self.flops if self._has_backward else None
        budget = self.stopwatch.budget()
        parts = {part: budget.get(part, 0.0) - self._before.get(part, 0.0) for part in PARTS}
        step, self._before = Step(parts, self._idle, self._num_samples), None
        self.num_steps += self._has_backward
        self._num_trained += self._has_backward
        is_settled = self._num_in_epoch >= self._num_to_settle
        if is_counted and self._has_backward and not self._is_left_out and is_settled:
            self._count(step)

    def _leave_out_irregular(self) -> None:
        """Leave out a step that took more than one batch, unless the step before did so too: then the loop works so.

        A validation with gradients, and a batch that the loop skipped, are in single steps.
        """
        is_irregular, before = self._has_other or self._num_batches > 1, self._is_irregular
        self._is_irregular = is_irregular
        if is_irregular and before:
            self.stop_replay(SEVERAL_LOADERS if self._has_other else "a step takes several batches before it trains")
        elif is_irregular:
            self._is_left_out = True

    def stop(self) -> None:
        """End the account with the training."""
        self.leave()
        self.time_budget = self.stopwatch.budget()
        self.is_training = lambda: False
        if not self._is_done:
            self._is_done, self.validity = True, self._watch.stop()
            if self.num_rounds < MIN_INTERVAL_ROUNDS and self._disturbed is not None:
                self.blocks, self.split, self.validity = self._disturbed

    @property
    def num_rounds(self) -> int:
        """Complete pairs of blocks; blocks alone where batches at hand are not measured."""
        return min(len(self.blocks.normal), len(self.blocks.at_hand)) or len(self.blocks.normal)

    @property
    def is_probing(self) -> bool:
        """Whether reads are looked at for random numbers."""
        return not self._is_done and (len(self._warm_up) < NUM_WARM_UP or self._kind == "at_hand")

    @property
    def _kind(self) -> Kind:
        return self._order[self._place % len(self._order)]

    def _find_length(self, loader: Any) -> float:
        """Number of batches of a loader; infinite if it is unknown.

        A batch sampler may draw random numbers to find it. They are restored, and no batch is read ahead any more.
        """
        if isinstance(loader.dataset, IterableDataset):
            return math.inf  # torch would warn if the stream has more batches than its length, once that was asked for
        before, length = random_state(loader), math.inf
        with suppress(Exception):  # a sampler may have no length
            length = len(loader)
        if differ(before, random_state(loader)):
            set_random_state(before, loader)
            self.stop_replay(DRAWS_RANDOM)
        return length

    def _choose_order(self, loader: Any, num_bytes: int | None) -> None:
        """Choose the length of blocks, and whether batches can be read ahead."""
        seconds = sorted(step.seconds for step in self._warm_up)[len(self._warm_up) // 2]
        number = min(MAX_BLOCK, max(MIN_BLOCK, math.ceil(BLOCK_SECONDS / seconds)))
        affordable = MAX_AHEAD_BYTES // max(1, num_bytes or 0) - 1  # the first step of a block does not count
        self._num_in_block = max(MIN_BLOCK, min(number, affordable))
        is_stream = isinstance(loader.dataset, IterableDataset)
        if num_bytes is None:
            self.stop_replay("the size of a batch is unknown")
        elif affordable < MIN_BLOCK:
            self.stop_replay(f"a batch takes {num_bytes / 2**20:,.0f} MiB")
        if is_stream and not loader.num_workers:
            self.stop_replay("the data set is a stream of the training's own process")
        ready = 1 + loader.num_workers * (loader.prefetch_factor or 0)  # batches that workers may have ready
        self._num_to_settle = int(min(ready, max(1, self._find_length(loader) / 2))) if ready > 1 else 1
        self._order = ("normal",) if self.why_not_measured else PALINDROME
        self._watch = ValidityWatch(own_pids())

    def _count(self, step: Step) -> None:
        if len(self._warm_up) < NUM_WARM_UP:
            self._warm_up.append(step)
            return
        if self._is_done:
            return
        self._block.append(step)
        kind = self._kind
        if kind == "settle" and len(self._block) >= self._num_to_settle:
            self._place, self._block = self._place + 1, []
        elif kind != "settle" and len(self._block) > self._num_in_block:
            if kind == "normal" and torch.cuda.is_initialized():
                self.split.append(self._block[0])
            (self.blocks.normal if kind == "normal" else self.blocks.at_hand).append(self._block[1:])
            self._place, self._block = self._place + 1, []
            self._look()

    def _look(self) -> None:
        """End the attempt where its interval is narrow or its rounds are done; on a busy machine start another one."""
        number, looks = self.num_rounds, planned_looks(MAX_ROUNDS)
        is_pair = self._order == ("normal",) or len(self.blocks.normal) == len(self.blocks.at_hand)
        if not is_pair or number not in looks:
            return
        ratio = estimate_ratio(self.blocks.log_ratios())
        is_narrow = ratio is not None and (ratio.half_width or math.inf) <= TARGET_HALF_WIDTH
        if number < MAX_ROUNDS and not is_narrow:
            return
        self.validity = self._watch.stop()
        self._is_done = not self.validity.contaminated
        if not self._is_done:  # the rule looks at the machine alone
            self._disturbed = self.blocks, self.split, self.validity
            self.blocks, self.split, self._place = Blocks([], []), [], 0
            self._watch = ValidityWatch(own_pids())


def num_samples_of(batch: Any) -> int:
    """Number of samples of a batch: the first size of its first tensor; 0 if it is unknown, as of a nested tensor."""
    with suppress(Exception):
        sized = (value for value in _leaves(batch) if isinstance(value, torch.Tensor) and value.ndim)
        return int(next(sized).shape[0])
    return 0


def num_bytes_of(batch: Any) -> int | None:
    """Bytes of the tensors and arrays of a batch; None if a part has no `nbytes`, such as a sparse tensor."""
    with suppress(Exception):
        return sum(0 if isinstance(value, UNCOUNTED) else int(value.nbytes) for value in _leaves(batch))
    return None


def _leaves(batch: Any) -> Iterator[Any]:
    """What a batch consists of, which may be nested."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch
