"""Networks of timm by their names: built without a hub, normalised as published, and refused where they are missing."""

import importlib.util
import sys

import pytest
import torch

from paceline.conf import plugins
from paceline.conf.load import load
from paceline.conf.model import Model
from paceline.conf.plugins import PluginError
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.pretrained import check_fit, read_weights
from tests.support.refusals import refused

HAS_TIMM = importlib.util.find_spec("timm") is not None
with_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed, which needs a torchvision of this torch")
SMALL = "timm/resnet10t"


@pytest.mark.skipif(HAS_TIMM, reason="timm is installed")
def test_without_the_package_the_error_says_what_to_install():
    with refused("model.name", SMALL):
        load("digits", [f"model.name={SMALL}"])


@pytest.mark.parametrize("name", ["timm/", "timm/../x", "timm/hf_hub:a/b", "hub/resnet18", "timm/a b"])
def test_other_names_are_refused_before_anything_is_imported(name):
    with refused("model.name"):
        load("digits", [f"model.name={name}"])
    assert HAS_TIMM or "timm" not in sys.modules


def test_a_torchvision_that_does_not_load_is_named(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    plugin = plugins.Plugin(kind="model", name=SMALL, entry="timm:create_model", package="timm", version="1", code="0")
    with pytest.raises(PluginError, match=r"torchvision::nms .*; .* from the index of torch, or uninstall"):
        plugins._timm_builder(plugin)


@with_timm
@pytest.mark.parametrize(
    ("name", "near"),
    [("timm/resnet10x", "timm/resnet10t"), ("timm/resnet50.a1_in1", "timm/resnet50.a1_in1k")],
)
def test_a_name_that_does_not_exist_is_answered_with_near_ones(name, near):
    with refused("model.name", name, near):
        load("folder", [f"model.name={name}", "data.root=DIR"])


@with_timm
def test_it_learns_as_other_networks_do_and_its_weights_come_from_a_file(tmp_path):
    model = Model(name=SMALL)
    network = build_network(model, (32, 32, 3), 5, 0)
    logits_NK, targets = network(torch.zeros(2, 3, 32, 32))
    assert (logits_NK.shape, targets) == ((2, 5), None)
    torch.save(build_network(model, (32, 32, 3), 7, 0).network.state_dict(), tmp_path / "weights.pt")
    tensors, _ = read_weights(tmp_path / "weights.pt")
    assert check_fit(tensors, network, same_classes=False, where="weights.pt") == ("fc.weight", "fc.bias")


@with_timm
def test_images_are_normalised_as_published():
    facts = plugins.model_facts(SMALL)
    assert facts.image_mean == pytest.approx((0.485, 0.456, 0.406))
    assert facts.image_std == pytest.approx((0.229, 0.224, 0.225))


@with_timm
def test_a_transformer_is_built_for_the_size_of_the_images():
    network = build_network(Model(name="timm/vit_tiny_patch16_224"), (32, 32, 3), 3, 0)
    assert network(torch.zeros(2, 3, 32, 32))[0].shape == (2, 3)
