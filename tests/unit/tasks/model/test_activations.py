import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.transfer import Activations, layer_sizes

SHAPE = (12, 12, 3)
MODEL = Model(width=4, depth=1)


def test_a_layer_gives_what_it_gives_within_the_network():
    network = build_network(MODEL, SHAPE, 5, 0).eval()
    images_NCHW = torch.randn(2, 3, 12, 12)
    sizes = layer_sizes(network, SHAPE)
    with torch.no_grad():
        expected = {
            "features": network.features(images_NCHW).flatten(1),
            "features.0": network.features[0](images_NCHW).flatten(1),
            "classify": network(images_NCHW)[0],
        }
        for layer, values in expected.items():
            assert sizes[layer] == values.shape[1]
            (found,) = Activations(network, layer)(images_NCHW)
            assert torch.equal(found, values)


def test_of_the_image_itself_where_a_mean_over_views_is_taken():
    network = build_network(MODEL.model_copy(update={"test_views": 6}), SHAPE, 5, 0).eval()
    assert layer_sizes(network, SHAPE) == layer_sizes(build_network(MODEL, SHAPE, 5, 0), SHAPE)
    images_NCHW = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        (found,) = Activations(network, "pool")(images_NCHW)
        assert torch.equal(found, network.network.pool(network.network.features(images_NCHW)).flatten(1))


def test_feature_maps_of_models_of_pixels():
    sizes = layer_sizes(build_network(Model(name="dncnn", width=4, depth=3), SHAPE, 2, 0), SHAPE)
    assert list(sizes.values())[-1] == 12 * 12 * 3, "the noise"
    assert 12 * 12 * 4 in sizes.values()


class Odd(nn.Module):
    """Has layers that are never called, that give a pair, and one row for all images."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Flatten(), nn.Linear(12 * 12 * 3, 7)])
        self.idle = nn.Linear(3, 3)
        self.pair = nn.GRU(7, 7, batch_first=True)
        self.turned = nn.Flatten(0, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images_NCHW):
        values_ND = self.relu(self.parts[1](self.parts[0](images_NCHW)))
        self.turned(values_ND)
        return self.pair(values_ND[:, None])[0][:, 0], None


def test_layers_without_a_row_for_each_image_are_not_offered():
    assert layer_sizes(Odd(), SHAPE) == {"parts.0": 12 * 12 * 3, "parts.1": 7, "relu": 7}


def test_what_the_next_layer_does_in_place_changes_nothing():
    odd, images_NCHW = Odd().eval(), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        (found,) = Activations(odd, "parts.1")(images_NCHW)
        assert torch.equal(found, odd.parts[1](images_NCHW.flatten(1)))
        assert (found < 0).any()


def test_threads_of_a_worker_get_each_their_own():
    """Both are in the network at once: neither may read its answer before the other's layer has given one."""
    network, met = nn.Sequential(nn.Flatten(), nn.Linear(3, 3)).eval(), threading.Barrier(2, timeout=30)

    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = network

        def forward(self, images_NCHW):
            values_ND = self.parts(images_NCHW)
            met.wait()
            return values_ND, None

    model = Activations(Core(), "parts.1")
    images = [torch.full((2, 3, 1, 1), float(number)) for number in range(2)]

    def ask(images_NCHW):
        with torch.no_grad():
            return model(images_NCHW)[0]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ask, images))
    with torch.no_grad():
        expected = [network(images_NCHW) for images_NCHW in images]
    assert not torch.equal(*expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
