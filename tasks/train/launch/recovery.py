"""Decides whether a failed group of ranks restarts from the newest checkpoint, or the training fails.

Restarts with progress in between are not limited. Without progress, `execution.max_restarts` limits them, and an error
that a rank raised twice at the same step ends the training.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        self._checkpoints, self._max_restarts = checkpoints, max_restarts
        self._failure: _Failure | None = None  # the first failure since the last start
        self._last_end: float | None = None
        self.restarts: list[Restart] = []  # all restarts, the oldest first
        self._num_fruitless = 0
        self._first_step = step_of(newest) if (newest := newest_valid_checkpoint(checkpoints)) else 0
        """Step up to which there was progress."""
        self._last_message = ""
        self._starts: list[float] = []
        self._wait_seconds = 0.0  # since the failure, while the cluster was not complete or did not answer

    @property
    def lost_seconds(self) -> float:
        """Seconds from the first start of the ranks to the last one."""
        return self._starts[-1] - self._starts[0] if self._starts else 0.0

    def wait_for_cluster(self, find: Callable[[], T]) -> T:
        """Return what `find` returns; after a failure, retry it for `WAIT_SECONDS` until the cluster is back.

        Raises LostError: the cluster did not come back; before any failure, what `find` raises.
        """
        began, before = time.monotonic(), self._wait_seconds
        give_up = began + WAIT_SECONDS
        while True:
            try:
                return find()
            except (InputError, OSError, TimeoutError) as error:
                if self._last_end is None:
                    raise
                if time.monotonic() > give_up:
                    cause = self._failure.cause if self._failure else "the group was stopped"
                    lost = f"within {WAIT_SECONDS:.0f} s the cluster did not come back: {error}"
                    raise LostError(f"{cause}; and {lost}", final=True) from error
                deadline.check()
                time.sleep(RETRY_SECONDS)
                self._wait_seconds = before + time.monotonic() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body, in `wait_for_cluster`, as a wait for the cluster: for a scheduler that does not answer."""
        began = time.monotonic()
        yield
        self._wait_seconds += time.monotonic() - began

    def record_start(self, first_step: int) -> None:
        """Record that the ranks start from a step."""
        self._starts.append(time.monotonic())
        self._first_step = first_step
        failure, self._failure = self._failure, None
        wait_seconds, self._wait_seconds = self._wait_seconds, 0.0
        if failure is None:
            return
        restart = Restart(
            cause=failure.cause,
            rank=failure.rank,
            num_ranks=failure.num_ranks,
            first_step=first_step,
            lost_steps=max(0, failure.steps_done - first_step),
            seconds=time.monotonic() - failure.at,
            wait_seconds=wait_seconds,
        )
        self.restarts.append(restart)
        waited = f" ({wait_seconds:.1f} s of them waiting for the cluster)" if wait_seconds else ""
        text = "Resuming from step %d %.1f s after the failure%s; at least %d steps are repeated"
        logger.warning(text, first_step, restart.seconds, waited, restart.lost_steps)

    def judge(
        self, error: RankError | LostError, num_ranks: int, steps_done: int, failed_at: float | None = None
    ) -> None:
        """Return if the group may restart, else raise `error`; arguments as for `restart`.

        Returns after a pause where an immediate restart would probably fail as well: without progress.
        """
        step = step_of(newest) if (newest := newest_valid_checkpoint(self._checkpoints)) else 0
        self._num_fruitless = 0 if step > self._first_step else self._num_fruitless + 1
        self._first_step = max(self._first_step, step)
        message = str(error)
        is_repeated = isinstance(error, RankError) and message == self._last_message and self._num_fruitless > 1
        self._last_message = message
        if error.final or is_repeated or self._num_fruitless > self._max_restarts:
            raise error
        rank = error.rank if isinstance(error, RankError) else None
        self.restart(error, num_ranks, steps_done, failed_at, rank)
        if self._num_fruitless:
            time.sleep(RETRY_SECONDS)

    def restart(
        self,
        cause: Exception,
        num_ranks: int,
        steps_done: int,
        failed_at: float | None = None,
        rank: int | None = None,
    ) -> None:
        """Record that the group restarts, on purpose or after a failure noticed at a monotonic time; None for now."""
        self._last_end = time.monotonic()
        self._failure = self._failure or _Failure(failed_at or self._last_end, str(cause), rank, num_ranks, steps_done)
        logger.warning("%s; restarting the group", cause)

    def waits_for_all(self) -> bool:
        """Whether lost workers still have time to come back before the group restarts without them."""
        return self._last_end is not None and time.monotonic() - self._last_end < REJOIN_SECONDS
