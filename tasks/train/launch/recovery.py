"""When a group of ranks is begun again after a failure, and when it is given up.

A restart goes on from the newest checkpoint, so each one that brought the training forward is worth its price. Without
progress only so many are made, and an error that a rank raised twice at the same step is not tried a third time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.tasks import deadline
from paceline.tasks.errors import InputError, LostError, RankError
from paceline.tasks.records import Restart
from paceline.tasks.train.rank.checkpoint import newest_verified, step_of

logger = logging.getLogger(__name__)

REJOIN_SECONDS = 10.0
"""For a lost worker to come back before the group goes on with fewer, where it may."""
WAIT_SECONDS = 90.0
"""For a lost worker, host or scheduler to come back."""
RETRY_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class _Ended:
    """How the last attempt ended."""

    at: float
    cause: str
    rank: int | None
    num_ranks: int
    steps_done: int


class Recovery:
    """The restarts of one training.

    Args:
        checkpoints: directory of its checkpoints.
        max_restarts: without progress between them.
    """

    def __init__(self, checkpoints: Path, max_restarts: int) -> None:
        self._checkpoints = checkpoints
        self._max_restarts = max_restarts
        self._ended: _Ended | None = None
        """What the next start of the ranks makes up for; the first failure since the last start."""
        self._last_end: float | None = None
        self._restarts: list[Restart] = []
        self._num_fruitless = 0
        newest = newest_verified(checkpoints)
        self._first_step = step_of(newest) if newest else 0
        """Up to where there was progress."""
        self._last_message = ""
        self._begun: list[float] = []

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """Those made, the oldest first."""
        return tuple(self._restarts)

    @property
    def lost_seconds(self) -> float:
        """From the first start of the ranks to the last one."""
        return self._begun[-1] - self._begun[0] if self._begun else 0.0

    def wait_for_cluster(self, find: Callable[[], T]) -> T:
        """What `find` returns; after a failure it is tried for `WAIT_SECONDS`, until the cluster is there again.

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
                    cause = self._ended.cause if self._ended else "the group was ended"
                    raise LostError(
                        f"{cause}; and within {WAIT_SECONDS:.0f} s the cluster did not come back: {error}",
                        final=True,
                    ) from error
                deadline.check()
                time.sleep(RETRY_SECONDS)

    def begun(self, first_step: int) -> None:
        """The ranks have been told to start from a step."""
        self._begun.append(time.monotonic())
        self._first_step = first_step
        if self._ended is None:
            return
        restart = Restart(
            cause=self._ended.cause,
            rank=self._ended.rank,
            num_ranks=self._ended.num_ranks,
            first_step=first_step,
            lost_steps=max(0, self._ended.steps_done - first_step),
            seconds=time.monotonic() - self._ended.at,
        )
        self._ended = None
        self._restarts.append(restart)
        logger.warning("Resuming from step %d; %d steps are repeated", first_step, restart.lost_steps)

    def judge(self, error: RankError | LostError, num_ranks: int, steps_done: int) -> None:
        """Return if the group is to be begun again.

        Args:
            error: what ended it.
            num_ranks: that it had; 0 if it was not even seated.
            steps_done: by the furthest rank, counted from the training's first step.

        Raises:
            RankError: given, and it is to be given up.
            LostError: likewise.
        """
        reached = newest_verified(self._checkpoints)
        step = step_of(reached) if reached else 0
        self._num_fruitless = 0 if step > self._first_step else self._num_fruitless + 1
        self._first_step = max(self._first_step, step)
        said = str(error)
        again = isinstance(error, RankError) and said == self._last_message and self._num_fruitless > 1
        self._last_message = said
        if error.final or again or self._num_fruitless > self._max_restarts:
            raise error
        rank = error.rank if isinstance(error, RankError) else None
        self._end(_Ended(time.monotonic(), said, rank, num_ranks, steps_done))
        logger.warning("%s; restarting the group", said)
        time.sleep(RETRY_SECONDS)

    def restart_with_new_group(self, cause: str, num_ranks: int, steps_done: int) -> None:
        """The group has been ended on purpose, to be begun again on other workers."""
        self._end(_Ended(time.monotonic(), cause, None, num_ranks, steps_done))
        logger.warning("%s; restarting the group", cause)

    def waits_for_all(self) -> bool:
        """Whether lost workers are still given time to come back, before the group goes on without them."""
        return self._last_end is not None and time.monotonic() - self._last_end < REJOIN_SECONDS

    def _end(self, ended: _Ended) -> None:
        self._last_end = ended.at
        self._ended = self._ended or ended
