import copy

import pytest
import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.model.inference import fold_batch_norm
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.pretrained import blank_network


def shapes(name, channels=3, num_classes=1000):
    network = blank_network(Model(name=name), (224, 224, channels), num_classes, 0)
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


def norm(name, filters):
    own = {f"{name}.{key}": (filters,) for key in ("weight", "bias", "running_mean", "running_var")}
    return own | {f"{name}.num_batches_tracked": ()}


def published_resnet18():
    """Written down from the published files, by themselves."""
    found = {"conv1.weight": (64, 3, 7, 7)} | norm("bn1", 64)
    for layer, (before, filters) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], start=1):
        for block, channels in enumerate([before, filters]):
            name = f"layer{layer}.{block}"
            found[f"{name}.conv1.weight"] = (filters, channels, 3, 3)
            found |= norm(f"{name}.bn1", filters)
            found[f"{name}.conv2.weight"] = (filters, filters, 3, 3)
            found |= norm(f"{name}.bn2", filters)
            if block == 0 and layer > 1:
                found[f"{name}.downsample.0.weight"] = (filters, channels, 1, 1)
                found |= norm(f"{name}.downsample.1", filters)
    return found | {"fc.weight": (1000, 512), "fc.bias": (1000,)}


def test_resnet18_has_the_published_names_and_shapes():
    assert shapes("resnet18") == published_resnet18()


def test_resnet50_has_the_published_names_and_shapes():
    found = shapes("resnet50")
    assert len(found) == 320
    assert {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_var": (256,),
        "layer2.0.conv1.weight": (128, 256, 1, 1),
        "layer2.0.downsample.0.weight": (512, 256, 1, 1),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "layer4.2.bn3.weight": (2048,),
        "fc.weight": (1000, 2048),
    }.items() <= found.items()
    assert not {"layer1.1.downsample.0.weight", "layer3.6.conv1.weight", "layer4.3.conv1.weight"} & set(found)


@pytest.mark.parametrize(("name", "number"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_they_have_the_published_number_of_parameters(name, number):
    network = blank_network(Model(name=name), (224, 224, 3), 1000, 0)
    assert sum(parameter.numel() for parameter in network.parameters()) == number


def test_bottlenecks_halve_in_their_3x3_convolution():
    """As torchvision has them; the same weights in the first version's network would be of no use."""
    layer2 = blank_network(Model(name="resnet50"), (224, 224, 3), 10, 0).layer2
    assert [layer2[0].get_submodule(f"conv{index}").stride for index in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]


def strided(network):
    """The same network with the shortcuts' strides in their convolutions, as the published code has them."""
    other = copy.deepcopy(network)
    for part in other.modules():
        if type(part).__name__ == "Shortcut":
            part[0].stride, part.stride = (part.stride, part.stride), 1
    return other


def test_folded_and_with_strided_shortcuts_it_computes_the_same():
    torch.manual_seed(1)
    side = 33
    network = build_network(Model(name="resnet18"), (side, side, 1), 5, 0)
    images_NCHW = torch.randn(4, 1, side, side)
    with torch.no_grad():
        network(images_NCHW * 2 + 1)  # statistics that are not those of the start
        network.eval()
        expected_NK, _ = network(images_NCHW)
        assert expected_NK.shape == (4, 5)
        folded = fold_batch_norm(network)
        torch.testing.assert_close(folded(images_NCHW)[0], expected_NK, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(strided(network)(images_NCHW)[0], expected_NK, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    assert any(isinstance(part, nn.BatchNorm2d) for part in network.modules())
