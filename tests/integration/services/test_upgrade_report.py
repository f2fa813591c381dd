"""The report of an upgrade, on a store and a home that other versions have left."""

from types import SimpleNamespace

import pytest

from infra.services import upgrade
from infra.services.home import Home
from paceline.conf.data import Data
from paceline.conf.load import load
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.names import Tag
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store


@pytest.fixture
def site(tmp_path):
    return SimpleNamespace(
        facts={"mlflow_url": f"sqlite:///{tmp_path}/mlflow.db"},
        paceline_home=tmp_path,
        home=Home(tmp_path / "services"),
    )


def add_set(home, letter, **versions):
    """A prepared set of the digits, which other versions may have made."""
    key, data = letter * 64, Data(source="digits", image_size=8)
    listing = registry.list_samples(data)
    with store.temporary(home, key) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = manifest.build(listing, data, key, records, 0)
        facts = facts.model_copy(update={"provenance": facts.provenance | versions})
        return store.publish(home, directory, facts, []).name


@pytest.mark.parametrize("package", ["scikit-learn", "numpy", "transform", "gone"])
def test_each_version_that_decides_on_a_set_is_compared(site, package):
    same, other = add_set(site.paceline_home, "a"), add_set(site.paceline_home, "b", **{package: "0.1"})
    found = dict(upgrade._prepared(site))
    assert found[same] is None
    assert found[other].startswith(f"made with {package} 0.1, and now it is ")
    assert found[other].endswith("; it is prepared again")


def test_a_set_names_each_package_of_its_key(tmp_path):
    path = tmp_path / "prepared" / add_set(tmp_path, "a")
    facts = manifest.read(path).provenance
    assert {"numpy", "pillow", "simplejpeg", "scikit-learn", "transform"} <= set(facts)


def test_a_workload_that_is_another_one_now_or_is_gone_is_named(site):
    uri = site.facts["mlflow_url"]
    experiment = check_store(uri, "paceline", (site.paceline_home / "artifacts").as_uri())
    config, runs = load("digits"), []
    now = workload_fingerprint(config.workload, "0a1b2c3d")
    for workload in (now, "ffffffff", "eeeeeeee"):
        handle = tracking.begin(
            uri, experiment, config, {Tag.ROLE: "run", Tag.WORKLOAD: workload, Tag.DATASET: "0a1b2c3d"}
        )
        tracking.log_config(handle, config)
        if workload == "eeeeeeee":
            handle.client.log_text(handle.run_id, "recipe: {gone: 1}\n", "config.yaml")
        tracking.finish(handle, "FINISHED")
        runs.append(handle.run_id)
    found = dict(upgrade._workloads(site))
    assert found[f"{now} (run {runs[0]})"] is None
    assert found[f"ffffffff (run {runs[1]})"] == f"it is {now} now; its next run is not compared with those before"
    assert "recipe.gone" in found[f"eeeeeeee (run {runs[2]})"]


def test_a_service_whose_preset_or_setting_is_gone_is_named(site):
    serve = site.home.root / "serve"
    serve.mkdir(parents=True)
    lines = {
        "good": 'digits recipe.num_epochs=1 --cron "0 2 * * *"',
        "preset": "nothing",
        "setting": "digits recipe.gone=1",
    }
    for name, text in lines.items():
        (serve / name).write_text(text)
    found = dict(upgrade._served(site))
    assert found["good"] is None
    assert "nothing" in found["preset"]
    assert "recipe.gone" in found["setting"]
    assert str(serve / "setting") in found["setting"]
