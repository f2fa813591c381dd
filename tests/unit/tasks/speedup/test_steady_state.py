"""The steady rate of trainings whose loader has no length."""

import pytest

from paceline.tasks.records.training import ModuleResult
from paceline.tasks.speedup.steady_state import steady_rate


def trained(**fields):
    return ModuleResult(
        **{
            **{"world_size": 1, "num_epochs": 0, "num_steps": 30, "num_batches": 30, "seconds": 3.5},
            **{"samples_per_second": 60.0, "resumed_from": None, "time_budget": {}, "wall_seconds": 9.0},
            **{"data_wait_fraction": None, "hosts": ("h",), "devices": ("d",), "losses": (), "metrics": {}},
            **{"checkpoint": None, "windows": ((0, 10, 2.0), (10, 10, 1.0), (20, 10, 0.5))},
            **{"window_samples": (70, 70, 70)},
        }
        | fields
    )


def test_without_epochs_the_first_window_is_warm_up():
    assert steady_rate(trained()) == pytest.approx(105.0)  # the median of 70 and 140
    assert steady_rate(trained(num_epochs=2, steps_per_epoch=20, samples_per_epoch=140)) == pytest.approx(140.0)
    assert steady_rate(trained(window_samples=(0, 0, 0))) is None
