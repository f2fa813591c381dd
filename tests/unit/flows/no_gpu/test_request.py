"""What the study "no GPU?" refuses before it asks anybody for anything."""

import json

import pytest
import torch

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.cli import main
from paceline.flows.no_gpu.request import NoGpuRequest, _configs, check_no_gpu
from paceline.tasks.model.networks.registry import build_network
from tests.integration.conftest import SMALL
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of the small network for all ten digits."""
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(build_network(load("digits", SMALL).model, (16, 16, 1), 10, 0).state_dict(), path)
    return str(path)


def check(weights, *overrides, preset="digits", **fields):
    config = load(preset, [*SMALL, *overrides] if preset == "digits" else list(overrides))
    request = NoGpuRequest(**{"preset": preset, "config": config, "pretrained": weights} | fields)
    check_no_gpu(request, Environment())


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"repeats": 0}, ["--repeats", 0]),
        ({"target": 0.0}, ["--target", 0]),
        ({"target": 1.5}, ["--target", 1.5]),
        ({"gpu": "G80"}, ["--gpu", "G80", "T4", "L4", "A100", "H100", "H200"]),
        ({"tuned": ["data.image_size=8"]}, ["--fine-tune", "data.image_size=8"]),
        ({"tuned": ["recipe.num_epochs=0"]}, ["recipe.num_epochs", "fine-tuned", 0]),
        ({"layer": "pond"}, ["--layer", "pond", "convblocks", "features.0"]),
        ({"pretrained": "nowhere.pt"}, ["model.pretrained", "fine-tuned", "nowhere.pt", ".safetensors"]),
        ({"pretrained": "n" * 300}, ["model.pretrained", "n" * 300, ".safetensors"]),
    ],
)
def test_what_is_asked_wrongly(weights, fields, wrong):
    with refused(*wrong):
        check(weights, **fields)


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["model.width=8"], ["model.pretrained", "features.0.weight", "model.width"]),
        (["model.pretrained=a.pt"], ["model.pretrained", "model.freeze", "--pretrained"]),
        (["execution.accelerator=gpu"], ["execution.accelerator", "no-gpu"]),
        (["execution.num_nodes=2"], ["execution.num_nodes", 2]),
        (["data.validation_fraction=0"], ["data.validation_fraction", "data.validation_fraction=0.0"]),
        (["recipe.optimizer=muon"], ["recipe.backbone_rate", "fine-tuned", "recipe.optimizer=muon"]),
    ],
)
def test_what_the_ways_cannot_have_in_common(weights, overrides, wrong):
    with refused(*wrong):
        check(weights, *overrides)


@pytest.mark.parametrize(
    ("preset", "wrong"),
    [
        ("shapes", ["model.name", "model.name=unet"]),
        ("twohead", ["data.source", "data.source=rotated_digits", "angle"]),
    ],
)
def test_tasks_without_a_classifier_on_features(weights, preset, wrong):
    with refused(*wrong):
        check(weights, preset=preset)


def test_the_program_prints_the_fault_and_a_hint(weights, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for arguments, setting in ((["--pretrained", weights, "--target", "2"], "--target"), ([], "--pretrained")):
        assert main(["no-gpu", "digits", *SMALL, *arguments, "--json"]) == 2
        printed = capsys.readouterr()
        assert json.loads(printed.out)["setting"] == setting
        assert len(printed.err.splitlines()) == 2
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
