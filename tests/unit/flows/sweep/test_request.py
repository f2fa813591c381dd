"""What a sweep refuses before it asks anybody for anything."""

import pytest

from paceline.conf.environment import Environment
from paceline.conf.lightning import FIXED
from paceline.conf.load import load, validate
from paceline.flows.sweep.flow import check_sweep
from paceline.flows.sweep.trial import SweepRequest
from paceline.tasks.sweep.space import most_epochs, parse_parameters
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("overrides", "parameters", "wrong"),
    [
        ([], {"model.pretrained": "[a.pt,b.pt]"}, ["--param", "model.pretrained"]),
        (["model.pretrained=a.pt"], {"model.width": "int(8,16)"}, ["--param", "model.width", "model.pretrained=a.pt"]),
        ([], {"model.name": "[convblocks,dncnn]"}, ["--param", "model.name=dncnn", "SSIM"]),
        ([], {"model.depth": "int(0,3)"}, ["--param", "model.depth", 0]),
    ],
)
def test_trials_that_cannot_be_compared_are_refused(overrides, parameters, wrong):
    request = SweepRequest(preset="digits", config=load("digits", overrides), parameters=parameters)
    with refused(*wrong):
        check_sweep(request, Environment())


def test_the_longest_trial_says_how_many_epochs_there_may_be():
    config = load("digits", ["recipe.num_epochs=5"])
    assert most_epochs(config, parse_parameters(["recipe.num_epochs=int(2,9)"])) == 9
    assert most_epochs(config, parse_parameters(["recipe.num_epochs=[2,4]"])) == 4
    assert most_epochs(config, parse_parameters(["recipe.batch_size=[2,40]"])) == 5


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({}, "--minimize"),
        ({"objective": {"name": "val_loss", "goal": "minimize"}, "pruner": "asha"}, "--pruner"),
    ],
)
def test_what_a_sweep_of_own_code_cannot_do_is_refused(fields, setting):
    tree = {"lightning": {"settings": {"model": {"class_path": "acme.Tagger"}}}, "speedup": FIXED["speedup"]}
    config = validate(tree | {"execution": FIXED["execution"] | {"precision": "32-true"}})
    request = {"preset": "config.yaml", "config": config, "parameters": {"model.init_args.width": "[8,16]"}} | fields
    with refused(setting):
        check_sweep(SweepRequest.model_validate(request), Environment())


def test_a_metric_of_own_code_has_no_meaning_for_a_preset():
    objective = {"name": "val_loss", "goal": "maximize"}
    parameters = {"recipe.learning_rate": "log(1e-3,1)"}
    request = {"preset": "digits", "config": load("digits"), "parameters": parameters, "objective": objective}
    with refused("--maximize"):
        check_sweep(SweepRequest.model_validate(request), Environment())
