import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.conf.model import Model
from paceline.tasks.model.inference import fold_batch_norm
from paceline.tasks.model.networks.registry import ViewMean, build_network
from paceline.tasks.model.networks.whitened import PATCH, Whitening


def natural_images(num=200, channels=3, side=16):
    """Random images whose pixels resemble their neighbours, as those of photographs do."""
    generator = torch.Generator().manual_seed(0)
    noise_NCHW = torch.randn(num, channels, side + 4, side + 4, generator=generator)
    smooth_NCHW = functional.avg_pool2d(noise_NCHW, 5, stride=1) * 5
    return smooth_NCHW + 0.5 * smooth_NCHW.mean(1, keepdim=True)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_patches_come_out_uncorrelated_with_unit_variance(channels):
    images_NCHW = natural_images(channels=channels)
    layer = Whitening(channels)
    layer.fit(images_NCHW)
    num_values = channels * PATCH**2
    assert layer.weight.shape == (2 * num_values, channels, PATCH, PATCH)
    values_NDHW = functional.conv2d(images_NCHW, layer.weight)
    torch.testing.assert_close(values_NDHW[:, :num_values], -values_NDHW[:, num_values:])
    values_DM = values_NDHW[:, :num_values].transpose(0, 1).flatten(1).double()
    covariance_DD = values_DM @ values_DM.T / values_DM.shape[1]
    torch.testing.assert_close(covariance_DD, torch.eye(num_values, dtype=torch.float64), atol=0.02, rtol=0)


def test_the_same_images_give_the_same_filters_whatever_was_there_before():
    images_NCHW = natural_images()
    first, second = Whitening(3), Whitening(3)
    assert not torch.equal(first.weight, second.weight)
    for layer in (first, second):
        layer.fit(images_NCHW)
    assert torch.equal(first.weight, second.weight)
    second.fit(natural_images(num=100))
    assert not torch.equal(first.weight, second.weight)


def test_images_that_do_not_vary_are_not_blown_up():
    layer = Whitening(1)
    layer.fit(torch.full((4, 1, 12, 12), 0.5))
    assert layer.weight.isfinite().all()
    assert layer.weight.abs().max() < 50


@pytest.mark.parametrize(("side", "channels"), [(9, 1), (16, 3), (28, 1), (32, 3), (65, 4)])
def test_the_network_takes_images_of_any_size(side, channels):
    model = Model(name="whitened", width=4)
    logits_NK, targets_NT = build_network(model, (side, side, channels), 7, 0)(torch.randn(2, channels, side, side))
    assert logits_NK.shape == (2, 7)
    assert targets_NT is None


def test_the_network_is_the_published_one():
    network = build_network(Model(name="whitened", width=64), (32, 32, 3), 10, 0)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    assert sum(weight.numel() for weight in trained) == 1_971_352, "the source says 1.97 million"
    assert [part.out_channels for part in network.modules() if isinstance(part, nn.Conv2d)] == [24, 64, 64] + [256] * 4
    assert not any(part.weight.requires_grad for part in network.modules() if isinstance(part, nn.BatchNorm2d))


def test_convolutions_begin_as_the_identity():
    network = build_network(Model(name="whitened", width=16), (16, 16, 1), 10, 0)
    first, second = [part for part in network.modules() if isinstance(part, nn.Conv2d)][1:3]
    images_NCHW = torch.randn(3, 8, 5, 5)
    torch.testing.assert_close(first(images_NCHW)[:, :8], images_NCHW)
    images_NCHW = torch.randn(3, 16, 5, 5)
    torch.testing.assert_close(second(images_NCHW), images_NCHW)


def trained_statistics(network, images_NCHW):
    for _ in range(3):
        network(images_NCHW * 2 + 1)
    return network


@pytest.mark.parametrize("views", [1, 2, 6])
def test_folding_looks_through_max_pools_and_views(views):
    torch.manual_seed(1)
    images_NCHW = natural_images(num=16)
    network = build_network(Model(name="whitened", width=8, test_views=views), (16, 16, 3), 10, 0)
    trained_statistics(network, images_NCHW)
    for norm in [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]:
        norm.bias.data.normal_()
    folded = fold_batch_norm(network)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    with torch.no_grad():
        torch.testing.assert_close(folded(images_NCHW)[0], network.eval()(images_NCHW)[0], rtol=1e-4, atol=1e-5)


def test_a_norm_that_turns_values_around_stays_behind_its_max_pool():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.BatchNorm2d(3))
    network[2].weight.data = torch.tensor([1.0, -1.0, 0.5])
    images_NCHW = torch.randn(4, 2, 9, 9)
    network(images_NCHW)
    folded = fold_batch_norm(network)
    torch.testing.assert_close(folded(images_NCHW), network.eval()(images_NCHW))


def views_of(images_NCHW):
    """The six views, by hand, and their weights."""
    padded = np.pad(images_NCHW.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    height, width = images_NCHW.shape[2:]
    shifted = [padded[:, :, y : y + height, x : x + width] for y, x in ((1, 1), (0, 0), (2, 2))]
    both = [
        (view[..., ::step].copy(), weight) for view, weight in zip(shifted, (2, 1, 1), strict=True) for step in (1, -1)
    ]
    return [(torch.from_numpy(view), weight / 8) for view, weight in both]


def test_evaluation_is_the_mean_over_views_and_training_sees_one():
    torch.manual_seed(1)
    images_NCHW = natural_images(num=5, side=12)
    plain = build_network(Model(name="whitened", width=4), (12, 12, 3), 10, 0)
    trained_statistics(plain, images_NCHW).eval()
    both, all_six = ViewMean(plain, 2).eval(), ViewMean(plain, 6).eval()
    with torch.no_grad():
        expected = sum(weight * plain(view)[0] for view, weight in views_of(images_NCHW))
        torch.testing.assert_close(all_six(images_NCHW)[0], expected)
        expected = (plain(images_NCHW)[0] + plain(images_NCHW.flip(3))[0]) / 2
        torch.testing.assert_close(both(images_NCHW)[0], expected)
        torch.testing.assert_close(both(images_NCHW.flip(3))[0], expected)
        assert torch.equal(both.train()(images_NCHW)[0], plain.train()(images_NCHW)[0])
