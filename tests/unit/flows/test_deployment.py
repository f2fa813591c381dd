"""Schedules and their time zones."""

import zoneinfo
from typing import get_args

import pytest

from paceline.conf.config import Config, Overlap
from paceline.conf.lightning import FIXED, Lightning
from paceline.conf.load import load
from paceline.flows.commands.serve import OVERLAPS, make_root_absolute
from paceline.flows.deployment import deployment_of, local_timezone, schedule_of
from tests.support.own_package import install, on_path
from tests.support.refusals import refused


def test_a_schedule_has_a_time_zone():
    schedule = schedule_of("0 2 * * *", "Europe/Zurich")
    assert (schedule.cron, schedule.timezone) == ("0 2 * * *", "Europe/Zurich")
    assert local_timezone() in zoneinfo.available_timezones()


@pytest.mark.parametrize(
    ("cron", "zone", "wrong"),
    [
        ("0 25 * * *", "UTC", ["--cron", 25]),
        ("nightly", "UTC", ["--cron", "nightly"]),
        ("0 2 * * *", "Mars", ["--timezone", "Mars", "Europe/Zurich"]),
    ],
)
def test_what_is_no_schedule_is_refused(cron, zone, wrong):
    with refused(*wrong):
        schedule_of(cron, zone)


@pytest.mark.parametrize(
    ("overlap", "strategy"), [("queue", "ENQUEUE"), ("skip", "CANCEL_NEW"), ("cancel-oldest", None)]
)
def test_the_policy_becomes_a_limit_or_a_tag(overlap, strategy):
    deployment = deployment_of(load("digits"), "nightly", schedule_of("0 2 * * *", "UTC"), overlap)
    options = deployment.concurrency_options
    assert (options and options.collision_strategy.name) == strategy
    assert f"overlap:{overlap}" in deployment.tags
    assert deployment.entrypoint == "paceline.flows.run.flow.run_pipeline"
    assert deployment.parameters["config"]["name"] == "digits"


def test_a_deployment_of_own_code_has_what_its_author_has_written():
    given = {"model": {"class_path": "acme.Tagger"}}
    own = Lightning(settings={"model": given["model"] | {"init_args": {"width": 8}}}, given=given, code="/home/me")
    config = Config(lightning=own, **FIXED | {"execution": FIXED["execution"] | {"precision": "32-true"}})
    deployment = deployment_of(config, "nightly", schedule_of("0 2 * * *", "UTC"), "queue")
    assert deployment.entrypoint == "paceline.flows.run.lightning.run_lightning"
    assert deployment.parameters["config"]["lightning"]["settings"] == given
    assert deployment.parameters["config"]["lightning"]["code"] == "/home/me"


def test_the_command_offers_what_there_is():
    assert get_args(Overlap) == OVERLAPS


def test_a_served_run_finds_its_data_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_root_absolute(load("folder", ["data.root=images"])).data.root == str(tmp_path / "images")
    assert make_root_absolute(load("folder", ["data.root=s3://bucket/images"])).data.root == "s3://bucket/images"
    assert make_root_absolute(load("folder", ["data.root=zip::images.zip"])).data.root == "zip::images.zip"
    assert make_root_absolute(load("digits")) == load("digits")


def test_of_a_source_of_ones_own_only_a_path_is_made_absolute(tmp_path, monkeypatch):
    """Its root may be anything, such as the name of a data base."""
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "rowspack", {"rows": "class Rows: pass"}, {"rows": "rows:Rows"})
    monkeypatch.chdir(tmp_path)
    with on_path(tmp_path / "site"):
        config = load("folder", ["data.source=rows", "data.root=postgres"])
        assert make_root_absolute(config) == config
        (tmp_path / "postgres").mkdir()
        assert make_root_absolute(config).data.root == str(tmp_path / "postgres")
