"""What a network costs, against a count by hand."""

import pytest
from torch import nn

from paceline.tasks.model.flops import cost_of


class Told(nn.Module):
    """A convolution and a dense layer, as a network that classifies tells it."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv2d(3, 8, 3, padding=1)
        self.classify = nn.Linear(8 * 4 * 4, 5)

    def forward(self, images_NCHW):
        return self.classify(self.filter(images_NCHW).flatten(1)), None


def test_operations_are_counted_two_for_each_product_and_its_sum():
    filtering, classifying = 2 * 8 * 3 * 9 * 16, 2 * 128 * 5
    found = cost_of(Told(), (4, 4, 3))
    assert found.forward_flops == pytest.approx(filtering + classifying)
    # Backward: weights of both, and what the dense layer hands on; nobody asks for the gradient of an image.
    assert found.training_flops == pytest.approx(2 * filtering + 3 * classifying)
    assert found.num_parameters == 8 * 3 * 9 + 8 + 128 * 5 + 5
    assert found.image_bytes == 48
