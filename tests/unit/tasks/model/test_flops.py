"""What a network costs, against a count by hand and a profiler's."""

import pytest
import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.model.flops import count_cost
from paceline.tasks.model.networks.registry import build_network
from tests.support.profiled_flops import profiled_flops

CIFAR, DIGITS = (32, 32, 3), (28, 28, 1)
MAX_DIFFERENCE = 0.02  # goal 22
NUM_SAMPLES = 8


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
    network = Told()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    cost, reason = count_cost(network, (4, 4, 3))
    assert reason == ""
    assert cost.forward_flops == filtering + classifying
    # Backward: weights of both, and what the dense layer hands on; nobody asks for the gradient of an image.
    assert cost.training_flops == 2 * filtering + 3 * classifying
    assert cost.num_parameters == cost.num_trained == 8 * 3 * 9 + 8 + 128 * 5 + 5
    assert cost.image_bytes == 48
    assert (cost.saved_values, cost.saved_bytes) == (48 + 128, 0), "the image, and what the filter gives"
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())


def test_a_frozen_layer_has_no_backward_pass():
    network = Told()
    network.filter.requires_grad_(False)
    cost, _ = count_cost(network, (4, 4, 3))
    assert cost.training_flops == 2 * 8 * 3 * 9 * 16 + 2 * 2 * 128 * 5
    assert cost.num_trained == 128 * 5 + 5


@pytest.mark.parametrize(
    ("name", "image_shape", "num_targets"), [("convblocks", CIFAR, 0), ("twohead", DIGITS, 1), ("whitened", CIFAR, 0)]
)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "autocast"])
def test_the_count_is_that_of_a_profiler(name, image_shape, num_targets, half):
    network = build_network(Model(name=name), image_shape, 10, num_targets)
    cost, _ = count_cost(network, image_shape)
    height, width, channels = image_shape
    images_NCHW = torch.randn(NUM_SAMPLES, channels, height, width)

    def forward_pass():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return network(images_NCHW)

    def step():
        sum(output.sum() for output in forward_pass() if output is not None).backward()

    forward, training = profiled_flops(forward_pass), profiled_flops(step)
    assert cost.forward_flops * NUM_SAMPLES == pytest.approx(forward, rel=MAX_DIFFERENCE)
    assert cost.training_flops * NUM_SAMPLES == pytest.approx(training, rel=MAX_DIFFERENCE)


class Values(Told):
    """Computes with values, which a tensor of device `meta` does not have."""

    def forward(self, images_NCHW):
        scale = 1.0 if images_NCHW.sum().item() == 0 else 2.0
        return self.classify(self.filter(scale * images_NCHW).flatten(1)), None


def test_a_network_that_reads_values_is_counted_on_real_tensors():
    assert count_cost(Values(), (4, 4, 3)) == count_cost(Told(), (4, 4, 3))


def test_random_numbers_of_a_network_are_drawn_apart():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(48, 2), Pair())
    before = torch.get_rng_state()
    assert count_cost(network, (4, 4, 3))[0].training_flops == 2 * 2 * 48 * 2
    assert torch.get_rng_state().equal(before)


class Pair(nn.Module):
    def forward(self, logits_NK):
        return logits_NK, None


@torch.library.custom_op("paceline_test::secret", mutates_args=())
def secret(images_N: torch.Tensor) -> torch.Tensor:
    return images_N.clone()


secret.register_fake(torch.empty_like)
secret.register_autograd(lambda ctx, gradient: gradient)


class Secret(Told):
    """Computes something in an operator of its own."""

    def forward(self, images_NCHW):
        return self.classify(secret(self.filter(images_NCHW)).flatten(1)), None


class Broken(Told):
    """Takes no images of zeros."""

    def forward(self, images_NCHW):
        raise ValueError("no images")


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Secret(), "paceline_test::secret"),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), Pair()), "no convolution and no matrix product"),
        (Broken(), "no images"),
    ],
)
def test_a_network_that_cannot_be_counted_has_no_cost_but_a_reason_unless_it_gives_it(network, reason):
    cost, why = count_cost(network, (4, 4, 3))
    assert cost is None
    assert reason in why
    network.flops_per_sample = (10, 30)
    cost, why = count_cost(network, (4, 4, 3))
    assert (cost.forward_flops, cost.training_flops, why) == (10, 30, "")
