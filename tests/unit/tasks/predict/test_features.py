"""A part of a prediction, without engines: what the model tells, and what a layer of it gives."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.model import Model
from paceline.tasks.data.decode.transform import decode
from paceline.tasks.data.loading.batch import Normalise
from paceline.tasks.model.pretrained import load_trained_model
from paceline.tasks.predict.job import cut, in_folder, key_of, of_test_split
from paceline.tasks.predict.outputs import compare_outputs
from paceline.tasks.predict.part import check_parity, finished_record, predict_part
from tests.support.saved_models import save_model

SIDE = 12
CLASSES = ("dark", "light")


def with_statistics(weights):
    """Batch norms that do something, which are not those of the start."""
    for name, values in weights.items():
        if name.endswith(("running_mean", "running_var")):
            values.copy_(torch.linspace(0.5, 2, len(values)))
    return weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A network, what is known of it, and the settings by which it is executed."""
    place = tmp_path_factory.mktemp("models") / "model"
    described = Model(width=4, depth=1, test_views=2)
    settings = save_model(place, described, CLASSES, (SIDE, SIDE, 3), with_statistics)
    return *load_trained_model(place, settings.model_digest), settings


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Five images of a class that the model knows and one that it does not, and what is none."""
    root = tmp_path_factory.mktemp("images")
    for name, number in (("dark", 3), ("odd", 2)):
        (root / name).mkdir()
        for index in range(number):
            pixels = np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    (root / "dark" / "broken.png").write_bytes(b"not a picture")
    return root


def written(settings, images, directory):
    """The record of the only part, and its rows by path."""
    (part,) = cut(images, directory, key_of(settings, images), 1)
    record = predict_part(part, settings)
    assert finished_record(part) == record
    assert check_parity(part, settings)[0].agreement == 1.0
    return record, {row["path"]: row for row in pq.read_table(part.path).to_pylist()}


@pytest.mark.parametrize("layer", ["pool", "features.2"])
def test_a_layer_gives_a_row_for_every_image(layer, model, root, tmp_path):
    network, facts, settings = model
    images, asked = in_folder(str(root), None), settings.model_copy(update={"layer": layer})
    record, rows = written(asked, images, tmp_path)
    assert key_of(asked, images) != key_of(settings, images)
    assert (record.num_samples, record.num_rejected, record.num_known) == (5, 1, 0)
    assert {path: row["true_label"] for path, row in rows.items()} == {path: path.split("/")[0] for path in rows}
    assert (rows["dark/broken.png"]["features"], rows["dark/broken.png"]["error"] is None) == (None, False)
    for path in ("dark/2.png", "odd/0.png"):
        pixels_NHWC = torch.from_numpy(decode((root / path).read_bytes(), SIDE)[None].copy())
        images_NCHW = Normalise(facts.mean, facts.std, facts.image_shape)(pixels_NHWC, channels_last=False)
        with torch.no_grad():
            values = network.network.features[:3](images_NCHW)
            if layer == "pool":
                values = network.network.pool(network.network.features(images_NCHW))
        np.testing.assert_allclose(rows[path]["features"], values.flatten().numpy(), rtol=1e-4, atol=1e-5)


def test_what_the_model_tells_is_as_before(model, root, tmp_path):
    _, facts, settings = model
    record, rows = written(settings, in_folder(str(root), facts.class_names), tmp_path)
    assert (record.num_samples, record.num_rejected, record.num_known) == (5, 1, 3)
    assert record.num_correct == sum(row["label"] == row["true_label"] == "dark" for row in rows.values())
    assert list(next(iter(rows.values()))) == ["path", "label", "probability", "probabilities", "true_label", "error"]
    broken = rows["dark/broken.png"]
    assert (broken["label"], broken["probability"], broken["probabilities"]) == (None, None, None)
    for path, row in rows.items():
        if path != "dark/broken.png":
            assert row["probability"] == max(row["probabilities"])
            assert row["label"] == CLASSES[int(np.argmax(row["probabilities"]))]
            assert row["true_label"] == ("dark" if path.startswith("dark") else None)


def test_a_part_of_which_nothing_can_be_read_has_no_features(model, root, tmp_path):
    _, _, settings = model
    images = in_folder(str(root), None)
    position = list(images.samples.names()).index("dark/broken.png")
    images = images._replace(samples=images.samples[position : position + 1])
    (part,) = cut(images, tmp_path, key_of(settings, images), 1)
    asked = settings.model_copy(update={"layer": "pool"})
    assert predict_part(part, asked).num_rejected == 1
    assert check_parity(part, asked)[0] is None
    (row,) = pq.read_table(part.path).to_pylist()
    assert (row["features"], row["true_label"]) == (None, "dark")


@pytest.mark.parametrize(("name", "source", "channels"), [("unet", "shapes", 3), ("dncnn", "textures", 1)])
def test_a_layer_of_a_model_of_pixels_gives_its_feature_maps(name, source, channels, tmp_path):
    """Classes of pixels are none of the image; those of textures are."""
    described = Model(name=name, width=2, depth=2)
    settings = save_model(tmp_path / "model", described, CLASSES, (SIDE, SIDE, channels), with_statistics)
    network, _ = load_trained_model(Path(settings.model_directory), settings.model_digest)
    layer = next(layer for layer, part in network.named_modules() if isinstance(part, torch.nn.Conv2d))
    images = of_test_split(Data(source=source, image_size=SIDE))
    images = images._replace(samples=images.samples[:4])
    record, rows = written(settings.model_copy(update={"layer": layer}), images, tmp_path)
    assert (record.num_samples, record.num_known, record.class_pixels) == (4, 0, ())
    number = network.get_submodule(layer).out_channels * SIDE * SIDE
    assert {len(row["features"]) for row in rows.values()} == {number}
    labels = [images.class_names[label] for label in images.samples.labels.tolist()]
    assert [row["true_label"] for row in rows.values()] == ([None] * 4 if source == "shapes" else labels)


def test_how_far_features_of_two_executions_lie_apart():
    ours = np.array([[3, 4], [1, 0], [0, 0], [0, 0], [1e-30, 0]], np.float32)
    plain = np.array([[6, 8], [0, 1], [0, 0], [0, 2], [1e-30, 0]], np.float32)
    found = compare_outputs("features", (ours,), (plain,))
    assert (found.unit, found.num_samples, found.max_difference) == ("features", 5, 4)
    assert found.agreement == pytest.approx(3 / 5), "the first, both that are nought, and the smallest"


def test_what_could_not_be_had_is_asked_for_again(model, root, tmp_path):
    _, _, settings = model
    images = in_folder(str(root), None)
    (part,) = cut(images, tmp_path, key_of(settings, images), 1)
    gone = root / "odd" / "1.png"
    content = gone.read_bytes()
    gone.unlink()
    record = predict_part(part, settings)
    assert (record.num_samples, record.num_rejected, record.num_unread) == (4, 2, 1)
    assert finished_record(part) is None
    gone.write_bytes(content)
    again = predict_part(part, settings)
    assert (again.num_samples, again.num_rejected, again.num_unread) == (5, 1, 0)
    assert finished_record(part) == again
