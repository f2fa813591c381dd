"""What a sweep refuses before it asks anybody for anything."""

import pytest

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.sweep.flow import check_sweep
from paceline.flows.sweep.request import SweepRequest
from paceline.tasks.errors import InputError
from paceline.tasks.sweep.space import most_epochs, parse_parameters


@pytest.mark.parametrize(
    ("overrides", "parameters", "told"),
    [
        ([], {"model.pretrained": "[a.pt,b.pt]"}, "all trials begin with the same weights"),
        (["model.pretrained=a.pt"], {"model.width": "int(8,16)"}, "model.pretrained=a.pt fits one network"),
        ([], {"model.name": "[convblocks,dncnn]"}, "is judged by SSIM, and convblocks by accuracy"),
        ([], {"model.depth": "int(0,3)"}, "--param model.depth"),
    ],
)
def test_trials_that_cannot_be_compared_are_refused(overrides, parameters, told):
    request = SweepRequest(preset="digits", config=load("digits", overrides), parameters=parameters)
    with pytest.raises(InputError) as caught:
        check_sweep(request, Environment())
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_trial_says_how_many_epochs_there_may_be():
    config = load("digits", ["recipe.num_epochs=5"])
    assert most_epochs(config, parse_parameters(["recipe.num_epochs=int(2,9)"])) == 9
    assert most_epochs(config, parse_parameters(["recipe.num_epochs=[2,4]"])) == 4
    assert most_epochs(config, parse_parameters(["recipe.batch_size=[2,40]"])) == 5
