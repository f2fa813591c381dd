"""A flow takes the result of the check that its command made just before, and checks itself otherwise."""

import pytest

from paceline.conf.environment import Environment
from paceline.conf.load import load, load_plan, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.preflight import result_of, reusable
from paceline.flows.study.flow import check_study
from paceline.flows.study.trainings import StudyRequest
from paceline.tasks.data.sources import registry


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """The settings of each listing of a source."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    settings = []
    list_samples = registry.list_samples

    def count(data):
        settings.append(data)
        return list_samples(data)

    monkeypatch.setattr(registry, "list_samples", count)
    return settings


def study(**axes):
    config = load("digits", ["data.image_size=12"])
    return StudyRequest(preset="digits", config=config, axes={name.replace("__", "."): v for name, v in axes.items()})


def test_the_arms_of_a_study_share_one_listing_and_the_flow_makes_none(listed):
    request = study(recipe__learning_rate=["0.1", "0.2"], execution__precision=["32-true", "bf16-mixed"])
    arms = check_study(request, Environment())
    assert len(arms) == 4
    assert len(listed) == 1
    assert result_of(check_study, request, Environment()) is arms
    assert len(listed) == 1


def test_arms_with_other_data_are_listed_each(listed):
    check_study(study(data__image_size=["12", "16"]), Environment())
    assert sorted(data.image_size for data in listed) == [12, 16]


def test_a_result_holds_for_one_flow_and_for_its_own_request_and_environment(monkeypatch, tmp_path):
    calls = []

    @reusable
    def check(request, environment):
        calls.append(request)
        return len(calls)

    environment = Environment()
    assert check("a", environment) == 1
    assert result_of(check, "a", Environment()) == 1
    assert result_of(check, "a", environment) == 2, "the result was taken"
    assert result_of(check, "a", environment) == 3, "a flow leaves no result behind"
    check("a", environment)
    assert result_of(check, "b", environment) == 5, "another request"
    check("a", environment)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert result_of(check, "a", Environment()) == 7, "another environment"


def test_a_flow_that_resumes_without_a_command_checks_as_one_that_resumes():
    @reusable
    def check(request, environment, resume=None):
        return resume

    assert result_of(check, "a", Environment(), resume="one") == "one"


def test_a_run_reuses_its_check(listed):
    config = load("digits", ["data.image_size=12"])
    checked = preflight.check(config, Environment())
    assert result_of(preflight.check, config, Environment()) is checked
    assert len(listed) == 1


def test_the_ways_of_no_gpu_share_one_listing(listed, tmp_path):
    torch = pytest.importorskip("torch")
    from paceline.tasks.model.networks.registry import build_network

    config = load("digits", ["data.image_size=16", "model.width=4", "model.depth=1"])
    weights = tmp_path / "weights.pt"
    torch.save(build_network(config.model, (16, 16, 1), 10, 0).state_dict(), weights)
    plan = load_plan("no-gpu")
    config = make_config(config, [*plan.overrides, f"model.pretrained={weights}"])
    arms = plan.model_dump()["arms"]
    arms["features"]["linear_eval"] = "features"
    request = StudyRequest(preset="digits", config=config, arms=arms)
    assert len(check_study(request, Environment())) == 3
    assert len(listed) == 1
