"""What a process without Paceline is given of a network."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.measure.probe import ArmLostError
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.train.competent.arm import portable

SHAPE = (32, 32, 3)
LOADER = "import pickle, sys; pickle.load(sys.stdin.buffer); sys.exit('paceline' in sys.modules)"


@pytest.mark.parametrize("name", ["convblocks", "twohead", "whitened", "unet", "dncnn", "resnet18"])
def test_a_traced_network_gives_the_same_outputs_and_gradients(name):
    torch.manual_seed(0)
    network = build_network(Model(name=name, width=8, depth=2), SHAPE, 4, 1 if name == "twohead" else 0)
    traced = pickle.loads(portable(network))
    images = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for mine, other in zip(network(images), traced(images), strict=True):
        assert (mine is None) is (other is None)
        if mine is not None:
            assert torch.equal(mine, other)
    for one in (network, traced):
        one(images)[0].square().mean().backward()
    others = dict(traced.named_parameters())
    for path, weight in network.named_parameters():
        torch.testing.assert_close(others[path].grad, weight.grad)
    assert not any(type(part).__module__.startswith("paceline") for part in traced.modules())


def test_another_process_loads_it_without_paceline():
    network = build_network(Model(name="convblocks", width=4, depth=1), SHAPE, 4, 0)
    subprocess.run([sys.executable, "-c", LOADER], input=portable(network), check=True, timeout=60)


def test_a_network_of_paceline_that_cannot_be_traced_is_left_out():
    network = build_network(Model(name="sequence", width=4, depth=1), (16, 16, 6), 4, 0)
    with pytest.raises(ArmLostError, match="cannot be traced"):
        portable(network)


def test_frozen_parts_stay_frozen():
    network = build_network(Model(name="convblocks", width=4, depth=1), SHAPE, 4, 0)
    network.features[0].weight.requires_grad_(False)
    network.features[1].training = False
    traced = pickle.loads(portable(network))
    assert sum(not weight.requires_grad for weight in traced.parameters()) == 1
    assert [part.training for part in traced.modules() if isinstance(part, nn.BatchNorm2d)] == [False, True, True]
