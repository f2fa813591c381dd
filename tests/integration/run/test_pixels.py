"""Something of every pixel: classes and images without noise, trained, evaluated and accounted for like all else."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from paceline.conf.environment import Environment
from paceline.flows.predict.flow import PredictRequest, check_predict
from paceline.tasks.evaluate.metrics import evaluate_statistics
from paceline.tasks.predict.job import cut
from paceline.tasks.predict.part import check_parity, finished_record, predict_part
from paceline.tasks.scores import mean_iou
from paceline.tasks.train.launch.coordinator import TrainJob, train_group
from tests.support.refusals import refused

SMALL = {
    "shapes": ["data.image_size=16", "model.width=6", "model.depth=2", "recipe.num_epochs=2"],
    "textures": ["data.image_size=16", "model.width=8", "model.depth=3", "recipe.num_epochs=2"],
}
PLAIN = ["recipe.warmup_epochs=0.5", "recipe.batch_size=64", "speedup.baseline=none"]


@pytest.fixture(scope="module")
def run(paceline):
    """Runs a preset to its end; its summary and what it told."""

    def to_the_end(preset, *overrides):
        process = paceline("run", preset, *overrides, "track.experiment=pixels", "--json")
        stdout, stderr = process.communicate(timeout=850)
        assert process.returncode == 0, stderr
        return json.loads(stdout.splitlines()[-1]), stderr

    return to_the_end


@pytest.fixture(scope="module", params=["shapes", pytest.param("textures", marks=pytest.mark.slow)])
def small(request, run):
    return request.param, *run(request.param, *SMALL[request.param], *PLAIN)


def test_a_run_tells_its_score_everywhere(small, tmp_path):
    preset, summary, told = small
    name = {"shapes": "mean_iou", "textures": "ssim"}[preset]
    found = summary["evaluate"]
    assert found["score_name"] == name
    client = MlflowClient(Environment().tracking_uri)
    metrics = client.get_run(summary["run_id"]).data.metrics
    assert metrics[f"test/{name}"] == metrics["test/score"] == pytest.approx(found[name])
    assert len(client.get_metric_history(summary["run_id"], f"validation/{name}")) == 2
    report = Path(client.download_artifacts(summary["run_id"], "report.html", str(tmp_path))).read_text()
    assert client.download_artifacts(summary["run_id"], "pictures/examples.png", str(tmp_path))
    if preset == "shapes":
        assert set(found["per_class_iou"]) == {"background", "disc", "square", "triangle"}
        assert 0.1 < found["mean_iou"] < found["accuracy"] < 1
        assert f"mean IoU {found['mean_iou']:.2%}" in told
        assert "Pixel accuracy" in report
    else:
        assert found["accuracy"] is None
        assert found["psnr_db"] > found["noisy_psnr_db"] + 0.2, "it takes noise off"
        assert 20 < found["noisy_psnr_db"] < 22, "as much as was asked for: 25 of 255 are 20.2 dB, less what is clipped"
        assert "dB over the noisy image" in report
    assert report.count("<svg") >= 2


def test_a_model_says_of_the_test_split_what_its_evaluation_has_said(small, tmp_path):
    """In the reduced precision of the run as well, and in float32."""
    preset, summary, _ = small
    for precision in (summary["execution"]["precision"], "32-true"):
        overrides = (*SMALL[preset], f"execution.precision={precision}")
        request = PredictRequest(model=summary["run_id"], source=preset, overrides=overrides, out=str(tmp_path / "out"))
        cleared = check_predict(request, Environment())
        (part,) = cut(cleared.images, tmp_path, cleared.key, 1)
        record = predict_part(part, cleared.settings)
        assert record.num_samples == summary["dataset"]["num_test"]
        parity = check_parity(part, cleared.settings)[0]
        assert parity.agreement > 0.99
        if preset == "shapes":
            assert mean_iou(record.class_pixels) == pytest.approx(summary["evaluate"]["mean_iou"], abs=0.01)
            assert record.num_correct / record.num_known == pytest.approx(summary["evaluate"]["accuracy"], abs=0.01)
        else:
            rows = pq.read_table(part.path).to_pylist()
            assert all(Image.open(io.BytesIO(row["image"])).size == (16, 16) for row in rows)
            assert np.mean([row["change"] for row in rows]) > 1, "something is taken off even where no noise was added"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Pictures of any size and without masks, one of them damaged."""
    root, rng = tmp_path_factory.mktemp("plain"), np.random.default_rng(0)
    for number in range(5):
        (root / f"day-{number % 2}").mkdir(exist_ok=True)
        pixels = rng.integers(0, 255, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"day-{number % 2}" / f"{number}.png")
    (root / "broken.png").write_bytes(b"no picture")
    return root


@pytest.mark.slow
def test_plain_pictures_are_predicted_and_what_is_done_is_not_done_again(small, plain, paceline, tmp_path):
    preset, summary, _ = small
    arguments = ("predict", summary["run_id"], str(plain), "--out", str(tmp_path / "out"), "track.experiment=pixels")
    process = paceline(*arguments, "--json")
    stdout, stderr = process.communicate(timeout=120)
    if preset == "textures":
        assert process.returncode == 2, stderr
        assert "images of 3 channels, and the model" in stderr
        return
    assert process.returncode == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    assert (found["num_samples"], found["num_rejected"], found["mean_iou"], found["accuracy"]) == (5, 1, None, None)
    assert found["class_names"] == ["background", "disc", "square", "triangle"]
    assert "the pixels of 5 images get the same class" in stderr
    assert "the source has no masks" in stderr
    (part,) = sorted((tmp_path / "out").glob("part-*.parquet"))
    rows = pq.read_table(part).to_pylist()
    assert [row["path"] for row in rows if row["error"]] == ["broken.png"]
    for row in rows[1:]:
        mask = np.asarray(Image.open(io.BytesIO(row["mask"])))
        assert mask.shape == (16, 16)
        np.testing.assert_allclose(row["shares"], np.bincount(mask.ravel(), minlength=4) / 256, atol=1e-6)
        assert 0.25 < row["confidence"] <= 1
    request = PredictRequest(model=summary["run_id"], source=str(plain), out=str(tmp_path / "out"))
    cleared = check_predict(request, Environment())
    (again,) = cut(cleared.images, cleared.out, cleared.key, 1)
    assert finished_record(again).num_samples == 5
    metrics = MlflowClient(Environment().tracking_uri).get_run(found["run_id"]).data.metrics
    assert metrics["predict/num_samples"] == 5
    assert metrics["predict/parity_agreement"] > 0.99


@pytest.mark.slow
def test_each_picture_gets_a_mask_of_its_own_size(small, plain, paceline, tmp_path):
    preset, summary, _ = small
    if preset == "textures":
        return
    arguments = ("predict", summary["run_id"], str(plain), "--out", str(tmp_path / "out"), "--own-size", "--json")
    process = paceline(*arguments, "track.experiment=pixels")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    assert (found["num_samples"], found["num_rejected"], found["own_size"]) == (5, 1, True)
    rows = [
        row for path in sorted((tmp_path / "out").glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == 6
    for row in rows:
        if row["error"] is None:
            with Image.open(plain / row["path"]) as picture, Image.open(io.BytesIO(row["mask"])) as mask:
                assert mask.size == picture.size


def test_what_a_model_of_pixels_cannot_predict_is_told_before_anything_starts(small, tmp_path):
    preset, summary, _ = small
    if preset == "textures":
        return
    for place in ("images", "masks"):
        (tmp_path / place).mkdir()
        for number in range(12):
            Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / place / f"{number}.png")
    (tmp_path / "classes.txt").write_text("ground\nsky\n")
    overrides = ("data.source=pairs", f"data.root={tmp_path}")
    with refused("SOURCE", "ground", "sky", summary["run_id"]):
        check_predict(PredictRequest(model=summary["run_id"], source="shapes", overrides=overrides), Environment())
    asked = PredictRequest(model=summary["run_id"], source="shapes", overrides=overrides, layer="down.0.0")
    assert check_predict(asked, Environment()).num_values > 0, "what a layer gives is held against no masks"
    with refused("--layer", "unet", "down.0", "classify"):
        check_predict(asked.model_copy(update={"layer": "down"}), Environment())
    with refused("--own-size", "data.source=shapes"):
        check_predict(PredictRequest(model=summary["run_id"], source="shapes", own_size=True), Environment())
    fitted = PredictRequest(model=summary["run_id"], source=str(tmp_path), overrides=("data.fit=crop",))
    with refused("data.fit", "data.fit=crop"):
        check_predict(fitted, Environment())
    large = PredictRequest(model=summary["run_id"], source=str(tmp_path), own_size=True)
    with refused("--own-size", "--layer"):
        check_predict(large.model_copy(update={"layer": "down.0.0"}), Environment())
    assert check_predict(large, Environment()).settings.own_size
    with refused("execution.compile", "--own-size", "compile=off"):
        check_predict(large.model_copy(update={"overrides": ("execution.compile=step",)}), Environment())
    found = check_predict(PredictRequest(model=summary["run_id"], source=str(tmp_path)), Environment())
    assert list(found.images.samples.names()) == sorted(f"images/{number}.png" for number in range(12))


@pytest.fixture(scope="module")
def job(make_job):
    def make(preset, *overrides):
        return make_job(*SMALL[preset], "execution.loading=resident", *overrides, preset=preset)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["shapes", "textures"])
def test_two_ranks_take_the_steps_of_one_and_evaluate_every_sample_once(job, cluster_address, preset):
    """Masks and noise belong to samples, whoever trains on them."""
    one, two = (
        train_group(made, cluster_address)
        for made in (job(preset, "recipe.num_epochs=1"), job(preset, "recipe.num_epochs=1", "execution.num_devices=2"))
    )
    np.testing.assert_allclose(two.losses[:3], one.losses[:3], rtol=5e-3)  # batch norm is each rank's own
    assert len(two.predictions) == 2
    made = job(preset)
    qualities = [evaluate_statistics(result, made.prepared) for result in (one, two)]
    assert qualities[0].score == pytest.approx(qualities[1].score, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["shapes", "textures"])
def test_a_resume_inside_an_epoch_continues_bit_for_bit(job, cluster_address, preset):
    made = job(preset, "execution.checkpoint_steps=10", "recipe.augment=flip_shift", "recipe.shift_pixels=2")
    whole = train_group(made, cluster_address)
    checkpoints = sorted((made.directory / "checkpoints").glob("*.ckpt"))
    checkpoints[-1].unlink()
    resumed = train_group(TrainJob.model_validate(made.model_dump() | {"resume": True}), cluster_address)
    assert 0 < resumed.first_step < whole.num_steps
    assert resumed.losses == whole.losses
    assert resumed.validation_scores == whole.validation_scores


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("preset", "word"), [("shapes", "mean IoU"), ("textures", "SSIM")])
def test_a_study_says_whether_an_arm_learns_as_well(preset, word, paceline, tmp_path):
    axis = ("--axis", "execution.precision=32-true,bf16-mixed", "--repeats", "2")
    process = paceline("study", preset, *SMALL[preset], *PLAIN, *axis, "track.experiment=pixels", "--json")
    stdout, stderr = process.communicate(timeout=800)
    assert process.returncode == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    base, reduced = found["arms"]
    assert base["score_name"] == reduced["score_name"] == {"shapes": "mean_iou", "textures": "ssim"}[preset]
    assert base["score"] == pytest.approx(reduced["score"], abs=0.1)
    assert (base["parity"], base["accuracy"]) == ("unknown", None)
    assert reduced["parity"] in ("on par", "better", "worse", "undecided")
    client = MlflowClient(Environment().tracking_uri)
    result = json.loads(Path(client.download_artifacts(found["run_id"], "study.json", str(tmp_path))).read_text())
    difference = result["arms"][1]["accuracy_difference"]
    assert difference["low"] < reduced["score"] - base["score"] < difference["high"]
    report = Path(client.download_artifacts(found["run_id"], "report.html", str(tmp_path))).read_text()
    assert f"{word[0].upper()}{word[1:]} on the test split" in report
    assert "accura" not in report.partition("<details")[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scenes_are_told_apart_as_they_are(run):
    summary, _ = run("shapes", "speedup.baseline=none")
    assert summary["evaluate"]["mean_iou"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_noise_is_taken_off_textures(run):
    summary, _ = run("textures", "speedup.baseline=none")
    found = summary["evaluate"]
    assert found["psnr_db"] - found["noisy_psnr_db"] > 5


def test_a_set_without_masks_is_refused(paceline, tmp_path):
    process = paceline("run", "shapes", "data.source=pairs", f"data.root={tmp_path}")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert "is empty" in stderr
