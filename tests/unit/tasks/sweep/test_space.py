"""What a sweep varies, read from text."""

import pytest

from paceline.conf.load import load
from paceline.tasks.errors import InputError
from paceline.tasks.sweep.space import grid_size, num_proposals, parse_parameters, text_of


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("recipe.batch_size=int(16,64,16)", (16, 64)),
        ("recipe.optimizer=[sgd,adamw]", ("sgd", "adamw")),
        ("recipe.optimizer=sgd,adamw", ("sgd", "adamw")),
        ("recipe.num_epochs=[1,2]", (1, 2)),
        ("seed=int(1,9)", (1, 9)),
    ],
)
def test_ends_and_choices_are_tried(text, tried):
    (parameter,) = parse_parameters([text])
    assert parameter.test_values() == tried


@pytest.mark.parametrize("kind", ["log", "lin"])
def test_a_range_is_tried_inside_too_so_that_whole_numbers_refuse_it(kind):
    (parameter,) = parse_parameters([f"recipe.learning_rate={kind}(0.25,1)"])
    low, inside, high = parameter.test_values()
    assert (low, high) == (0.25, 1.0)
    assert low < inside < high
    assert inside != int(inside)


@pytest.mark.parametrize("value", [1e-05, 0.1 + 0.2, 3, True, False, None, "adamw", 1e300])
def test_a_value_comes_back_from_its_text(value):
    field = {str: "recipe.optimizer", bool: "speedup.diagnose"}.get(type(value), "recipe.learning_rate")
    if value is None:
        field = "cluster.min_workers"
    config = load("digits", [f"{field}={text_of(value)}"])
    section, name = field.split(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recipe.learning_rat=log(1,2)", "did you mean recipe.learning_rate?"),
        ("recipe.learning_rate", "names no values; write log(a,b)"),
        ("recipe.learning_rate=log(0,1)", "no 0; start above 0 or use lin"),
        ("recipe.learning_rate=log(1,a)", "'1,a' is not a list of numbers"),
        ("recipe.learning_rate=log(1)", "is not understood"),
        ("recipe.learning_rate=log(1,2,3)", "is not understood"),
        ("recipe.learning_rate=lin(nan,1)", "is not understood"),
        ("recipe.learning_rate=lin(2,1)", "2 is not below 1"),
        ("recipe.learning_rate=norm(1,2)", "is not understood; write log(a,b), lin(a,b), int(a,b[,step]) or x,y,z"),
        ("model.width=int(8,20,8)", "steps of 8 do not lead from 8 to 20; end at 16"),
        ("model.width=int(8,20,0)", "use a step of 1 or more"),
        ("model.width=int(8.5,20)", "takes whole numbers"),
        ("data.image_size=[8,16]", "share their data and are executed alike"),
        ("execution.precision=[32-true,bf16-mixed]", "compare executions with paceline study"),
        ("recipe.optimizer=[sgd]", "2 or more values"),
        ("recipe.optimizer=[sgd,sgd]", "each named once"),
        ("recipe.optimizer=[sgd,{a: 1}]", "is not a list of plain values"),
        ("recipe.optimizer=[sgd,[a]", "is not a plain value"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_a_reason(text, told):
    with pytest.raises(InputError, match=r"^--param") as refused:
        parse_parameters([text])
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_sweep_varies_something_and_nothing_twice():
    with pytest.raises(InputError, match="varies nothing"):
        parse_parameters([])
    with pytest.raises(InputError, match=r"recipe\.noise is given twice"):
        parse_parameters(["recipe.noise=[1,2]", "recipe.noise=lin(1,9)"])


def test_a_grid_has_a_number_and_a_range_has_none():
    parameters = parse_parameters(["model.width=int(8,32,8)", "recipe.optimizer=[sgd,adamw]"])
    assert grid_size(parameters) == 8
    assert num_proposals(None, True, parameters) == 8
    assert num_proposals(5, True, parameters) == 5
    assert num_proposals(50, True, parameters) == 8
    assert num_proposals(50, False, parameters) == 50
    assert num_proposals(None, False, parameters) == 20
    with pytest.raises(InputError, match="--sampler grid tries them all"):
        grid_size(parse_parameters(["recipe.learning_rate=log(1e-3,1)"]))


def test_numbers_with_an_exponent_are_numbers_in_a_list_too():
    (parameter,) = parse_parameters(["recipe.learning_rate=[1e-3,0.1,1e30]"])
    assert parameter.choices == (1e-3, 0.1, 1e30)
    assert parameter.override(parameter.choices[0]) == "recipe.learning_rate=0.001"
