"""What the study "no GPU?" refuses before it asks anybody for anything."""

import pytest
import torch

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.cli import main
from paceline.flows.no_gpu.request import NoGpuRequest, _configs, check_no_gpu
from paceline.tasks.errors import InputError
from paceline.tasks.model.networks.registry import build_network
from tests.integration.conftest import SMALL


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of the small network for all ten digits."""
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(build_network(load("digits", SMALL).model, (16, 16, 1), 10, 0).state_dict(), path)
    return str(path)


def refused(weights, *overrides, preset="digits", **fields):
    """The line that tells why."""
    config = load(preset, [*SMALL, *overrides] if preset == "digits" else list(overrides))
    request = NoGpuRequest(**{"preset": preset, "config": config, "pretrained": weights} | fields)
    with pytest.raises(InputError) as caught:
        check_no_gpu(request, Environment())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"repeats": 0}, "--repeats 0; each way runs at least once"),
        ({"target": 0.0}, "--target 0 is not an accuracy; give a share above 0, and at most 1"),
        ({"target": 1.5}, "--target 1.5 is not an accuracy"),
        ({"gpu": "G80"}, "--gpu G80: has no data sheet here; give one of T4, L4, A100, H100, H200"),
        ({"tuned": ["data.image_size=8"]}, "--fine-tune data.image_size=8 is not a setting of the recipe"),
        ({"tuned": ["recipe.num_epochs=0"]}, "fine-tuned: recipe.num_epochs"),
        ({"layer": "pond"}, "features: --layer pond: convblocks has no such layer; it has features"),
        ({"pretrained": "nowhere.pt"}, "fine-tuned: model.pretrained=nowhere.pt: no such file"),
        ({"pretrained": "n" * 300}, "n: no such file"),
    ],
)
def test_what_is_asked_wrongly(weights, fields, told):
    assert told in refused(weights, **fields)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.width=8"], "not [8, 1, 3, 3]; set model.name"),
        (["model.pretrained=a.pt"], "name the weights after --pretrained"),
        (["execution.accelerator=gpu"], "execution.accelerator=gpu cannot be used with paceline no-gpu"),
        (["execution.num_nodes=2"], "all ways run on one host"),
        (["data.validation_fraction=0"], "leaves no validation samples"),
        (["recipe.optimizer=muon"], "fine-tuned: recipe.backbone_rate=0.1 cannot be used with recipe.optimizer=muon"),
    ],
)
def test_what_the_ways_cannot_have_in_common(weights, overrides, told):
    assert told in refused(weights, *overrides)


@pytest.mark.parametrize(
    ("preset", "told"),
    [
        ("shapes", "model.name=unet predicts pixels, which have no classifier on features"),
        ("twohead", "data.source=rotated_digits has regression targets (angle)"),
    ],
)
def test_tasks_without_a_classifier_on_features(weights, preset, told):
    assert told in refused(weights, preset=preset)


def test_the_program_prints_the_fault_and_a_hint(weights, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert main(["no-gpu", "digits", *SMALL, "--pretrained", weights, "--target", "2"]) == 2
    assert main(["no-gpu", "digits", *SMALL]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 4
    assert "--target 2 is not an accuracy" in lines[0]
    assert "no-gpu needs --pretrained" in lines[2]
    assert list(tmp_path.iterdir()) == []


def test_the_ways_differ_in_how_they_begin_and_in_what_is_tuned_alone(weights):
    asked = ["recipe.learning_rate=0.05", "recipe.num_epochs=1"]
    request = NoGpuRequest(preset="digits", config=load("digits", SMALL), pretrained=weights, tuned=asked)
    scratch, tuned, features = (config.model_dump() for config in _configs(request).values())
    assert (scratch["model"]["pretrained"], scratch["recipe"]["backbone_rate"]) == (None, 1.0)
    assert (tuned["model"]["pretrained"], tuned["recipe"]["backbone_rate"]) == (weights, 0.1)
    assert (features["model"]["pretrained"], features["model"]["freeze"]) == (weights, "backbone")
    assert (tuned["recipe"]["learning_rate"], tuned["recipe"]["num_epochs"]) == (0.05, 1)
    assert scratch["recipe"] == features["recipe"] == load("digits", SMALL).recipe.model_dump()
    for section in ("data", "execution", "seed"):
        assert scratch[section] == tuned[section] == features[section]
