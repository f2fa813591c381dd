"""Signals and tables, trained on by `paceline run` and predicted by `paceline predict`, as a user does it."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.flows.predict.flow import PredictRequest, check_predict
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.sources import registry as source
from tests.support.pictures import make_pictures
from tests.support.refusals import refused
from tests.support.signals import make_sounds

SMALL = ["data.image_size=16", "data.signal.kind=stft", "model.width=8", "model.depth=1", "recipe.num_epochs=12"]
PLAIN = ["recipe.batch_size=8", "recipe.shift_pixels=1", "speedup.baseline=none", "track.experiment=signals"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("sounds")
    return root, make_sounds(root)


@pytest.fixture(scope="module")
def learned(call, sounds):
    """The summary of a run that has learned high from low."""
    return call("run", "signals", f"data.root={sounds[0]}", *SMALL, *PLAIN)


def test_sounds_are_told_apart_and_the_damaged_ones_counted(learned, sounds):
    assert learned["dataset"]["num_rejected"] == len(sounds[1])
    assert learned["evaluate"]["accuracy"] > 0.9
    run = MlflowClient(Environment().tracking_uri).get_run(learned["run_id"])
    assert run.data.params["data.signal.kind"] == "stft"
    assert run.data.params["data.signal.window_ms"] == "32.0"


def test_the_report_shows_spectrograms_with_their_units(learned, tmp_path):
    client = MlflowClient(Environment().tracking_uri)
    report = Path(client.download_artifacts(learned["run_id"], "report.html", str(tmp_path))).read_text()
    assert "1 s across, 0 to 8,000 Hz upwards (linear), 80 dB below the loudest" in report
    assert "mistakes" in report
    assert client.download_artifacts(learned["run_id"], "pictures/mistakes.png", str(tmp_path))


@pytest.mark.slow
def test_its_model_predicts_signals_as_it_was_trained_on_them(call, learned, tmp_path):
    damaged = make_sounds(tmp_path / "new", seed=9)
    found = call("predict", learned["run_id"], tmp_path / "new", "execution.precision=32-true")
    assert found["accuracy"] > 0.9
    assert found["num_rejected"] == len(damaged)
    table = pq.read_table(next(Path(found["out"]).glob("*.parquet"))).to_pylist()
    assert [row["label"] for row in table if row["path"] == "low/000.wav"] == ["low"]
    assert {row["path"] for row in table if row["error"]} == damaged


@pytest.mark.parametrize(
    ("source", "overrides", "wrong"),
    [
        ("digits", (), ["SOURCE", "digits"]),
        ("PICTURES", (), ["SOURCE", ".npy", ".wav"]),
        ("signals", ("data.signal.kind=log_mel", "data.root=SOUNDS"), ["data.signal.kind"]),
    ],
)
def test_what_it_cannot_predict_is_refused_before_any_work(learned, sounds, tmp_path, source, overrides, wrong):
    make_pictures(tmp_path / "pictures")
    places = {"PICTURES": str(tmp_path / "pictures"), "SOUNDS": str(sounds[0])}
    filled = tuple(override.replace("SOUNDS", places["SOUNDS"]) for override in overrides)
    request = PredictRequest(model=learned["run_id"], source=places.get(source, source), overrides=filled)
    with refused(*wrong):
        check_predict(request, Environment())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tones_are_told_apart_in_noise(call):
    learned = call("run", "tones", "speedup.baseline=none", "track.experiment=signals")
    assert learned["evaluate"]["accuracy"] > 0.95
    assert call("predict", learned["run_id"], "tones")["accuracy"] == pytest.approx(
        learned["evaluate"]["accuracy"], abs=0.01
    )


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.slow
def test_digits_in_a_table_are_learned(call, tmp_path):
    listing = source.list_samples(Data(source="digits", image_size=8))
    for split in ("train", "test"):
        found = read_pixels(listing.origin, listing.split(split), 8, 1)
        images = [png(image[..., 0]) for image in found.images_NHWC]
        labels = [listing.class_names[label] for label in listing.split(split).labels]
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / f"{split}.parquet", row_group_size=100)
    small = ["data.image_size=16", "model.width=8", "model.depth=1", "recipe.num_epochs=4", "recipe.shift_pixels=1"]
    learned = call("run", "arrays", f"data.root={tmp_path}", *small, *PLAIN[2:])
    assert learned["dataset"]["num_test"] == len(listing.test)
    assert learned["evaluate"]["accuracy"] > 0.5, "0.68 on 2026-11-22; by chance 0.1"
    # Of a network that has learned little bf16 tells other classes, and is refused.
    found = call("predict", learned["run_id"], "arrays", f"data.root={tmp_path}", "execution.precision=32-true")
    assert found["accuracy"] == pytest.approx(learned["evaluate"]["accuracy"], abs=0.03)
