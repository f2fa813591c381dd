"""The error that a failed group of ranks reports, of those that its ranks have."""

import pytest

from paceline.tasks.train.launch.rank_group import name_cause
from paceline.tasks.train.launch.supervisor import RankOutcome

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:4242"


def failed(rank, error, at):
    return RankOutcome(
        rank=rank, is_first=rank == 0, result=None, error=error, traceback="", failed_at=at, wall_seconds=1.0
    )


def test_the_cause_is_reported_although_its_consequence_came_first():
    error = name_cause([failed(0, CLOSED, 1.0), failed(1, "ValueError: no such table", 2.0)], 3)
    assert (str(error), error.rank) == ("rank 1 failed: ValueError: no such table", 1)


@pytest.mark.parametrize("others", [[], [failed(2, "RuntimeError: Socket closed", 2.0)]])
def test_a_consequence_without_its_cause_is_not_reported_as_the_cause(others):
    error = name_cause([failed(0, CLOSED, 1.0), *others], 3)
    assert str(error) == (
        f"rank 0 failed: {CLOSED}; this may be a consequence of another rank's end, and no rank reports why that ended"
    )


def test_the_only_rank_has_no_other_that_could_be_the_cause():
    assert str(name_cause([failed(0, "TimeoutError: timed out", 1.0)], 1)) == "rank 0 failed: TimeoutError: timed out"
