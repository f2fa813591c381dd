"""What a sweep refuses before it asks anybody for anything."""

import pytest

from paceline.conf.environment import Environment
from paceline.conf.load import load
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
