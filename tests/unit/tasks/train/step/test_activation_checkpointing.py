import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.conf.load import load
from paceline.conf.model import Model
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.train.step import activation_checkpointing
from paceline.tasks.train.step.activation_checkpointing import CheckpointedSequential, checkpoint_activations
from tests.support.refusals import refused

LABELS = torch.arange(8) % 4
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def trained(name, *, is_checkpointed, precision=torch.float32):
    """The state after three steps, and the losses."""
    torch.manual_seed(1)
    network = build_network(Model(name=name, width=4, depth=2), (16, 16, 3), 4, 0)
    if is_checkpointed:
        checkpoint_activations(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = functional.cross_entropy(network(IMAGES)[0], LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network


@pytest.mark.parametrize("name", ["convblocks", "resnet18", "whitened"])
def test_losses_weights_and_statistics_are_equal_to_the_bit(name):
    plain_losses, plain = trained(name, is_checkpointed=False)
    losses, network = trained(name, is_checkpointed=True)
    assert losses == plain_losses
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[key]), key


def test_under_autocast_they_are_nearly_equal():
    plain_losses, _ = trained("convblocks", is_checkpointed=False, precision=torch.bfloat16)
    losses, _ = trained("convblocks", is_checkpointed=True, precision=torch.bfloat16)
    assert losses == pytest.approx(plain_losses, rel=0.02)


def test_activations_inside_segments_are_not_held_for_the_backward_pass():
    network = build_network(Model(width=8, depth=4), (16, 16, 3), 4, 0)
    before = num_values_held(network)
    checkpoint_activations(network)
    assert num_values_held(network) < 0.5 * before


def num_values_held(network):
    values = {}

    def note(tensor):
        values[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        network(IMAGES)
    return sum(values.values())


def test_only_outermost_sequences_are_checkpointed_and_evaluation_is_as_before():
    network = build_network(Model(name="resnet18"), (16, 16, 3), 4, 0).eval()
    with torch.no_grad():
        expected = network(IMAGES)[0]
        checkpoint_activations(network)
        assert torch.equal(network(IMAGES)[0], expected)
    kinds = {name for name, part in network.named_modules() if isinstance(part, CheckpointedSequential)}
    assert kinds == {"layer1", "layer2", "layer3", "layer4"}


def test_a_network_without_sequences_is_refused():
    with refused("execution.activation_checkpointing"):
        checkpoint_activations(nn.Linear(2, 2))
    assert activation_checkpointing.__doc__


@pytest.mark.parametrize("value", ["step", "graph", "step_graph"])
def test_what_plans_its_own_memory_is_refused(value):
    with refused("execution.activation_checkpointing", f"execution.compile={value}", "execution.compile=off"):
        load("digits", ["execution.activation_checkpointing=on", f"execution.compile={value}"])
