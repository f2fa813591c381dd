"""Short blocks, and a time that tests plan."""

import pytest

from paceline.tasks.train.rank import time_budget
from paceline.tasks.watch import account as module
from tests.support.watched_loops import CLOCK


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(module, "TARGET_HALF_WIDTH", 0.5)


@pytest.fixture
def clock(monkeypatch):
    for owner in (module, time_budget):
        monkeypatch.setattr(owner, "time", CLOCK)
    return CLOCK
