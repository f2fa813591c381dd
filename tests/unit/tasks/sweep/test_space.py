"""What a sweep varies, read from text."""

import pytest

from paceline.conf.load import load
from paceline.tasks.errors import InputError
from paceline.tasks.sweep.space import num_proposals, parse_parameters, text_of
from tests.support.refusals import refused

FORMS = ["log(a,b)", "lin(a,b)", "int(a,b[,step])", "x,y,z"]


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
    ("text", "data"),
    [
        ("recipe.learning_rat=log(1,2)", ["recipe.learning_rate"]),
        ("recipe.learning_rate", FORMS),
        ("recipe.learning_rate=log(0,1)", [0, "lin(...)"]),
        ("recipe.learning_rate=log(1,a)", FORMS),
        ("recipe.learning_rate=log(1)", FORMS),
        ("recipe.learning_rate=log(1,2,3)", FORMS),
        ("recipe.learning_rate=lin(nan,1)", FORMS),
        ("recipe.learning_rate=lin(2,1)", [2, 1]),
        ("recipe.learning_rate=norm(1,2)", FORMS),
        ("model.width=int(8,20,8)", [8, 20, 16]),
        ("model.width=int(8,20,0)", [0, 1]),
        ("model.width=int(8.5,20)", ["int(...)", "lin(...)"]),
        ("data.image_size=[8,16]", ["recipe.*", "model.*", "seed"]),
        ("execution.precision=[32-true,bf16-mixed]", ["recipe.*", "study"]),
        ("recipe.optimizer=[sgd]", ["recipe.optimizer=[sgd]", 2]),
        ("recipe.optimizer=[sgd,sgd]", ["recipe.optimizer=[sgd,sgd]", 2]),
        ("recipe.optimizer=[sgd,{a: 1}]", FORMS),
        ("recipe.optimizer=[sgd,[a]", ["recipe.optimizer=[sgd,[a]", "YAML"]),
    ],
)
def test_what_cannot_be_swept_is_refused_with_a_reason(text, data):
    with refused("--param", text.partition("=")[0], *data):
        parse_parameters([text])


def test_a_sweep_varies_something_and_nothing_twice():
    with refused("--param", "recipe.learning_rate=log(1e-3,1)"):
        parse_parameters([])
    with refused("--param", "recipe.noise"):
        parse_parameters(["recipe.noise=[1,2]", "recipe.noise=lin(1,9)"])


def test_a_grid_has_a_number_and_a_range_has_none():
    parameters = parse_parameters(["model.width=int(8,32,8)", "recipe.optimizer=[sgd,adamw]"])
    assert num_proposals(None, True, parameters) == 8
    assert num_proposals(None, True, parameters) == 8
    assert num_proposals(5, True, parameters) == 5
    assert num_proposals(50, True, parameters) == 8
    assert num_proposals(50, False, parameters) == 50
    assert num_proposals(None, False, parameters) == 20
    with refused("--param", "--sampler", "grid", "tpe"):
        num_proposals(None, True, parse_parameters(["recipe.learning_rate=log(1e-3,1)"]))


def test_numbers_with_an_exponent_are_numbers_in_a_list_too():
    (parameter,) = parse_parameters(["recipe.learning_rate=[1e-3,0.1,1e30]"])
    assert parameter.choices == (1e-3, 0.1, 1e30)
    assert parameter.override(parameter.choices[0]) == "recipe.learning_rate=0.001"


def test_own_code_has_settings_of_lightning_cli():
    texts = ["model.init_args.width=int(8,32,8)", "optimizer.init_args.lr=log(1e-4,1e-1)"]
    assert [parameter.short for parameter in parse_parameters(texts, is_own=True)] == ["width", "lr"]
    with refused("--param", "execution.num_devices", "model", "optimizer"):
        parse_parameters(["execution.num_devices=[1,2]"], is_own=True)
    with pytest.raises(InputError, match=r"model\.init_args\.width is not a setting"):
        parse_parameters(texts)
