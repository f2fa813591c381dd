import pytest
import torch
from torch import nn

from paceline.tasks.model.optimization import WeightAverage

DECAY = 0.75


@pytest.fixture
def network():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    network[2].requires_grad_(False)
    return network


def step(network, number):
    """Change weights and statistics in place, as an optimizer and a batch norm do."""
    with torch.no_grad():
        for tensor in (*network[0].parameters(), network[1].running_mean):
            tensor.add_(float(number))
        network[1].num_batches_tracked.add_(1)


def test_the_average_is_the_weighted_mean_of_the_weights_after_each_step(network):
    average, seen = WeightAverage(network, DECAY), []
    for number in range(1, 5):
        step(network, number)
        average.update()
        seen.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
    shares = [DECAY**age for age in range(len(seen))][::-1]
    before = network.state_dict()["2.weight"].clone()
    average.load_into(network, len(seen))
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean"):
        mean = sum(share * tensors[name] for share, tensors in zip(shares, seen, strict=True)) / sum(shares)
        torch.testing.assert_close(network.state_dict()[name], mean)
    assert torch.equal(network[2].weight, before), "what is not trained stays as it is, to the bit"
    assert network[1].num_batches_tracked == 4, "counts are not averaged"


def test_one_step_gives_its_weights_without_the_initial_ones(network):
    average = WeightAverage(network, 0.999)
    step(network, 1)
    average.update()
    expected = network[0].weight.clone()
    average.load_into(network, 1)
    torch.testing.assert_close(network[0].weight, expected)


def test_an_average_goes_on_bit_for_bit_from_its_state(network):
    average = WeightAverage(network, DECAY)
    step(network, 1)
    average.update()
    saved = {name: tensor.clone() for name, tensor in average.sums.items()}
    resumed = WeightAverage(network, DECAY, saved)
    step(network, 2)
    average.update()
    resumed.update()
    for name, tensor in average.sums.items():
        assert torch.equal(tensor, resumed.sums[name]), name


def test_the_buffers_are_those_that_differ_between_ranks(network):
    average = WeightAverage(network, DECAY)
    assert [len(tensor) for tensor in average.buffers] == [2, 2]
