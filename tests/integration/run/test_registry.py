"""The hand-off of models in a real registry: who is champion, and what a model must reach for it."""

from types import SimpleNamespace
from uuid import uuid4

import pytest
from mlflow.tracking import MlflowClient
from prefect.logging import get_logger

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.lifecycle.promotion import promote, promote_finished
from paceline.flows.run.outcome import ModuleOutcome
from paceline.flows.run.registry import NO_WEIGHTS, OTHER_KIND, WORSE, register_model, register_module
from paceline.tasks.records.training import EvaluateResult, ModuleResult, TrainResult
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track import registry, store
from paceline.tasks.track import run as tracking
from tests.support.refusals import refused

NAME = "handed-on"
LOG = get_logger("paceline")


@pytest.fixture(scope="module")
def experiment():
    site = Environment()
    return store.check_store(site.tracking_uri, "registry", site.artifact_root)


@pytest.fixture
def finished(experiment):
    """Makes a run that has been trained to an accuracy: its outcome and its handle."""

    def make(accuracy, data="d0", **track):
        settings = [f"track.{key}={value}" for key, value in track.items()]
        config = load("digits", ["track.experiment=registry", f"track.register={NAME}", *settings])
        handle = tracking.begin(Environment().tracking_uri, experiment, config, {})
        tracking.log_document(handle, "model/model.json", "{}")
        outcome = SimpleNamespace(
            config=config,
            evaluated=EvaluateResult.model_construct(accuracy=accuracy),
            trained=TrainResult.model_construct(plain_score=accuracy),
            speedup=SpeedupResult(ratio=2.0, low=1.9, high=2.1),
            prepared=SimpleNamespace(fingerprint=data),
            workload="w",
        )
        return outcome, handle

    return make


def hand_on(outcome, handle):
    """Through the gate and on; what the summary says."""
    registered = register_model(outcome, None, handle)
    promote(registered, handle, LOG)
    return registered


def champion():
    return registry.champion(Environment().tracking_uri, NAME)


def test_models_are_handed_on_from_champion_to_champion(finished):
    assert champion() is None, "there is no such model yet"
    first = hand_on(*finished(0.95))
    assert (first["version"], champion().version) == ("1", "1")

    slightly_worse = hand_on(*finished(0.945))
    assert champion().version == slightly_worse["version"] == "2"
    assert (champion().score, champion().best_score) == (0.945, 0.95)
    worse_again = hand_on(*finished(0.937))
    assert worse_again["version"] is None, "a little worse each night is not let through"
    assert "the champions' best 0.9500" in worse_again["gate"]

    version = registry.champion(Environment().tracking_uri, NAME).version
    tags = MlflowClient(Environment().tracking_uri, Environment().tracking_uri).get_model_version(NAME, version).tags
    assert tags["paceline.accuracy"] == tags["paceline.score"] == "0.945"
    other, handle = finished(0.99)
    other.evaluated = EvaluateResult.model_construct(score_name="ssim", ssim=0.99)
    assert "by its accuracy: use another name" in hand_on(other, handle)["gate"]

    on_other_data = hand_on(*finished(0.94, data="d1"))
    assert "on other data" in on_other_data["gate"]
    assert champion().version == on_other_data["version"]
    assert champion().best_score == 0.94, "a best on other data says nothing here"
    assert hand_on(*finished(0.94, data="d1", min_accuracy=0.96))["version"] is None


def test_the_better_of_two_that_end_at_once_becomes_champion_and_a_resumed_run_has_one_version(finished):
    first, second = finished(0.96, data="d2"), finished(0.98, data="d2")
    of_first, of_second = (register_model(outcome, None, handle) for outcome, handle in (first, second))
    promote(of_second, second[1], LOG)
    promote(of_first, first[1], LOG)
    assert champion().version == of_second["version"], "the other one has become champion meanwhile, and is better"
    again = hand_on(*second)
    assert again["version"] == of_second["version"]
    version = registry._client(Environment().tracking_uri).get_model_version(NAME, again["version"])
    assert version.tags["paceline.speedup"] == "2.000 (1.900 to 2.100)"


def test_the_newest_model_of_own_code_is_champion_but_not_over_one_of_a_preset(finished):
    def hand_on_module(name, weights="weights.pt", judgement=None):
        outcome, handle = finished(0.0)
        config = outcome.config.model_copy(update={"track": outcome.config.track.model_copy(update={"register": name})})
        trained = ModuleResult.model_construct(weights=weights)
        facts = {"plan": None, "workload": "own", "hardware": None, "judgement": judgement}
        registered = register_module(ModuleOutcome(config=config, trained=trained, **facts), handle)
        promote(registered, handle, LOG)
        return registered

    assert [hand_on_module("own-code")["version"] for _ in range(2)] == ["1", "2"]
    assert registry.champion(Environment().tracking_uri, "own-code").version == "2"
    refused = hand_on_module("own-code", weights=None)
    assert (refused["version"], refused["gate"], refused["champion_before"]) == (None, NO_WEIGHTS, "2")
    worse = RegressionVerdict(verdict="regression", text="val_loss 3")
    assert hand_on_module("own-code", judgement=worse)["gate"] == WORSE
    hand_on(*finished(0.95, data="d3", max_accuracy_loss=0.9))
    assert hand_on_module(NAME)["gate"] == OTHER_KIND
    assert hand_on_module(None) is None


def test_a_model_whose_process_was_killed_before_its_promotion_is_promoted_once(finished):
    """As a guardian does it; the flow run of another process is left alone."""
    outcome, handle = finished(0.97, data="d4", register="killed")
    flow_run_id = uuid4()
    tracking.set_tags(handle, {"prefect.flow_run_id": str(flow_run_id), "paceline.role": "run"})
    tracking.log_document(handle, "summary.json", {"registered": register_model(outcome, None, handle)})
    promote_finished(Environment(), flow_run_id)
    assert registry.champion(Environment().tracking_uri, "killed") is None, "its run has not ended"
    tracking.finish(handle, "FINISHED")
    promote_finished(Environment(), uuid4())
    assert registry.champion(Environment().tracking_uri, "killed") is None
    promote_finished(Environment(), flow_run_id)
    assert registry.champion(Environment().tracking_uri, "killed").run_id == handle.run_id
    handle.client.delete_registered_model_alias("killed", "champion")
    promote_finished(Environment(), flow_run_id)
    assert registry.champion(Environment().tracking_uri, "killed") is None, "somebody has taken the alias away"


def test_a_version_that_is_deleted_before_its_promotion_does_not_keep_a_lost_run_waiting(finished, caplog):
    outcome, handle = finished(0.97, data="d5", register="deleted")
    flow_run_id = uuid4()
    tracking.set_tags(handle, {"prefect.flow_run_id": str(flow_run_id), "paceline.role": "run"})
    registered = register_model(outcome, None, handle)
    tracking.log_document(handle, "summary.json", {"registered": registered})
    tracking.finish(handle, "FINISHED")
    handle.client.delete_model_version("deleted", registered["version"])
    promote_finished(Environment(), flow_run_id)
    assert f"The model of run {handle.run_id} cannot be promoted" in caplog.text


def test_a_model_whose_summary_cannot_be_read_for_a_moment_is_promoted_later(finished, monkeypatch):
    outcome, handle = finished(0.97, data="d6", register="unreadable")
    flow_run_id = uuid4()
    tracking.set_tags(handle, {"prefect.flow_run_id": str(flow_run_id), "paceline.role": "run"})
    tracking.finish(handle, "FINISHED")
    promote_finished(Environment(), flow_run_id)  # without a summary there is nothing to wait for
    tracking.log_document(handle, "summary.json", {"registered": register_model(outcome, None, handle)})
    with monkeypatch.context() as patch, refused(None, handle.run_id):
        patch.setattr(MlflowClient, "download_artifacts", lambda *_: (_ for _ in ()).throw(OSError("away")))
        promote_finished(Environment(), flow_run_id)
    promote_finished(Environment(), flow_run_id)
    assert registry.champion(Environment().tracking_uri, "unreadable").run_id == handle.run_id
