import pytest

from paceline.conf.load import ConfigError, load
from paceline.conf.study_plan import load_plan, plan_names
from paceline.tasks.speedup.study.design import expand, parse_axes
from tests.support.refusals import refused


@pytest.mark.parametrize("name", [name for name in plan_names() if load_plan(name).axes])
def test_shipped_plans_make_arms(name):
    plan = load_plan(name)
    axes = parse_axes([f"{field}={','.join(values)}" for field, values in plan.axes.items()])
    arms = expand(lambda overrides: load(plan.preset, [*plan.overrides, *overrides]), axes, ladder=plan.ladder)
    assert len(arms) >= 2
    assert any(arm.is_baseline for arm in arms)


def test_a_plan_may_be_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: digits\naxes: {execution.num_threads: [1, 2]}\nrepeats: 6\n")
    assert load_plan(str(path)).axes == {"execution.num_threads": ["1", "2"]}


@pytest.mark.parametrize("text", ["- a", "preset: digits", "preset: digits\naxes: 3", "preset: [", "axes: {}\nx: 1"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with refused("--plan", path, kind=ConfigError):
        load_plan(str(path))


@pytest.mark.parametrize("name", ["nonsense", "n" * 300])
def test_an_unknown_plan_names_the_known(name):
    with refused("--plan", *plan_names(), kind=ConfigError):
        load_plan(name)
