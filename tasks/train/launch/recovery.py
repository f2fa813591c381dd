"""Decides whether a failed group of ranks restarts from the newest checkpoint, or the training fails.

Restarts with progress in between are not limited. Without progress, `execution.max_restarts` limits them, and an error
that a rank raised twice at the same step ends the training.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.tasks import deadline
from paceline.tasks.errors import InputError, LostError, RankError
from paceline.tasks.records.training import Restart
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of

logger = logging.getLogger(__name__)

REJOIN_SECONDS = 10.0  # time for a lost worker to come back before the group restarts with fewer ranks, where it may
WAIT_SECONDS = 90.0  # time for a lost worker, host or scheduler to come back
RETRY_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    at: float
    cause: str
    rank: int | None
    num_ranks: int
    steps_done: int


class Recovery:
    """The restarts of one training."""

    def __init__(self, checkpoints: Path, max_restarts: int) -> None:
        self._checkpoints = checkpoints
        self._max_restarts = max_restarts
        self._failure: _Failure | None = None
        """The first failure since the last start."""
        self._last_end: float | None = None
        self._restarts: list[Restart] = []
        self._num_fruitless = 0
        newest = newest_valid_checkpoint(checkpoints)
        self._first_step = step_of(newest) if newest else 0
        """Step up to which there was progress."""
        self._last_message = ""
        self._starts: list[float] = []

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """All restarts, the oldest first."""
        return tuple(self._restarts)

    @property
    def lost_seconds(self) -> float:
        """Seconds from the first start of the ranks to the last one."""
        return self._starts[-1] - self._starts[0] if self._starts else 0.0

    def wait_for_cluster(self, find: Callable[[], T]) -> T:
        """Return what `find` returns; after a failure, retry it for `WAIT_SECONDS` until the cluster is back.

        Raises:
            InputError: on the first attempt, what `find` raises.
            LostError: the cluster did not come back.
        """
        give_up = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return find()
            except (InputError, OSError, TimeoutError) as error:
                if self._last_end is None:
                    raise
                if time.monotonic() > give_up:
                    cause = self._failure.cause if self._failure else "the group was stopped"
                    raise LostError(
                        f"{cause}; and within {WAIT_SECONDS:.0f} s the cluster did not come back: {error}", final=True
                    ) from error
                deadline.check()
                time.sleep(RETRY_SECONDS)

    def record_start(self, first_step: int) -> None:
        """Record that the ranks start from a step."""
        self._starts.append(time.monotonic())
        self._first_step = first_step
        if self._failure is None:
            return
        restart = Restart(
            cause=self._failure.cause,
            rank=self._failure.rank,
            num_ranks=self._failure.num_ranks,
            first_step=first_step,
            lost_steps=max(0, self._failure.steps_done - first_step),
            seconds=time.monotonic() - self._failure.at,
        )
        self._failure = None
        self._restarts.append(restart)
        logger.warning("Resuming from step %d; %d steps are repeated", first_step, restart.lost_steps)

    def judge(self, error: RankError | LostError, num_ranks: int, steps_done: int) -> None:
        """Return if the group may restart, else raise `error`."""
        reached = newest_valid_checkpoint(self._checkpoints)
        step = step_of(reached) if reached else 0
        self._num_fruitless = 0 if step > self._first_step else self._num_fruitless + 1
        self._first_step = max(self._first_step, step)
        message = str(error)
        is_repeated = isinstance(error, RankError) and message == self._last_message and self._num_fruitless > 1
        self._last_message = message
        if error.final or is_repeated or self._num_fruitless > self._max_restarts:
            raise error
        rank = error.rank if isinstance(error, RankError) else None
        self._record_failure(_Failure(time.monotonic(), message, rank, num_ranks, steps_done))
        logger.warning("%s; restarting the group", message)
        time.sleep(RETRY_SECONDS)

    def restart_with_new_group(self, cause: str, num_ranks: int, steps_done: int) -> None:
        """Record that the group was stopped on purpose, to restart on other workers."""
        self._record_failure(_Failure(time.monotonic(), cause, None, num_ranks, steps_done))
        logger.warning("%s; restarting the group", cause)

    def waits_for_all(self) -> bool:
        """Whether lost workers still have time to come back before the group restarts without them."""
        return self._last_end is not None and time.monotonic() - self._last_end < REJOIN_SECONDS

    def _record_failure(self, failure: _Failure) -> None:
        self._last_end = failure.at
        self._failure = self._failure or failure
