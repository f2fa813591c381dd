"""The errors of Paceline.

    PacelineError
    ├── InputError      the input is wrong, nothing was started: exit status 2
    │   └── SourceError      it names something that cannot be reached now; a later try may help
    └── RunError        the run failed while running: exit status 1
        ├── OutsideError     a file system, a server or the cluster failed its work; a later try may help
        ├── TimeLimitError   a stage took longer than its limit
        ├── StoppedError     the caller cancelled it
        ├── MemoryLimitError a pass of a training step needs more memory than its device has
        ├── MeasureMemoryError so does what is timed before a training, which may fit all the same
        ├── CaptureError     a training step cannot be recorded as a CUDA graph; the process is unusable
        ├── RankError        a training rank failed; carries the rank and its own traceback
        ├── SupersededError  another process has started a newer attempt at the same training
        ├── LostError        a rank, worker, host or the scheduler has gone; a restart may help
        └── RegressionError  the run finished, got worse than the runs before it, and `track.on_regression` is fail

A message is one line: the fault with the value as typed. `hint` is one action that can be pasted; where it is not
given, it is the part of the message behind the last semicolon. `paceline.flows.cli` prints them as two lines.
"""

from collections.abc import Iterator
from typing import Any

from paceline.conf.hints import HintedError


def is_transient(error: object) -> bool:
    """Whether a stage that failed by this error may succeed if it is tried again."""
    return isinstance(error, (SourceError, OutsideError))


def one_line(error: BaseException) -> str:
    """What an error of others says, on one line; its type where it says nothing."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"not enough memory: {text}" if text else "not enough memory"
    return text or type(error).__name__


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or during, each once."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class PacelineError(HintedError):
    """Root of all errors that Paceline raises on purpose."""


class InputError(PacelineError):
    """The input is wrong and nothing was started."""


class SourceError(InputError):
    """The input names something that is there, or not, and cannot be reached now."""


class RunError(PacelineError):
    """The run failed after it had started."""


class OutsideError(RunError):
    """Something outside of this process failed the work: a file system, a server, the cluster."""


class TimeLimitError(RunError):
    """A stage took longer than `limits` allows; all that it had started has been ended, what it finished is kept."""


class StoppedError(RunError):
    """Whoever had asked for the work wants it no more, as of a sweep's trial that is pruned; it has been ended."""


class MemoryLimitError(RunError):
    """A pass of a training step over `num_samples` samples needs more memory than its device has."""

    def __init__(self, message: str, num_samples: int) -> None:
        super().__init__(message)
        self.num_samples = num_samples


class MeasureMemoryError(RunError):
    """What comes before a training's first step needs more memory than a device has left.

    `stage` is `search`, `probe` or `loading`, None where that is not known yet; `arm` is the label of the arm that does
    not fit, None where it is none.
    """

    def __init__(self, message: str, stage: str | None = None, arm: str | None = None) -> None:
        super().__init__(message)
        self.stage, self.arm = stage, arm


class CaptureError(RunError):
    """Recording a step as a CUDA graph failed, after which CUDA may refuse all further work of the process."""


class RankError(RunError):
    """A rank failed; `rank_traceback` is its own traceback, `rank` its number (None when unknown).

    `final`: it said so itself, as when the loss is no longer finite, and would say so again. `too_many`: the samples of
    a pass that its device had no memory for, where that is why. `oom_stage`: what there was no memory for before the
    training, with `oom_arm`, as in `MeasureMemoryError`. `failed_capture`: why a step could not be a CUDA graph.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        rank_traceback: str = "",
        *,
        final: bool = False,
        too_many: int | None = None,
        oom_stage: str | None = None,
        oom_arm: str | None = None,
        failed_capture: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.rank_traceback, self.final, self.too_many = rank, rank_traceback, final, too_many
        self.oom_stage, self.oom_arm, self.failed_capture = oom_stage, oom_arm, failed_capture


class LostError(RunError):
    """A rank, worker, host or the scheduler has gone, or is silent; what was trained is in the checkpoints.

    `final`: it was given time to come back.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class SupersededError(RunError):
    """Another process has started a newer attempt at the training; this one must publish nothing any more."""


class RegressionError(RunError):
    """The run is done and recorded, and worse than those before it; `summary` is what it would have said."""

    def __init__(self, message: str, summary: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.summary = summary or {}
