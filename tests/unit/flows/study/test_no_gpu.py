"""What a study with arms refuses before it asks anybody for anything."""

import json
from argparse import Namespace

import pytest
import torch
import yaml

from paceline.conf.environment import Environment
from paceline.conf.load import PLANS, load
from paceline.flows.cli import main
from paceline.flows.commands.study import no_gpu_request
from paceline.flows.study.flow import check_study
from paceline.flows.study.trainings import StudyRequest
from paceline.tasks.model.networks.registry import build_network
from tests.integration.conftest import SMALL
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of the small network for all ten digits."""
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(build_network(load("digits", SMALL).model, (16, 16, 1), 10, 0).state_dict(), path)
    return str(path)


def make(weights, *overrides, preset="digits", **fields):
    """The request of `paceline no-gpu`."""
    overrides = [*SMALL, *overrides] if preset == "digits" else list(overrides)
    unset = dict.fromkeys(("fine_tune", "layer", "target", "repeats", "gpu"))
    options = Namespace(**unset | {"preset": preset, "overrides": overrides, "pretrained": weights} | fields)
    return StudyRequest.model_validate(no_gpu_request(options))


def check(weights, *overrides, **fields):
    return check_study(make(weights, *overrides, **fields), Environment())


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"repeats": 0}, ["--repeats", "repeats=0"]),
        ({"target": 0.0}, ["--target", 0]),
        ({"target": 1.5}, ["--target", 1.5]),
        ({"gpu": "G80"}, ["--gpu", "G80", "T4", "L4", "A100", "H100", "H200"]),
        ({"fine_tune": ["data.image_size=8"]}, ["--fine-tune", "data.image_size=8"]),
        ({"fine_tune": ["recipe.num_epochs=0"]}, ["recipe.num_epochs", "fine-tuned", 0]),
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
        (["model.pretrained=a.pt"], ["model.pretrained", "--pretrained"]),
        (["execution.accelerator=gpu"], ["execution.accelerator", "no-gpu"]),
        (["execution.num_nodes=2"], ["execution.num_nodes", 2]),
        (["data.validation_fraction=0"], ["data.validation_fraction", "data.validation_fraction=0.0"]),
        (["recipe.optimizer=muon"], ["recipe.backbone_rate", "recipe.optimizer=muon"]),
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
        check(weights, "recipe.optimizer=adamw", preset=preset)


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
    arms = check(weights, fine_tune=asked)
    scratch, tuned, features = (arm.config.model_dump() for arm in arms)
    assert [arm.arm.is_baseline for arm in arms] == [True, False, False]
    assert (scratch["model"]["pretrained"], scratch["recipe"]["backbone_rate"]) == (None, 1.0)
    assert (tuned["model"]["pretrained"], tuned["recipe"]["backbone_rate"]) == (weights, 0.1)
    assert (features["model"]["pretrained"], features["model"]["freeze"]) == (weights, "backbone")
    assert (tuned["recipe"]["learning_rate"], tuned["recipe"]["num_epochs"]) == (0.05, 1)
    assert scratch["recipe"] == features["recipe"] == load("digits", SMALL).recipe.model_dump()
    for section in ("data", "execution", "seed"):
        assert scratch[section] == tuned[section] == features[section]


def test_a_rate_of_the_backbone_is_that_of_fine_tuning(weights):
    scratch, tuned, features = (arm.config.recipe for arm in check(weights, "recipe.backbone_rate=0.3"))
    assert (scratch.backbone_rate, tuned.backbone_rate, features.backbone_rate) == (1.0, 0.3, 1.0)


@pytest.mark.parametrize(
    ("arms", "wrong"),
    [
        ({"from scratch": {}}, ["--plan", "fine-tuned", "features"]),
        ({"from scratch": {}, "fine-tuned": {}, "features": {}}, ["--plan", "linear_eval"]),
        (
            {"from scratch": {}, "fine-tuned": {"overrides": ["seed=3"]}, "features": {"linear_eval": "pool"}},
            ["seed", "seed=3", "fine-tuned"],
        ),
    ],
)
def test_arms_that_cannot_be_compared(weights, arms, wrong):
    request = StudyRequest.model_validate(make(weights).model_dump(mode="json") | {"arms": arms})
    with refused(*wrong):
        check_study(request, Environment())


def test_the_long_form_refuses_what_the_plan_cannot_have(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    both = tmp_path / "both.yaml"
    tree = yaml.safe_load((PLANS / "no-gpu.yaml").read_text(encoding="utf-8"))
    both.write_text(yaml.safe_dump(tree | {"axes": {"execution.precision": ["32-true", "bf16-mixed"]}}))
    for arguments, setting in (
        (["--plan", "no-gpu", "--axis", "execution.precision=32-true,bf16-mixed"], "--axis"),
        (["--plan", "no-gpu", "--ladder"], "--ladder"),
        (["--plan", str(both)], "--plan"),
    ):
        assert main(["study", "digits", *SMALL, *arguments, "model.pretrained=w.pt", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["setting"] == setting
