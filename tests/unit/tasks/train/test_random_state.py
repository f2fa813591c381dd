"""Random numbers that were drawn show in the states of the generators."""

import random

import numpy as np
import pytest
import torch

from paceline.tasks.train.lightning.random_state import differ, random_state


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1)])
def test_a_draw_in_this_process_is_found(draw):
    before = random_state(None)
    assert not differ(before, random_state(None))
    draw()
    assert differ(before, random_state(None))


def test_a_draw_on_a_gpu_is_found():
    state = random_state(None) | {"cuda": torch.tensor([1, 2], dtype=torch.uint8)}
    assert not differ(state, dict(state))
    assert differ(state, state | {"cuda": torch.tensor([1, 3], dtype=torch.uint8)})
    assert not differ(random_state(None), state), "the first use of the GPU is no draw"
