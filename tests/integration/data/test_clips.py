"""Clips, trained on by `paceline run` and predicted by `paceline predict`, as a user does it."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.flows.predict.flow import PredictRequest, check_predict
from paceline.tasks.train.launch.coordinator import train_group
from tests.support.clips import make_clips
from tests.support.pictures import make_pictures
from tests.support.refusals import refused

SMALL = ["data.image_size=16", "data.num_frames=4", "model.width=4", "recipe.num_epochs=20", "recipe.batch_size=4"]
PLAIN = ["recipe.augment=none", "recipe.learning_rate=0.01", "speedup.baseline=none", "track.experiment=clips"]
pytestmark = pytest.mark.slow
LIMIT = "data.max_rejected_fraction=0.3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("clips")
    return root, make_clips(root, per_class=15)


@pytest.fixture(scope="module")
def learned(call, made):
    """The summary of a run on videos and folders of frames."""
    return call("run", "clips", f"data.root={made[0]}", LIMIT, *SMALL, *PLAIN)


def test_clips_are_learned_and_the_damaged_ones_counted(learned, made, tmp_path):
    assert learned["dataset"]["num_rejected"] == len(made[1])
    assert learned["train"]["final_loss"] < 0.35, "less than half of what chance has"
    client = MlflowClient(Environment().tracking_uri)
    run = client.get_run(learned["run_id"])
    assert run.data.params["data.num_frames"] == "4"
    assert "test/accuracy" in run.data.metrics
    assert client.download_artifacts(learned["run_id"], "pictures/mistakes.png", str(tmp_path))


def test_what_it_cannot_predict_is_refused_before_any_work(learned, tmp_path):
    make_pictures(tmp_path / "pictures")
    wrong = {
        ("digits", ()): ["SOURCE", "digits", learned["run_id"]],
        ("motions", ("data.num_frames=6",)): ["data.num_frames", 6, 4],
        (str(tmp_path / "nothing"), ()): ["data.root", tmp_path / "nothing"],
    }
    for (source, overrides), expected in wrong.items():
        with refused(*expected):
            check_predict(PredictRequest(model=learned["run_id"], source=source, overrides=overrides), Environment())


def test_its_model_predicts_videos_as_it_was_trained_on_them(call, learned, tmp_path):
    damaged = make_clips(tmp_path / "new", per_class=10, seed=77)
    found = call("predict", learned["run_id"], tmp_path / "new", "execution.precision=32-true")
    assert found["num_rejected"] == len(damaged)
    assert found["accuracy"] > 0.7
    rows = [row for part in Path(found["out"]).glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    assert {row["path"] for row in rows if row["error"]} == damaged
    told = {row["path"]: row for row in rows}
    assert told["left/004/"]["true_label"] == "left", "a folder of frames is of the class that it lies in"
    assert sum(told["right/003.mkv"]["probabilities"]) == pytest.approx(1)


def test_two_ranks_take_the_steps_of_one(make_job, cluster_address):
    small = ["recipe.num_epochs=1", "recipe.batch_scaling=strong"]
    one, two = (
        train_group(make_job(*small, *more, preset="motions"), cluster_address)
        for more in ((), ("execution.num_devices=2",))
    )
    np.testing.assert_allclose(two.losses[:3], one.losses[:3], rtol=2e-2)  # batch norm is each rank's own
    assert len(two.predictions) == 2


@pytest.mark.timeout(900)
def test_motions_are_told_by_more_than_one_frame(call):
    learned = call("run", "motions", "speedup.baseline=none", "track.experiment=clips")
    assert learned["evaluate"]["accuracy"] > 0.95
    assert call("predict", learned["run_id"], "motions")["accuracy"] == pytest.approx(
        learned["evaluate"]["accuracy"], abs=0.01
    )
