"""Public hooks of torch that follow a training loop: loaders, backward passes and updates of optimizers."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from paceline.tasks.train.lightning.random_state import RandomState, differ, random_state, set_random_state
from paceline.tasks.watch.account import DRAWS_RANDOM, SAMPLES_BY_CODE, Account
from paceline.tasks.watch.generators import Generators, runs_user_code

States = tuple[RandomState, list[Any]]

_followed: list[Account] = []
"""Hooks move the clock of the last one."""


class Batches:
    """An iterator over the batches of a loader, which moves the clock of an account.

    Errors of a batch that was read ahead are raised where the loop would have met them.
    """

    def __init__(self, loader: Any, iterator: Any, account: Account) -> None:
        self._loader, self._iterator, self._account = loader, iterator, account
        self._ahead: deque[tuple[Any, bool]] = deque()  # batches, and whether they were read before their step
        self._end: Exception | None = None
        self._num_read = self._num_given = 0
        self._generators: Generators | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> "Batches":
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        account = self._account
        is_first = self._num_given == 0
        reader = account.request(self._loader, self, is_first=is_first) if account.is_followed() else None
        is_step = reader == "step"
        if not self._ahead and self._end is None:
            num_ahead = account.num_ahead(self._num_read) if is_step else 0
            before = account.switch("data_wait" if self._num_read else "epoch_start") if reader else ""
            self._read(max(1, num_ahead), is_ahead=num_ahead > 0, is_probing=is_step and account.is_probing)
            if reader:
                account.switch(before)
            if num_ahead:
                account.start_step()
        if not self._ahead and (end := self._end) is not None:
            if is_step:
                account.note_loader_end()
            elif reader:
                account.leave_out()
            if not isinstance(end, StopIteration):
                self._end = None  # the loop may go on with the next batch
            raise end
        batch, was_ahead = self._ahead.popleft()
        if is_step:
            account.receive(batch, is_first=is_first, was_ahead=was_ahead)
        self._num_given += 1
        return batch

    def _read(self, number: int, *, is_ahead: bool, is_probing: bool) -> None:
        for place in range(number):
            is_early = place > 0  # its step has not come yet
            if place == 1 and runs_user_code(getattr(self._iterator, "_sampler_iter", self._iterator)):
                self._account.stop_replay(SAMPLES_BY_CODE)
                return
            before = self._states() if is_probing else None
            try:
                early = self._take_samples() if is_early and is_probing else None
                batch = next(self._iterator)
            except Exception as error:  # noqa: BLE001  raised when its batch is due
                self._end = error
                return
            is_drawn = before is not None and self._num_read > 0 and self._have_changed(before)
            if is_drawn:
                self._account.stop_replay(DRAWS_RANDOM)
            if is_drawn and early is not None:
                self._undo(*early)
                return
            self._ahead.append((batch, is_ahead))
            self._num_read += 1
            if is_drawn:
                return

    def _take_samples(self) -> tuple[Any, States] | None:
        """Take the samples of the next batch, and the states before they are read.

        None for other iterators than torch's own that reads in this process.
        """
        if not isinstance(self._iterator, _SingleProcessDataLoaderIter):
            return None
        samples = self._iterator._next_index()
        _let_read(self._iterator, samples)
        return samples, self._states()

    def _undo(self, samples: Any, before: States) -> None:
        """Let the same samples be read again when their batch is due, with the random numbers of then."""
        set_random_state(before[0], self._loader)
        self._found_generators().set_states(before[1])
        _let_read(self._iterator, samples)

    def _states(self) -> States:
        """States of the generators of this process, and of those of the user's that the loader may draw from."""
        return random_state(self._loader), self._found_generators().states()

    def _have_changed(self, before: States) -> bool:
        after = self._states()
        return before[1] != after[1] or differ(before[0], after[0])

    def _found_generators(self) -> Generators:
        if self._generators is None:
            self._generators = Generators(self._loader)
        return self._generators


def _let_read(iterator: Any, samples: Any) -> None:
    """Let an iterator of torch read these samples next, and take no others from its sampler."""

    def take() -> Any:
        del iterator._next_index  # the one of its class follows
        return samples

    iterator._next_index = take


@contextmanager
def follow(account: Account) -> Iterator[None]:
    """Let hooks move the clock of an account, until the end or until another account is followed."""
    with nullcontext() if _followed else _hooks():
        _followed.append(account)
        try:
            yield
        finally:
            _followed.remove(account)


@contextmanager
def _hooks() -> Iterator[None]:
    make_iterator, run_backward = DataLoader.__iter__, torch.autograd.backward

    @wraps(make_iterator)
    def iterate(self: Any) -> Any:
        return Batches(self, make_iterator(self), _followed[-1])

    @wraps(run_backward)
    def backward(*args: Any, **kwargs: Any) -> None:
        account = _followed[-1]
        if not account.is_followed():
            return run_backward(*args, **kwargs)
        account.start_backward()
        try:
            return run_backward(*args, **kwargs)
        finally:
            account.end_backward()

    def start_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _followed[-1].is_followed():
            _followed[-1].start_update()

    def end_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _followed[-1].is_followed():
            _followed[-1].end_update()

    handles = register_optimizer_step_pre_hook(start_update), register_optimizer_step_post_hook(end_update)
    _replace(iterate, backward)
    try:
        yield
    finally:
        _replace(make_iterator, run_backward)
        for handle in handles:
            handle.remove()


def _replace(iterate: Callable[..., Any], backward: Callable[..., None]) -> None:
    for owner, name, function in ((DataLoader, "__iter__", iterate), (torch.autograd, "backward", backward)):
        setattr(owner, name, function)
