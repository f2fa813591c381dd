import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.conf.load import load
from paceline.conf.model import Model
from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.sampling import BatchPlan, StepSchedule
from paceline.tasks.model.inference import fold_batch_norm, predictions
from paceline.tasks.model.networks.convolutional import every_nth
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.objectives import Classification
from paceline.tasks.model.optimization import batch_loss, build_optimizer, learning_rate_factor, prepare_optimizer_state
from paceline.tasks.train.step.learner import Learner

TASK = Classification(10)


class Sample:
    mixed_labels_N = mix_weights_N = None

    def __init__(self, n, weight=1.0, targets=None):
        generator = torch.Generator().manual_seed(n)
        self.images_NCHW = torch.randn(n, 1, 28, 28, generator=generator)
        self.labels_N = torch.randint(0, 10, (n,), generator=generator)
        self.targets_NT = targets
        self.weight = weight


def test_the_cifar_network_is_the_documented_one():
    network = build_network(load("cifar10", ["data.root=/x"]).model, (32, 32, 3), 10, 0)
    convolutions = [layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [32] * 4 + [64] * 4 + [128] * 4
    logits_NK, targets_NT = network(torch.randn(2, 3, 32, 32))
    assert logits_NK.shape == (2, 10)
    assert targets_NT is None


@pytest.mark.parametrize("side", [28, 29])
def test_two_heads_give_class_and_angle(side):
    network = build_network(Model(name="twohead", width=16), (side, side, 1), 10, 1)
    logits_NK, targets_NT = network(torch.randn(2, 1, side, side))
    assert (logits_NK.shape, targets_NT.shape) == ((2, 10), (2, 1))


class GradientFormats(TorchDispatchMode):
    """Strides of what a ReLU or GELU gets back and of what it has kept, of all that have gone backward."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.threshold_backward, torch.ops.aten.gelu_backward):
            self.pairs.append((args[0].stride(), args[1].stride()))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["convblocks", "twohead", "whitened", "unet", "resnet18", "sequence"])
def test_gradients_come_back_in_the_format_of_the_features(name):
    """Else each activation goes through memory in two orders at once (log 2026-11-23)."""
    network = build_network(Model(name=name, width=16, depth=2), (64, 64, 6), 10, int(name == "twohead"))
    network.to(memory_format=torch.channels_last)
    images_NCHW = torch.randn(4, 6, 64, 64).to(memory_format=torch.channels_last)
    with GradientFormats() as seen, torch.autocast("cpu", torch.bfloat16):
        sum(output.float().square().mean() for output in network(images_NCHW) if output is not None).backward()
    assert len(seen.pairs) >= 3
    assert all(given == kept for given, kept in seen.pairs)


@pytest.mark.parametrize("side", [8, 9])
def test_every_second_pixel_and_its_gradient_are_those_of_a_slice(side):
    features_NCHW = torch.randn(2, 3, side, side).requires_grad_()
    weights_NCHW = torch.randn(2, 3, (side + 1) // 2, (side + 1) // 2)
    sliced = features_NCHW[:, :, ::2, ::2]
    assert torch.equal(every_nth(features_NCHW, 2), sliced)
    found, expected = (
        torch.autograd.grad((part * weights_NCHW).sum(), features_NCHW)[0]
        for part in (every_nth(features_NCHW, 2), sliced)
    )
    assert torch.equal(found, expected)
    assert every_nth(features_NCHW, 1) is features_NCHW


def test_weighted_rank_losses_average_to_the_mean_over_all_samples():
    """Two ranks with 3 and 5 of 8 samples: DDP averages gradients over ranks, the weights make it the sample mean."""
    network = build_network(Model(width=4, depth=1), (28, 28, 1), 10, 0).eval()
    whole, recipe = Sample(8), Recipe()
    parts = []
    for start, stop in ((0, 3), (3, 8)):
        part = Sample(8, weight=(stop - start) * 2 / 8)
        part.images_NCHW, part.labels_N = whole.images_NCHW[start:stop], whole.labels_N[start:stop]
        parts.append(part)

    def gradient(losses):
        network.zero_grad()
        sum(losses).backward()
        return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])

    expected = gradient([batch_loss(network, whole, recipe, TASK)])
    found = gradient([batch_loss(network, part, recipe, TASK) / 2 for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_angle_enters_the_loss_with_its_weight():
    network = build_network(Model(name="twohead", width=4), (28, 28, 1), 10, 1).eval()
    batch = Sample(6, targets=torch.full((6, 1), 3.0))
    loss = {weight: batch_loss(network, batch, Recipe(angle_weight=weight), TASK).item() for weight in (0.0, 0.1, 0.2)}
    assert loss[0.2] - loss[0.1] == pytest.approx(loss[0.1] - loss[0.0], rel=1e-4)
    assert loss[0.1] > loss[0.0]


def factors(**settings):
    recipe = Recipe(num_epochs=10, **settings)
    return [learning_rate_factor(recipe, step, 20) for step in range(200)]


def test_piecewise_drops_after_its_epochs():
    found = factors(schedule="piecewise", drop_epochs=5, drop_factor=0.1)
    assert found[99] == 1.0
    assert found[100] == pytest.approx(0.1)


def test_cosine_falls_from_one_to_zero_after_warmup():
    found = factors(schedule="cosine", warmup_epochs=2)
    assert 0 < found[0] < 0.05
    assert max(found) == found[40] == 1.0
    assert found[-1] < 0.001
    assert all(math.isfinite(value) for value in found)


def test_onecycle_rises_and_falls_linearly():
    found = factors(schedule="onecycle", warmup_epochs=5)
    assert np.argmax(found) == 100
    assert found[150] == pytest.approx(0.5)


def test_a_warm_up_takes_at_most_half_of_a_short_run():
    found = factors(schedule="onecycle", warmup_epochs=99)
    assert np.argmax(found) == 100


def test_constant_stays():
    assert set(factors(schedule="constant")) == {1.0}


def test_prediction_leaves_the_network_as_it_was():
    network = build_network(Model(width=4, depth=1), (28, 28, 1), 10, 0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    batches = [(np.arange(4), Sample(4)), (np.arange(4, 7), Sample(3))]
    found = list(predictions(network, batches, torch.autocast("cpu", dtype=torch.bfloat16), TASK))
    assert [len(one.outputs[0]) for one in found] == [4, 3]
    assert all(one.outputs[0].dtype == torch.float32 for one in found)
    assert network.training
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "num_targets"), [("convblocks", 0), ("twohead", 1)])
def test_a_folded_network_computes_the_same(name, num_targets):
    torch.manual_seed(1)
    network = build_network(Model(name=name, width=8, depth=2), (28, 28, 1), 10, num_targets)
    network.to(memory_format=torch.channels_last)
    images_NCHW = torch.randn(16, 1, 28, 28)
    for _ in range(3):  # statistics that are not those of the start
        network(images_NCHW * 2 + 1)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    folded = fold_batch_norm(network)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    wide = [part for part in folded.modules() if isinstance(part, nn.Conv2d) and part.in_channels > 1]
    assert all(part.weight.is_contiguous(memory_format=torch.channels_last) for part in wide)
    network.eval()
    with torch.no_grad():
        for found, expected in zip(folded(images_NCHW), network(images_NCHW), strict=True):
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_graph_reads_its_rate_from_a_tensor_and_leaves_no_trace_of_that(optimizer):
    """What a captured training has left is taken up by an eager one; rates follow the schedule in both."""
    recipe = Recipe(optimizer=optimizer, learning_rate=0.01, schedule="constant", num_epochs=1, warmup_epochs=0)
    network = nn.Linear(3, 2)
    learner = Learner(network, TASK, recipe, 0.02, StepSchedule(BatchPlan(100, 10, 1)))
    captured, eager = (build_optimizer(network, recipe, 0.01) for _ in range(2))
    prepare_optimizer_state(captured, network, is_captured=True)
    address = captured.param_groups[0]["lr"].data_ptr()
    learner.set_learning_rate(captured)
    rate = captured.param_groups[0]["lr"]
    assert (rate.data_ptr(), float(rate)) == (address, pytest.approx(0.02))
    assert captured.param_groups[0].get("capturable", True)
    eager.load_state_dict(captured.state_dict())
    prepare_optimizer_state(eager, network)
    assert type(eager.param_groups[0]["lr"]) is float
    assert eager.param_groups[0]["lr"] == pytest.approx(0.02)
    assert not eager.param_groups[0].get("capturable", False)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "muon"])
def test_a_restored_optimizer_fits_another_memory_layout(optimizer):
    """Fused kernels go by address: a momentum in the old layout would be that of other weights."""
    recipe = Recipe(optimizer=optimizer, learning_rate=0.01, momentum=0.9)

    def trained(network, updates, state=None):
        built = build_optimizer(network, recipe, 0.01)
        if state is not None:
            built.load_state_dict(state)
            prepare_optimizer_state(built, network)
        for seed in updates:
            torch.manual_seed(seed)
            for weight in network.parameters():
                weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape))
            built.step()
        return built.state_dict()

    first, whole = (torch.nn.Conv2d(3, 4, 3, bias=False) for _ in range(2))
    whole.load_state_dict(first.state_dict())
    trained(whole, (1, 2, 3))
    state = trained(first, (1, 2))
    other = torch.nn.Conv2d(3, 4, 3, bias=False)
    other.load_state_dict(first.state_dict())
    other.weight.data = other.weight.data.contiguous(memory_format=torch.channels_last)
    trained(other, (3,), state)
    torch.testing.assert_close(other.weight, whole.weight)


def test_layers_that_are_used_twice_stay_between_their_neighbours():
    """The second norm is behind the activation, and not behind the convolution that is folded before it."""
    torch.manual_seed(3)
    activation = nn.GELU()
    layers = [nn.Conv2d(1, 4, 3), activation, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), activation, nn.BatchNorm2d(4)]
    bare = [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, *bare, nn.BatchNorm2d(4, affine=False))
    with torch.no_grad():
        for _ in range(3):
            network(torch.randn(8, 1, 12, 12) + 1)
        network.eval()
        images_NCHW = torch.randn(4, 1, 12, 12)
        folded = fold_batch_norm(network)
        torch.testing.assert_close(folded(images_NCHW), network(images_NCHW))
    assert [isinstance(folded[place], nn.Identity) for place in (2, 5, 7, 10)] == [False, False, True, True]
    of_the_batch = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False))
    assert isinstance(fold_batch_norm(of_the_batch)[1], nn.BatchNorm2d)
