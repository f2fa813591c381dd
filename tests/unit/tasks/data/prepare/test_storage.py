"""The stored size and the form of images: what `auto` chooses, and what is refused."""

from pathlib import Path

import psutil
import pytest

from paceline.conf.data import Data
from paceline.conf.load import load
from paceline.tasks.data import key
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.listing import Origin, SampleListing
from paceline.tasks.data.prepare import storage
from paceline.tasks.data.prepare.storage import choose_storage, decode_rate
from paceline.tasks.data.samples import Sample, Samples
from paceline.tasks.fingerprint import workload_fingerprint
from tests.support.refusals import refused

PHOTOS = Data(source="folder", root="x", image_size=224, stored_size=258)


def listing(num_samples=10, **changes):
    samples = Samples.of(Sample(f"{index}.jpg", index % 2, 900) for index in range(num_samples))
    none = Samples.of(())
    return SampleListing(
        changes.pop("origin", Origin("files")), ("a", "b"), samples, none, none, **{"channels": 3, **changes}
    )


@pytest.mark.parametrize(
    ("overrides", "stored"),
    [
        ([], 224),
        (["recipe.vary.crop_scale=[0.08,1]"], 258),
        (["recipe.vary.crop_scale=[0.1,0.25]"], 448),
        (["recipe.vary.crop_scale=[0.08,1]", "data.stored_size=224"], 224),
        (["data.stored_size=300"], 300),
        (["recipe.vary.crop_scale=[0.08,1]", "data.fit=crop"], 224),
        (["recipe.vary.crop_scale=[0.08,1]", "data.source=cifar10"], 224),
        (["recipe.vary.crop_scale=[0.08,1]", "data.source=digits", "data.root=null"], 224),
    ],
)
def test_the_stored_size_is_that_of_the_crops(overrides, stored):
    config = load("folder", ["data.root=x", "data.image_size=224", *overrides])
    side, reason = config.stored_size
    assert (side, config.stored_data.stored_side) == (stored, stored)
    assert reason


def test_the_preset_for_photographs_stores_them_larger_and_no_other_preset_does():
    assert load("imagenet", ["data.root=x"]).stored_data.keeps_aspect
    assert not load("cifar10", ["data.root=x"]).stored_data.keeps_aspect
    assert not load("folder", ["data.root=x"]).stored_data.keeps_aspect


def test_settings_that_change_nothing_leave_workloads_and_keys_as_they_were():
    plain = load("folder", ["data.root=x"])
    explicit = load("folder", ["data.root=x", f"data.stored_size={plain.data.image_size}", "data.storage=raw"])
    keys = {preparation_key(listing(), config.stored_data) for config in (plain, explicit)}
    assert len(keys) == 1
    assert workload_fingerprint(plain.workload, "d") == "ce8a878b"
    photos = [PHOTOS.model_copy(update=update) for update in ({}, {"storage": "jpeg"}, {"stored_size": 300})]
    better = photos[1].model_copy(update={"jpeg_quality": 95})
    assert len({preparation_key(listing(), data) for data in (*photos, better)} | keys) == 5


def test_photographs_that_were_scaled_in_another_way_are_prepared_again(monkeypatch):
    square = load("folder", ["data.root=x"]).stored_data
    before = [preparation_key(listing(), data) for data in (PHOTOS, square)]
    monkeypatch.setattr(key, "PHOTOGRAPH_VERSION", 1)
    after = [preparation_key(listing(), data) for data in (PHOTOS, square)]
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["data.stored_size=63"], ["data.stored_size", 63, "data.image_size=64", "data.stored_size=64"]),
        (["data.fit=crop", "data.stored_size=80"], ["data.stored_size", 80, "data.fit=crop"]),
        (["data.source=pairs", "model.name=unet", "data.stored_size=80"], ["data.stored_size", "data.source=pairs"]),
        (["data.source=pairs", "model.name=unet", "data.storage=jpeg"], ["data.storage", "data.storage=raw"]),
        (["data.source=signals", "data.storage=jpeg"], ["data.storage", "data.source=signals"]),
        (["data.source=clips", "model.name=sequence", "data.storage=jpeg"], ["data.storage", "data.source=clips"]),
        (["data.source=digits", "data.root=null", "data.stored_size=80"], ["data.stored_size", "data.source=digits"]),
        (["data.jpeg_quality=20"], ["data.jpeg_quality", 50, 20]),
    ],
)
def test_what_cannot_be_stored_so_is_refused(overrides, wrong):
    with refused(*wrong):
        load("folder", ["data.root=x", *overrides])


@pytest.mark.parametrize("changes", [{"num_planes": 1}, {"target_names": ("angle",)}])
@pytest.mark.parametrize("update", [{"storage": "jpeg", "stored_size": 224}, {}])
def test_samples_that_are_more_than_images_are_refused_where_the_listing_shows_it(tmp_path, changes, update):
    data = PHOTOS.model_copy(update=update)
    with refused("data.storage" if update else "data.stored_size"):
        choose_storage(listing(**changes), data, tmp_path)
    squares = Data(source="folder", root="x")
    assert choose_storage(listing(**changes), squares, tmp_path).value == "raw"
    assert list(tmp_path.iterdir()) == []


def test_auto_chooses_by_size_and_measured_rate_and_keeps_a_set_that_is_there(tmp_path, monkeypatch):
    few, many = listing(100), listing(100_000)
    monkeypatch.setattr(psutil, "virtual_memory", _Memory)
    assert choose_storage(few, PHOTOS, tmp_path).value == "raw"
    rates = {"fast": 900.0, "slow": 3.0}
    for name, chosen in (("fast", "jpeg"), ("slow", "raw")):
        monkeypatch.setattr(storage, "decode_rate", lambda *_, rate=rates[name]: rate)
        monkeypatch.setattr(storage, "usable_cores", lambda: 4)
        choice = choose_storage(many, PHOTOS, tmp_path)
        assert choice.value == chosen
        assert f"{4 * rates[name]:,.0f}" in choice.reason
    key = preparation_key(many, PHOTOS.model_copy(update={"storage": "jpeg"}))
    Path(storage.store.directory_of(tmp_path, key)).mkdir(parents=True)
    assert choose_storage(many, PHOTOS, tmp_path).value == "jpeg", "whatever this host decodes"
    assert choose_storage(many, PHOTOS.model_copy(update={"storage": "raw"}), tmp_path).value == "raw"


class _Memory:
    total = 2**34


def test_the_decode_rate_is_measured(monkeypatch):
    monkeypatch.setattr(storage, "MEASURED_SECONDS", 0.01)
    assert decode_rate(32, 3, 90) > decode_rate(512, 3, 90) > 10
    assert decode_rate(32, 1, 90) > 10
