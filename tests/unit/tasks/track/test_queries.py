"""Runs found again in a store."""

import time

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.tasks.track import queries as search
from paceline.tasks.track import run as tracking
from paceline.tasks.track import store


def test_all_runs_are_found_however_many_an_answer_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(search, "MAX_RUNS", 2)
    site, config = Environment(), load("digits")
    experiment_id = store.check_store(site.tracking_uri, "many", site.artifact_root)
    begun = [
        tracking.begin(site.tracking_uri, experiment_id, config, {"paceline.role": role}).run_id
        for role in ("run", "arm", "run", "run", "arm", "run", "run")
    ]
    condition = "tags.`paceline.role` = 'run'"
    found = [run.run_id for run in search.find_runs(site.tracking_uri, "many", condition, None)]
    assert sorted(found) == sorted(begun[place] for place in (0, 2, 3, 5, 6))
    assert [run.run_id for run in search.find_runs(site.tracking_uri, "many", condition, 3)] == found[:3]
    assert len(search.find_runs(site.tracking_uri, "many")) == len(begun), "all of them are the default"
    assert search.find_runs(site.tracking_uri, "none such") == []


def test_what_is_logged_again_is_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    site = Environment()
    experiment_id = store.check_store(site.tracking_uri, "again", site.artifact_root)
    handle = tracking.begin(site.tracking_uri, experiment_id, load("digits"), {})
    for seconds in (300.0, 0.4):
        tracking.log_facts(handle, {"time/prepare_seconds": seconds}, {})
        time.sleep(0.01)
    (found,) = search.find_runs(site.tracking_uri, "again")
    assert found.metrics == {"time/prepare_seconds": 0.4}
