import io

import pytest
import torch

from paceline.conf.model import Model
from paceline.conf.recipe import Recipe
from paceline.tasks.model.muon import Muon, orthogonalise
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.objectives import Classification
from paceline.tasks.model.optimization import batch_loss, build_optimizer, prepare_optimizer_state

TASK = Classification(10)
RECIPE = Recipe(optimizer="muon", learning_rate=0.1, momentum=0.6, weight_decay=0.1)


class Batch:
    mixed_labels_N = mix_weights_N = None
    targets_NT = None
    weight = 1.0

    def __init__(self, seed, size=8):
        generator = torch.Generator().manual_seed(seed)
        self.images_NCHW = torch.randn(size, 1, 12, 12, generator=generator)
        self.labels_N = torch.randint(0, 10, (size,), generator=generator)


def new_network(name="whitened"):
    torch.manual_seed(1)
    return build_network(Model(name=name, width=16, depth=1), (12, 12, 1), 10, int(name == "twohead"))


def train(network, optimizer, seeds):
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = batch_loss(network, Batch(seed), RECIPE, TASK)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shape", [(1, 64, 216), (3, 256, 576), (2, 96, 24)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    torch.manual_seed(1)
    matrices_BRC = torch.randn(shape) * 1e-3
    found = orthogonalise(matrices_BRC)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices_BRC, full_matrices=False)
    torch.testing.assert_close(
        left @ torch.diag_embed((left.mT @ found @ right.mT).diagonal(dim1=1, dim2=2)) @ right,
        found,
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_step_is_as_large_as_its_rate_in_every_direction():
    torch.manual_seed(1)
    layer = torch.nn.Conv2d(4, 8, 3, bias=False)
    before = layer.weight.detach().clone()
    for scale in (1e-6, 1e6):
        layer.weight.data = before.clone()
        layer.weight.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(2)) * scale
        Muon(layer, 0.1, 0.6, 0.0, fused=True).step()
        step = before * (len(before) ** 0.5 / before.norm()) - layer.weight.detach()
        values = torch.linalg.svdvals(step.flatten(1))
        assert 0.05 < values.min() < values.max() < 0.13


def test_filters_keep_their_norm_and_the_rest_have_their_own_rates_and_decay():
    network = new_network()
    optimizer = build_optimizer(network, RECIPE, 0.1)
    filters, biases, dense = optimizer.param_groups
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 7, 1]
    assert filters["rate_factor"] == 1.0
    assert [group["lr"] for group in optimizer.param_groups] == [
        pytest.approx(0.1 * group["rate_factor"]) for group in optimizer.param_groups
    ]
    for group in (biases, dense):
        assert group["weight_decay"] * group["rate_factor"] == pytest.approx(RECIPE.weight_decay)
    whitening = network.features[0].weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(network, optimizer, [1])
    for weight in filters["params"]:
        assert weight.norm().item() == pytest.approx(len(weight) ** 0.5, rel=1e-5)
    assert torch.equal(network.features[0].weight, whitening), "is not trained"


def test_rates_follow_the_width():
    narrow, wide = (
        {group["params"][0].dim(): group["rate_factor"] for group in build_optimizer(network, RECIPE, 0.1).param_groups}
        for network in (build_network(Model(name="whitened", width=width), (12, 12, 1), 10, 0) for width in (16, 64))
    )
    assert wide[1] == pytest.approx(4 * narrow[1])
    assert narrow[2] == pytest.approx(4 * wide[2])
    assert wide[1] * 0.24 == pytest.approx(0.053 * 2_000), "the source's, of the mean loss"


@pytest.mark.parametrize("name", ["whitened", "convblocks"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_restored_optimizer_goes_on_bit_for_bit(name, channels_last):
    def laid_out(network):
        return network.to(memory_format=torch.channels_last) if channels_last else network

    network = laid_out(new_network(name))
    optimizer = build_optimizer(network, RECIPE, 0.1)
    train(network, optimizer, (1, 2))
    file = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(network, optimizer, (3, 4, 5))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = laid_out(new_network(name))
    other.load_state_dict(saved["network"])
    restored = build_optimizer(other, RECIPE, 0.1)
    restored.load_state_dict(saved["optimizer"])
    prepare_optimizer_state(restored, other)
    assert train(other, restored, (3, 4, 5)) == expected
    for found, wanted in zip(other.parameters(), network.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["whitened", "convblocks", "twohead"])
def test_every_network_learns_a_batch_by_heart(name):
    network = new_network(name)
    optimizer = build_optimizer(network, RECIPE.model_copy(update={"weight_decay": 0.0}), 0.1)
    losses = train(network, optimizer, [1] * 30)
    assert losses[-1] < 0.3 * losses[0]


def test_scaled_gradients_are_unscaled_before_the_step():
    """As fp16 has them: the scaler must see all groups, and leave a step out whose gradients overflowed."""
    plain, scaled = new_network(), new_network()
    train(plain, build_optimizer(plain, RECIPE, 0.1), [1])
    optimizer = build_optimizer(scaled, RECIPE, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(batch_loss(scaled, Batch(1), RECIPE, TASK)).backward()
    scaler.step(optimizer)
    scaler.update()
    for found, wanted in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    before = [weight.detach().clone() for weight in scaled.parameters()]
    optimizer.zero_grad()
    scaler.scale(batch_loss(scaled, Batch(2), RECIPE, TASK) * float("inf")).backward()
    scaler.step(optimizer)
    assert all(torch.equal(now, then) for now, then in zip(scaled.parameters(), before, strict=True))


def test_parameters_of_any_shape_are_trained():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            shapes = ((), (3,), (3, 4), (1, 3, 4), (2, 3, 3, 3), (2, 3, 3, 3, 3))
            self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(shape)) for shape in shapes)

    network = Odd()
    optimizer = Muon(network, 0.1, 0.6, 0.0, fused=False)
    sum(weight.square().sum() for weight in network.weights).backward()
    before = [weight.detach().clone() for weight in network.weights]
    optimizer.step()
    assert not any(weight.equal(old) for weight, old in zip(network.weights, before, strict=True))
