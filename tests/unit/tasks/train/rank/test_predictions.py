"""What is predicted before the time of the predictions is taken."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from paceline.tasks.model.batch import Batch
from paceline.tasks.model.objectives import Classification
from paceline.tasks.train.rank.predictions import FEW_SAMPLES, LONG_BATCH_SECONDS, _warm_up

NUM_SAMPLES = 10 * FEW_SAMPLES


class Counting(nn.Module):
    """A network that takes some seconds for a sample, and keeps the sizes of its batches."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.sizes = seconds, []
        self.layer = nn.Linear(4, 3)

    def forward(self, images_NCHW):
        self.sizes.append(len(images_NCHW))
        time.sleep(self.seconds * len(images_NCHW))
        return self.layer(images_NCHW.flatten(1)), None


@pytest.mark.parametrize(
    ("seconds", "is_cpu", "sizes"),
    [
        (2 * LONG_BATCH_SECONDS / NUM_SAMPLES, True, {FEW_SAMPLES}),
        (0, True, {FEW_SAMPLES, NUM_SAMPLES, NUM_SAMPLES - 1}),
        (2 * LONG_BATCH_SECONDS / NUM_SAMPLES, False, {NUM_SAMPLES, NUM_SAMPLES - 1}),
    ],
)
def test_a_long_batch_of_a_cpu_is_not_predicted_before(seconds, is_cpu, sizes):
    network = Counting(seconds)
    batch = Batch(torch.rand(NUM_SAMPLES, 1, 2, 2), torch.arange(NUM_SAMPLES) % 3, None, None, 1.0)
    batches = [(np.arange(NUM_SAMPLES), batch)]
    _warm_up(network, batches, nullcontext(), Classification(3), is_cpu=is_cpu)
    assert set(network.sizes) == sizes
    _warm_up(network, [], nullcontext(), Classification(3), is_cpu=is_cpu)
