"""Times of the single steps of a probe: the raw data behind its blocks."""

import hashlib
import io
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tasks.files import write_durably

MAX_STEPS = 1_000_000  # most steps in a file. Later blocks are counted and left out


class StepTimes:
    """Seconds of each step, by blocks in the order in which they ran."""

    def __init__(self) -> None:
        self._seconds = array("d")
        # Arm, attempt, Unix time of the start, number of steps, round, and position in it.
        self._blocks: list[tuple[str, int, float, int, int, int]] = []
        self._attempt = self._round = self._position = -1
        self._num_left_out = 0

    def start_attempt(self) -> None:
        """Start the rounds again."""
        self._attempt, self._round = self._attempt + 1, -1

    def start_round(self) -> None:
        """Start a round, of all arms or of those that are left."""
        self._round, self._position = self._round + 1, -1

    def add(self, arm: str, started: float, seconds: Sequence[float]) -> None:
        """Add a block that started at a Unix time. On a GPU each step of a block has their mean."""
        if self._num_left_out or len(self._seconds) + len(seconds) > MAX_STEPS:
            self._num_left_out += len(seconds)
            return
        self._seconds.extend(seconds)
        self._position += 1
        self._blocks.append((arm, self._attempt, started, len(seconds), self._round, self._position))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """A row for each step, its arm as a position in `arms`; and the number of steps that were left out."""
        arms = list(dict.fromkeys(block[0] for block in self._blocks))
        arm = np.array([arms.index(block[0]) for block in self._blocks], dtype=np.int8)
        columns = (np.array([block[at] for block in self._blocks], dtype=np.int32) for at in (1, 3, 4, 5))
        attempt, num_steps, number, position = columns
        block = np.repeat(np.arange(arm.size), num_steps)
        step = np.arange(block.size) - (np.cumsum(num_steps) - num_steps)[block]
        started, seconds = np.array([each[2] for each in self._blocks]), np.array(self._seconds)
        before = np.cumsum(seconds) - seconds
        return {
            "arms": np.array(arms, dtype=np.str_),
            "arm": arm[block],
            "attempt": attempt[block],
            "round": number[block],
            "position": position.astype(np.int8)[block],
            "step": step.astype(np.int32),
            "started": started[block] + before - before[np.arange(step.size) - step],
            "seconds": seconds,
            "num_left_out": np.array(self._num_left_out),
        }

    def write(self, path: Path) -> str:
        """Write the columns as .npz; return the file's SHA-256."""
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **self.columns())
        write_durably(path, content.getvalue())
        return hashlib.sha256(content.getvalue()).hexdigest()
