import pytest

from paceline.conf.config import Config
from paceline.conf.lightning import FIXED, Lightning
from paceline.conf.load import load
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint, workload_fingerprint


def fingerprint(*overrides, data="d"):
    return workload_fingerprint(load("digits", list(overrides)).workload, data)


def test_eight_hex_digits():
    assert len(fingerprint()) == 8
    int(fingerprint(), 16)


@pytest.mark.parametrize("change", ["recipe.num_epochs=9", "model.width=8", "seed=7", "recipe.batch_size=64"])
def test_what_is_learned_changes_it(change):
    assert fingerprint(change) != fingerprint()


@pytest.mark.parametrize(
    "change", ["execution.precision=32-true", "execution.num_devices=2", "cluster.num_workers=1", "name=other"]
)
def test_how_it_is_run_does_not(change):
    assert fingerprint(change) == fingerprint()


def test_the_data_count_by_content_not_by_place():
    assert fingerprint(data="e") != fingerprint(data="d")
    roots = {workload_fingerprint(load("folder", [f"data.root={root}"]).workload, "d") for root in ("/a", "/b")}
    assert len(roots) == 1


def test_weights_to_begin_with_count_by_content_not_by_place():
    def of(path, weights):
        return workload_fingerprint(load("digits", [f"model.pretrained={path}"]).workload, "d", weights)

    assert of("/a.pt", "1" * 64) == of("models:/b@champion", "1" * 64) != of("/a.pt", "2" * 64)
    assert of("/a.pt", "1" * 64) != fingerprint()


def series(*overrides, devices="CPU, 2 cores", classes=("0", "1")):
    return series_fingerprint(load("digits", list(overrides)), devices, classes)


@pytest.mark.parametrize(
    "change", ["seed=7", "track.experiment=other", "speedup.baseline=none", "cluster.num_workers=1"]
)
def test_a_series_goes_on_where_speed_and_accuracy_should_not_change(change):
    assert series(change) == series()


@pytest.mark.parametrize(
    "change", ["recipe.num_epochs=9", "execution.precision=32-true", "name=other", "model.width=8"]
)
def test_other_settings_are_another_series(change):
    assert series(change) != series()


def test_the_default_of_checkpoints_has_changed_and_no_series_with_it():
    assert series() == series("execution.checkpoint_steps=null") != series("execution.checkpoint_steps=10")


def test_other_devices_classes_and_places_are_another_series():
    assert len({series(), series(devices="CPU, 4 cores"), series(classes=("cat", "dog"))}) == 3
    assert series("data.source=folder", "data.root=/a") != series("data.source=folder", "data.root=/b")


def own_series(depth, packages=("directory (code 0123456789ab)",), seed=1, **defaults):
    model = {"class_path": "acme.Tagger", "init_args": {"depth": depth}}
    settings = {"model": model | {"init_args": model["init_args"] | defaults}, "seed_everything": seed}
    own = Lightning(settings=settings, given={"model": model, "seed_everything": seed}, packages=packages)
    config = Config(lightning=own, **FIXED | {"execution": FIXED["execution"] | {"precision": "32-true"}})
    return series_fingerprint(config, "CPU, 2 cores", ())


def test_own_code_is_one_series_while_it_changes_and_another_with_other_settings():
    changed = own_series(2, packages=("directory (code ba9876543210)",), seed=7, width=32)
    assert changed == own_series(2) != own_series(3)


def test_code_fingerprint_is_stable():
    assert code_fingerprint() == code_fingerprint()
