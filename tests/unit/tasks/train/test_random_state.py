"""Random numbers that were drawn show in the states of the generators."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.tasks.train.lightning.random_state import differ, random_state, set_random_state


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1)])
def test_a_draw_in_this_process_is_found(draw):
    before = random_state(None)
    assert not differ(before, random_state(None))
    draw()
    assert differ(before, random_state(None))


@pytest.mark.parametrize("generator", [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)])
def test_a_draw_of_a_generator_of_the_dataset_is_found_and_restored(generator):
    loader = SimpleNamespace(dataset=SimpleNamespace(noise=generator))
    loader.dataset.dataset = loader.dataset  # no reason to continue for ever
    before = random_state(loader)
    drawn = [generator.random(), generator.random()]
    assert differ(before, random_state(loader))
    set_random_state(before, loader)
    assert not differ(before, random_state(loader))
    assert [generator.random(), generator.random()] == drawn


def test_a_generator_that_a_dataset_makes_later_is_found():
    loader = SimpleNamespace(dataset=SimpleNamespace())
    before = random_state(loader)
    loader.dataset.noise = torch.Generator()
    assert differ(before, random_state(loader))


def test_a_draw_on_a_gpu_is_found():
    state = random_state(None) | {"cuda": torch.tensor([1, 2], dtype=torch.uint8)}
    assert not differ(state, dict(state))
    assert differ(state, state | {"cuda": torch.tensor([1, 3], dtype=torch.uint8)})
    assert not differ(random_state(None), state), "the first use of the GPU is no draw"
