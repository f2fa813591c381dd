"""Records of the account of a training loop in the user's own process."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from paceline.tasks.measure.paired_ratio import Floats, Interval
from paceline.tasks.records.measurement import Validity
from paceline.tasks.records.record import Record

PARTS = ("data_wait", "transfer", "forward", "backward", "optimizer", "rest")
"""Items of the time budget that a step consists of. `rest`: the user's own code, loggers and callbacks."""
Kind = Literal["normal", "at_hand", "settle"]
"""A step as the user wrote it, with its batch read before, and one that does not count."""
StepCause = Literal[
    "data-bound",
    "transfer-bound",
    "wait-bound",
    "update-bound",
    "loop-bound",
    "launch-bound",
    "compute-bound",
    "undecided",
    "too few steps",
    "contaminated machine",
]


class Step(NamedTuple):
    """Seconds of the parts of a step, and those of forward and backward in which its thread did not run."""

    parts: dict[str, float]
    idle: float
    num_samples: int  # 0 where the batch shows no size

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return sum(self.parts.values())


class Blocks(NamedTuple):
    """Steps of one attempt; on the same place of both lists are neighbours in time."""

    normal: list[list[Step]]
    at_hand: list[list[Step]]

    def log_ratios(self) -> Floats:
        """Of the pairs: throughput with batches at hand over that of the steps as they are."""
        pairs = zip(self.normal, self.at_hand, strict=False)
        return np.log([seconds_of(normal) / seconds_of(at_hand) for normal, at_hand in pairs])


def seconds_of(block: Sequence[Step]) -> float:
    """Mean seconds of the steps of a block."""
    return sum(step.seconds for step in block) / len(block)


class WatchResult(Record):
    """Account of a training loop."""

    name: str  # of the script, or of the LightningModule
    device: str
    num_steps: int  # with a backward pass
    num_measured: int  # steps as the user wrote them in the blocks that the figures come from
    step_seconds: float
    parts: dict[str, float]  # seconds of a step by `PARTS`; they add up to `step_seconds`
    samples_per_second: float | None  # over all ranks, if their batches are alike; None where batches show no size
    shares: dict[str, Interval]
    """Of a step: `input`, `transfer`, `wait` (in forward and backward, the thread does not run), `update`, `loop` and
    `compute`, the remainder."""
    cause: StepCause
    verdict: str
    next_step: str  # what to do about the cause
    gain: Interval | None  # factor of the throughput without the cause
    gain_source: Literal["measured", "computed", "at most"] | None
    """`measured`: the same loop with its batches read before. `computed`: from the wait in the same thread. `at most`:
    from the share of the cause, as if nothing were left of it."""
    why_not_measured: str = ""  # why no batches were read ahead; empty where they were
    num_rounds: int  # blocks of steps as they are, each next to one with batches at hand where that was measured
    precision: str = ""
    flops_per_second: float | None = None
    of_limit: float | None = None  # share of the device's rate of a matrix product
    why_no_share: str = ""
    time_budget: dict[str, float]  # seconds of all items, from the start of the training to its end
    validity: Validity
