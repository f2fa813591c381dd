import itertools
from collections import Counter

import pytest

from paceline.conf.load import load
from paceline.tasks.speedup.study.design import balanced_order, expand, parse_axes
from tests.support.refusals import refused

PRECISION = "execution.precision=32-true,bf16-mixed"
LOADING = "execution.loading=foreground,resident"


def make(overrides):
    return load("digits", overrides)


def test_a_grid_has_every_combination_and_the_first_values_are_the_baseline():
    arms = expand(make, parse_axes([PRECISION, "execution.num_devices=1,2"]))
    assert [arm.name for arm in arms] == [
        "precision=32-true, num_devices=1",
        "precision=32-true, num_devices=2",
        "precision=bf16-mixed, num_devices=1",
        "precision=bf16-mixed, num_devices=2",
    ]
    assert [arm.is_baseline for arm in arms] == [True, False, False, False]
    assert {arm.group for arm in arms} == {""}


@pytest.mark.parametrize("values", ["8,16", "[8,16]", " [ 8, 16 ] "])
def test_an_axis_has_the_grammar_of_a_list(values):
    assert parse_axes([f"model.width={values}"]) == {"model.width": ["8", "16"]}
    shares = parse_axes(["execution.worker_load=[1,1],[2,1]"])
    assert shares == {"execution.worker_load": ["[1,1]", "[2,1]"]}


def test_an_axis_that_changes_the_work_makes_groups_with_baselines_of_their_own():
    arms = expand(make, parse_axes(["model.width=8,16", PRECISION]))
    assert [(arm.group, arm.is_baseline) for arm in arms] == [
        ("model.width=8", True),
        ("model.width=8", False),
        ("model.width=16", True),
        ("model.width=16", False),
    ]


def test_a_ladder_adds_one_factor_at_a_time_and_tries_each_alone():
    arms = expand(
        make, parse_axes([PRECISION, LOADING, "execution.memory_format=contiguous,channels_last"]), ladder=True
    )
    assert [arm.rung for arm in arms] == [0, 1, 2, 3, None, None]
    assert [arm.factor for arm in arms[1:]] == [
        "precision=bf16-mixed",
        "loading=resident",
        "memory_format=channels_last",
        "loading=resident",
        "memory_format=channels_last",
    ]
    assert arms[3].name == "precision=bf16-mixed, loading=resident, memory_format=channels_last"
    assert arms[4].name == "precision=32-true, loading=resident, memory_format=contiguous"


@pytest.mark.parametrize(
    ("axes", "data"),
    [
        ([], ["execution.num_devices=1,2"]),
        (["execution.precision=32-true"], ["execution.precision=32-true", 2]),
        (["execution.precison=32-true,bf16-mixed"], ["execution.precison", "execution.precision"]),
        ([PRECISION, "execution.precision=64-true,32-true"], ["execution.precision=a,b,c"]),
        (["execution.precision=32-true,32-true"], ["execution.precision", "32-true"]),
        (["seed=1,2"], ["seed", "data", "model", "recipe", "execution"]),
        (["speedup.num_blocks=3,4"], ["speedup.num_blocks", "data", "model", "recipe", "execution"]),
    ],
)
def test_wrong_axes_are_refused(axes, data):
    with refused("--axis", *data):
        parse_axes(axes)


def test_an_impossible_arm_is_refused_by_name():
    with refused("recipe.batch_size", "num_devices=3", "recipe.batch_size=128"):
        expand(
            lambda overrides: load("digits", ["recipe.batch_scaling=strong", *overrides]),
            parse_axes(["execution.num_devices=1,3"]),
        )


def test_a_ladder_over_the_work_is_refused():
    with refused("--ladder", "--axis", "model.width"):
        expand(make, parse_axes(["model.width=8,16"]), ladder=True)


@pytest.mark.parametrize("num_arms", [2, 3, 4, 5, 6])
def test_over_whole_squares_every_arm_stands_at_every_place_equally_often(num_arms):
    names = [f"arm {number}" for number in range(num_arms)]
    orders = balanced_order(names, 2 * num_arms, seed=3)
    assert all(sorted(order) == names for order in orders)
    for place in range(num_arms):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    neighbours = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(set(neighbours.values())) == 1, "every arm follows every other one equally often"


def test_two_repeats_cancel_a_linear_drift():
    orders = balanced_order(["a", "b", "c", "d"], 2, seed=1)
    assert orders[1] == orders[0][::-1]


WIDTH, WORKERS = "model.init_args.width=8,16", "data.init_args.num_workers=0,2"


def test_axes_of_own_code_are_those_of_lightning_cli_and_its_loader_changes_no_work():
    axes = parse_axes([WIDTH, WORKERS], is_own=True)
    arms = expand(make_nothing, axes, is_own=True)
    assert [(arm.group, arm.is_baseline) for arm in arms] == [
        ("model.init_args.width=8", True),
        ("model.init_args.width=8", False),
        ("model.init_args.width=16", True),
        ("model.init_args.width=16", False),
    ]
    same = expand(make_nothing, axes, is_own=True, same_work=["model.init_args.width"])
    assert [(arm.group, arm.is_baseline) for arm in same] == [("", True), *[("", False)] * 3]
    assert (
        expand(make_nothing, parse_axes([WORKERS], is_own=True), is_own=True, ladder=True)[1].factor == "num_workers=2"
    )


def make_nothing(overrides):
    return load("digits")


def test_axes_of_own_code_are_refused_for_presets_and_in_other_sections():
    with refused("--axis", "model.init_args.width"):
        parse_axes([WIDTH])
    with refused("--axis", "optimiser.lr"):
        parse_axes(["optimiser.lr=1,2"], is_own=True)
    with refused("--axis", "seed_everything"):
        parse_axes(["seed_everything=1,2"], is_own=True)
