"""The errors of Paceline.

    PacelineError
    ├── InputError      the input is wrong, nothing was started: exit status 2
    └── RunError        the run failed while running: exit status 1
        └── RankError   a training rank failed; carries the rank and its own traceback

A message is value + rule + fix, on one line.
"""


class PacelineError(Exception):
    """Root of all errors that Paceline raises on purpose."""


class InputError(PacelineError):
    """The input is wrong and nothing was started."""


class RunError(PacelineError):
    """The run failed after it had started."""


class RankError(RunError):
    """A rank failed; `rank_traceback` is its own traceback, `rank` its number (None when unknown)."""

    def __init__(self, message: str, rank: int | None = None, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback
