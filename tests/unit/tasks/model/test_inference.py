"""Forward passes without gradients: what does not fit into memory is done in parts, in the same order."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from paceline.tasks.model.batch import Batch
from paceline.tasks.model.inference import predictions
from paceline.tasks.model.objectives import Classification


class Limited(nn.Module):
    """A network that a device has memory for with so many images."""

    def __init__(self, largest, error=None):
        super().__init__()
        self.largest = largest
        self.error = error or torch.OutOfMemoryError("CUDA out of memory.")
        self.layer = nn.Linear(4, 3)

    def forward(self, images_NCHW):
        if len(images_NCHW) > self.largest:
            raise self.error
        return self.layer(images_NCHW.flatten(1)), None


def batch_of(number):
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.rand(number, 1, 2, 2, generator=generator), torch.arange(number) % 3, None, None, 1.0)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")], ids=["torch", "cudnn"]
)
@pytest.mark.parametrize("largest", [1, 3, 8])
def test_a_batch_that_does_not_fit_becomes_two(largest, error):
    network = Limited(11, error)
    indices_N = np.arange(100, 111)
    (whole,) = predictions(network, [(indices_N, batch_of(11))], nullcontext(), Classification(3))
    network.largest = largest
    parts = list(predictions(network, [(indices_N, batch_of(11))], nullcontext(), Classification(3)))
    assert max(len(part.indices_N) for part in parts) <= largest
    assert np.concatenate([part.indices_N for part in parts]).tolist() == indices_N.tolist()
    assert torch.equal(torch.cat([part.batch.labels_N for part in parts]), whole.batch.labels_N)
    torch.testing.assert_close(torch.cat([part.outputs[0] for part in parts]), whole.outputs[0])


def test_one_image_that_does_not_fit_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        list(predictions(Limited(0), [(np.arange(4), batch_of(4))], nullcontext(), Classification(3)))


def test_another_error_is_raised_at_once():
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised:
        list(predictions(Limited(0, error), [(np.arange(4), batch_of(4))], nullcontext(), Classification(3)))
    assert raised.value is error
