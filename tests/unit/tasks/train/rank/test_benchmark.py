"""The arms that a probe gets."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.conf.config import Speedup
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.train.rank import benchmark
from paceline.tasks.train.rank.benchmark import diagnostic_arms

WEIGHTS = 1000


def context(**settings):
    return SimpleNamespace(
        config=SimpleNamespace(speedup=Speedup(**settings)), network=nn.Linear(WEIGHTS, 1), device=torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, False),  # a default run gets no arm more
        ({"diagnose": True}, True),
        ({"diagnose": True, "factors": "off"}, False),
        ({"factors": "ladder"}, True),
    ],
)
def test_only_a_run_that_asks_for_it_measures_a_ladder(settings, wanted):
    assert benchmark._wants_ladder(context(**settings), 6) is wanted


def test_a_diagnosis_measures_no_ladder_that_might_not_fit_into_memory(monkeypatch):
    needed = 6 * benchmark.BYTES_PER_WEIGHT * (WEIGHTS + 1)
    for free, wanted in ((11 * needed, True), (9 * needed, False)):
        monkeypatch.setattr(benchmark, "free_bytes", lambda _, free=free: free)
        assert benchmark._wants_ladder(context(diagnose=True), 6) is wanted
        assert benchmark._wants_ladder(context(factors="ladder"), 6), "asked for"


def test_half_the_batch_is_timed_without_exchange_where_ranks_wait_for_each_other():
    arms = diagnostic_arms(BASELINE, 64)
    assert set(arms) == {"synthetic_input", "no_update", "half_batch"}
    assert (arms["half_batch"].variant, arms["half_batch"].batch_size) == ("full", 32)
    several = diagnostic_arms(BASELINE.model_copy(update={"num_devices": 2}), 64)
    assert set(several) == {"synthetic_input", "no_update", "no_sync", "alone", "half_batch"}
    assert several["half_batch"].variant == several["no_sync"].variant == "no_sync"
