"""A folder of one's own images, trained on by `paceline run` and predicted by `paceline predict`, as a user does it."""

import json
import pickle
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from PIL import Image

from paceline.conf.environment import Environment
from paceline.flows.predict.flow import PredictRequest, check_predict
from paceline.tasks.data.decode.transform import decode
from paceline.tasks.data.loading.batch import Normalise
from paceline.tasks.files import sha256_of
from paceline.tasks.model.pretrained import load_trained_model
from paceline.tasks.model_bundle import digest_of, read_facts
from paceline.tasks.predict.job import Settings
from paceline.tasks.predict.predictor import Predictor
from paceline.tasks.track.models import fetch_model
from paceline.tasks.track.store import local_path
from tests.support.outputs import told_by
from tests.support.pictures import make_pictures
from tests.support.refusals import refused

SMALL = ["data.image_size=32", "model.width=8", "recipe.num_epochs=4", "speedup.baseline=none"]
NUM_MORE = 1_100
"""So that there is more than one part."""


@pytest.fixture(scope="module")
def call(paceline):
    """Calls the program; its status, the JSON on its stdout, its stderr."""

    def to_the_end(*arguments):
        process = paceline(*map(str, arguments), "--json")
        out, said = process.communicate(timeout=240)
        return process.returncode, told_by(arguments[0], out) if out else None, said

    return to_the_end


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of pictures of dark and light, and the names of the damaged ones."""
    root = tmp_path_factory.mktemp("pictures")
    return root, make_pictures(root)


@pytest.fixture(scope="module")
def learned(call, pictures):
    """The summary of a run that has learned dark from light."""
    status, summary, said = call("run", "folder", f"data.root={pictures[0]}", *SMALL)
    assert status == 0, said
    return summary


@pytest.fixture(scope="module")
def trained(learned, pictures):
    """The id of that run, and the pictures of it."""
    return learned["run_id"], pictures[0]


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """Pictures of no class in folders of any depth, two with a class, one damaged, and what is none."""
    root = tmp_path_factory.mktemp("unseen")
    noise = np.random.default_rng(9)
    for index in range(NUM_MORE):
        path = root / f"year-{index % 3}" / "more" / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        low = 110 * (index % 2)
        Image.fromarray(noise.integers(low, low + 60, (16, 16, 3), dtype=np.uint8)).save(path)
    for name, low in (("dark", 0), ("light", 190)):
        (root / "known" / name).mkdir(parents=True)
        Image.fromarray(noise.integers(low, low + 60, (20, 24, 3), dtype=np.uint8)).save(
            root / "known" / name / "a.jpg"
        )
    (root / "broken.png").write_bytes(b"not a picture")
    (root / "notes.txt").write_text("not a picture either")
    return root


def rows_of(out):
    return [row for part in sorted(Path(out).glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


def test_a_folder_of_mixed_images_trains_and_lists_exactly_the_damaged(learned, pictures, call):
    root, damaged = pictures
    client = MlflowClient(Environment().tracking_uri)
    listed = Path(client.download_artifacts(learned["run_id"], "rejected.jsonl")).read_text().splitlines()
    assert {json.loads(line)["path"] for line in listed} == damaged
    assert learned["dataset"]["num_rejected"] == len(damaged)
    total = sum(learned["dataset"][f"num_{split}"] for split in ("train", "validation", "test"))
    assert total == 120 - len(damaged)
    assert learned["speedup"]["ratio"] is None
    assert learned["evaluate"]["accuracy"] > 0.8

    status, outcome, said = call("run", "folder", f"data.root={root}", *SMALL, "data.max_rejected_fraction=0")
    assert status == 2, said
    assert re.search(rf"{len(damaged)} of 120 samples .* cannot be decoded", outcome["error"])


@pytest.fixture(scope="module")
def predicted(call, trained, unseen, tmp_path_factory):
    """The outcome of predicting the unseen pictures, and where."""
    out = tmp_path_factory.mktemp("predicted") / "out"
    status, summary, said = call("predict", trained[0], unseen, "--out", out)
    assert status == 0, said
    return summary, out


def test_every_image_gets_a_row(predicted, unseen):
    summary, out = predicted
    assert (summary["num_samples"], summary["num_rejected"], summary["num_reused"]) == (NUM_MORE + 2, 1, 0)
    assert summary["accuracy"] == 1.0, "of the two in folders named like a class"
    assert summary["parity"]["agreement"] > 0.98
    assert json.loads((out / "predictions.json").read_text())["is_complete"]
    rows = rows_of(out)
    pictures = sorted(str(path.relative_to(unseen)) for path in unseen.rglob("*.*") if path.suffix in (".png", ".jpg"))
    assert [row["path"] for row in rows] == pictures
    (broken,) = [row for row in rows if row["error"]]
    assert (broken["path"], broken["label"], broken["error"]) == ("broken.png", None, "not an image of a known format")
    good = [row for row in rows if not row["error"]]
    assert all(abs(sum(row["probabilities"]) - 1) < 1e-3 for row in good)
    assert all(row["probability"] == max(row["probabilities"]) for row in good)
    numbered = [row for row in good if row["path"].startswith("year")]
    is_right = [(row["label"] == "light") == int(row["path"].removesuffix(".png")[-1]) % 2 for row in numbered]
    assert np.mean(is_right) > 0.95
    found = MlflowClient(Environment().tracking_uri).get_run(summary["run_id"])
    assert found.info.status == "FINISHED"
    assert found.data.tags["paceline.role"] == "predict"
    assert found.data.metrics["predict/num_samples"] == NUM_MORE + 2


@pytest.fixture(scope="module")
def features(call, trained, unseen, tmp_path_factory):
    """What a layer gives for the unseen pictures: how it is asked for, the outcome, and where."""
    out = tmp_path_factory.mktemp("features") / "out"
    asked = ("features", trained[0], unseen, "--layer", "pool", "--out", out, "execution.precision=32-true")
    status, summary, said = call(*asked)
    assert status == 0, said
    return asked, summary, out


@pytest.mark.slow
def test_a_layer_gives_a_row_for_every_image(features, trained, unseen):
    _, summary, out = features
    assert (summary["layer"], summary["accuracy"], summary["num_samples"]) == ("pool", None, NUM_MORE + 2)
    rows = {row["path"]: row for row in rows_of(out)}
    assert list(rows) == sorted(rows)
    assert (rows["broken.png"]["features"], rows["broken.png"]["error"]) == (None, "not an image of a known format")
    assert rows["known/dark/a.jpg"]["true_label"] == "dark"
    assert rows["year-0/more/0000.png"]["true_label"] == "more", "the folder's name, whatever the model knows"
    directory, facts = fetch_model(Environment().tracking_uri, trained[0], Environment().root)
    network, _ = load_trained_model(directory, digest_of(facts))
    path = "year-1/more/0001.png"
    pixels_NHWC = torch.from_numpy(decode((unseen / path).read_bytes(), 32)[None].copy())
    images_NCHW = Normalise(facts.mean, facts.std, facts.image_shape)(pixels_NHWC, channels_last=False)
    expected = network.pool(network.features(images_NCHW)).detach().flatten().numpy()
    np.testing.assert_allclose(rows[path]["features"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_what_a_layer_gave_is_not_asked_for_again(call, features):
    asked, _, _ = features
    status, again, said = call(*asked)
    assert status == 0, said
    assert again["num_reused"] == NUM_MORE + 3


@pytest.mark.slow
def test_a_classifier_on_features_tells_classes_that_the_model_was_not_trained_for(call, trained, tmp_path):
    halves = {}
    for number, half in enumerate(("train", "test")):
        for name, low, high in (("wide", 0, 250), ("grey", 110, 140)):
            (tmp_path / half / name).mkdir(parents=True)
            for index in range(15):
                noise = np.random.default_rng((number, index))
                pixels = noise.integers(low, high, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / half / name / f"{index}.png")
        halves[half] = tmp_path / f"{half}-features"
        status, _, said = call("features", trained[0], tmp_path / half, "--layer", "pool", "--out", halves[half])
        assert status == 0, said
    status, summary, said = call("classify", halves["train"], halves["test"])
    assert status == 0, said
    assert [one["kind"] for one in summary["classifiers"]] == ["logistic", "svm"]
    for one in summary["classifiers"]:
        assert (one["num_train"], one["num_test"], one["num_features"], one["num_classes"]) == (30, 30, 32, 2)
        assert one["accuracy"] == 1.0
        assert one["converged"]
    found = MlflowClient(Environment().tracking_uri).get_run(summary["run_id"])
    assert (found.info.status, found.data.tags["paceline.role"]) == ("FINISHED", "classify")
    assert found.data.metrics["svm/accuracy"] == 1.0
    for wrong, told in (
        ((halves["train"], halves["train"]), "are of the same images"),
        ((halves["train"], tmp_path), "holds no features"),
    ):
        status, _, said = call("classify", *wrong)
        assert (status, said.count("\n")) == (2, 2), "the fault and the hint"
        assert told in said


@pytest.mark.slow
def test_what_is_predicted_is_not_predicted_again(call, predicted, trained, unseen):
    summary, out = predicted
    rows = rows_of(out)
    first, second = sorted(out.glob("part-*.parquet"))
    written = first.stat().st_mtime_ns
    second.unlink()
    status, again, said = call("predict", trained[0], unseen, "--out", out)
    assert status == 0, said
    assert 0 < again["num_reused"] < summary["num_samples"]
    for name in ("num_samples", "num_rejected", "accuracy"):
        assert again[name] == summary[name]
    assert first.stat().st_mtime_ns == written
    assert rows_of(out) == rows


@pytest.mark.slow
def test_a_model_by_its_alias_and_one_that_was_changed(call, trained, tmp_path):
    run_id, root = trained
    client = MlflowClient(Environment().tracking_uri, Environment().tracking_uri)
    client.create_registered_model("brightness")
    version = client.create_model_version("brightness", f"runs:/{run_id}/model", run_id).version
    client.set_registered_model_alias("brightness", "champion", version)
    status, summary, said = call("predict", "models:/brightness@champion", root, "--out", tmp_path / "out")
    assert status == 0, said
    assert summary["accuracy"] > 0.9
    assert summary["num_samples"] == len(rows_of(tmp_path / "out")) - summary["num_rejected"]

    status, _, said = call("predict", "models:/brightness@challenger", root)
    assert (status, said.count("\n")) == (2, 1)
    assert "models:/brightness@challenger: no such model" in said

    kept = Path(Environment().root) / "models" / summary["model_digest"]
    changed = tmp_path / "changed"
    shutil.copytree(kept, changed)
    (changed / "weights.pt").write_bytes((changed / "weights.pt").read_bytes() + b" ")
    status, _, said = call("predict", changed, root)
    assert (status, said.count("\n")) == (2, 2), "the fault and the hint"
    assert "the file is damaged or was changed" in said


@pytest.fixture
def recorded(trained, tmp_path):
    """The artifacts of the run as they lie in the store, put back afterwards; and where fetched models are kept."""
    run = MlflowClient(Environment().tracking_uri).get_run(trained[0])
    place = local_path(run.info.artifact_uri)
    shutil.copytree(place, tmp_path / "before")
    yield place, tmp_path / "home"
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "before", place)


def _rename_a_class(model):
    facts = json.loads((model / "model.json").read_text())
    facts["class_names"] = facts["class_names"][::-1]
    (model / "model.json").write_text(json.dumps(facts))


def _other_weights(model):
    """Of another network that fits, with a description that says so."""
    weights = torch.load(model / "weights.pt", weights_only=True)
    torch.save({name: tensor * 0 for name, tensor in weights.items()}, model / "weights.pt")
    facts = json.loads((model / "model.json").read_text())
    facts["weights_sha256"] = sha256_of(model / "weights.pt")
    (model / "model.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("tamper", "data"),
    [
        (lambda model: (model / "weights.pt").write_bytes(b"x"), ("weights.pt", "sha256")),
        (_rename_a_class, ()),
        (_other_weights, ()),
        (lambda model: (model / "model.json").unlink(), ()),
    ],
)
def test_a_model_that_was_changed_in_the_store_is_refused_by_run_and_by_name(trained, recorded, tamper, data):
    place, home = recorded
    registry = MlflowClient(Environment().tracking_uri, Environment().tracking_uri)
    with suppress(MlflowException):
        registry.create_registered_model("changed")
    version = registry.create_model_version("changed", f"runs:/{trained[0]}/model", trained[0]).version
    tamper(place / "model")
    for reference in (trained[0], f"runs:/{trained[0]}/model", f"models:/changed/{version}"):
        with refused(None, *data):
            fetch_model(Environment().tracking_uri, reference, home)
        assert not [path for path in (home / "models").iterdir() if not path.name.startswith(".")]


def test_what_lies_beside_a_model_is_not_executed(trained, recorded):
    place, home = recorded
    (place / "config.yaml").write_text("!!python/object/apply:os.mkdir [pwned]")
    flavor = "flavors: {python_function: {loader_module: pwned}}\n"
    (place / "model" / "MLmodel").write_text(flavor)
    (place / "model" / "pwned.py").write_text(f"open({str(home / 'pwned')!r}, 'w')")
    directory, facts = fetch_model(Environment().tracking_uri, trained[0], home)
    network, _ = load_trained_model(directory, digest_of(facts))
    assert isinstance(network, torch.nn.Module)
    with refused(None, directory):
        load_trained_model(directory, "0" * 64)
    assert not (home / "pwned").exists()


def test_a_version_that_no_run_vouches_for_is_refused_and_a_directory_does_not_pass_for_a_name(
    trained, recorded, monkeypatch, tmp_path
):
    place, home = recorded
    uri = Environment().tracking_uri
    registry = MlflowClient(uri, uri)
    with suppress(MlflowException):
        registry.create_registered_model("foreign")
    foreign = registry.create_model_version("foreign", str(place / "model")).version
    with refused(None, f"models:/foreign/{foreign}"):
        fetch_model(uri, f"models:/foreign/{foreign}", home)
    monkeypatch.chdir(tmp_path)
    for name in (trained[0], "models:/foreign@champion"):
        shutil.copytree(place / "model", tmp_path / name)
        _other_weights(tmp_path / name)
    directory, facts = fetch_model(uri, trained[0], home)
    assert directory == home / "models" / digest_of(facts), "of the run, whatever lies here under its name"
    with refused("MODEL", "models:/foreign@champion"):
        fetch_model(uri, "models:/foreign@champion", home)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"source": "digits"}, ["SOURCE", "digits", 1, 3]),
        ({"source": "/nowhere/at/all"}, ["data.root", "/nowhere/at/all"]),
        ({"overrides": ("execution.num_devices=99",)}, ["execution.num_devices", 99]),
        ({"out": "TAKEN"}, ["--out"]),
        ({"layer": "nose"}, ["--layer", "nose", "convblocks", "features.0", "classify"]),
        ({"layer": "pool", "overrides": ("execution.compile=step",)}, ["execution.compile", "compile=off"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(trained, unseen, tmp_path, changes, wrong):
    (tmp_path / "thesis.txt").write_text("mine")
    if "out" in changes:
        changes = {"out": str(tmp_path)}
    request = PredictRequest(model=trained[0], source=str(unseen)).model_copy(update=changes)
    with refused(*wrong):
        check_predict(request, Environment())


def settings_of(directory):
    """How a model is predicted with here."""
    return Settings(
        model_directory=str(directory),
        model_digest=digest_of(read_facts(directory)),
        precision="32-true",
        gpu=False,
        num_threads=1,
        batch_size=8,
    )


def test_code_in_a_file_of_weights_is_not_executed(trained, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "pwned",)

    client = MlflowClient(Environment().tracking_uri)
    directory = Path(client.download_artifacts(trained[0], "model", str(tmp_path)))
    facts = json.loads((directory / "model.json").read_text())
    torch.save({"features.0.weight": Evil()}, directory / "weights.pt", pickle_module=pickle)
    facts["weights_sha256"] = sha256_of(directory / "weights.pt")
    (directory / "model.json").write_text(json.dumps(facts))
    settings = settings_of(directory)
    with refused(None, directory / "weights.pt"):
        Predictor(settings)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_a_model_compiled_ahead_says_the_same_also_of_a_ragged_batch(trained, tmp_path):
    client = MlflowClient(Environment().tracking_uri)
    directory = Path(client.download_artifacts(trained[0], "model", str(tmp_path)))
    settings = settings_of(directory)
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (19, 32, 32, 3), dtype=np.uint8)
    (ours,) = Predictor(settings.model_copy(update={"compiled": str(tmp_path / "compiled")}))(pixels_NHWC)
    (plain,) = Predictor(settings, plain=True)(pixels_NHWC)
    assert ours.shape == (19, 2)
    np.testing.assert_allclose(ours, plain, atol=1e-4)
