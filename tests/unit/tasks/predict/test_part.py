"""Masks and images without noise, as a part of a prediction has them: from networks whose answers are known."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.model import Model
from paceline.tasks.model.objectives import Segmentation
from paceline.tasks.predict.job import cut, in_folder, key_of, of_test_split
from paceline.tasks.predict.outputs import compare_outputs
from paceline.tasks.predict.part import METADATA, check_parity, finished_record, predict_part
from paceline.tasks.predict.predictor import Predictor
from tests.support.saved_models import save_model

SIZE = 16
SCENES = ("background", "disc", "square", "triangle")
COLOUR, GREY = (SIZE, SIZE, 3), (SIZE, SIZE, 1)


def all_light(weights):
    """Everything is of the second class, by logits that lie 5 apart."""
    weights["classify.weight"].zero_()
    weights["classify.bias"].copy_(torch.tensor([0.0, 5.0]))
    return weights


def nothing_off(weights):
    """The last layer of a denoiser finds no noise."""
    *_, bias = weights
    for name in (bias.replace("bias", "weight"), bias):
        weights[name].zero_()
    return weights


def parts_of(images, settings, out, number=1):
    return list(cut(images, out, key_of(settings, images), number))


def picture(content):
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.fixture
def pictures(tmp_path):
    """Pictures of any shape beside their masks, and one that is damaged."""
    root, rng = tmp_path / "root", np.random.default_rng(0)
    for name, shape in (("a", (SIZE, SIZE, 3)), ("b/c", (40, 30, 3))):
        for kind in ("images", "masks"):
            path = root / kind / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(path)
    (root / "images" / "broken.png").write_bytes(b"no picture")
    return root


def test_plain_pictures_get_masks_and_the_masks_beside_them_are_none(pictures, tmp_path):
    settings = save_model(
        tmp_path / "model", Model(name="unet", width=2, depth=1), ("dark", "light"), COLOUR, all_light
    )
    images = in_folder(str(pictures), (), leave_masks=True)
    assert list(images.samples.names()) == ["images/a.png", "images/b/c.png", "images/broken.png"]
    (part,) = parts_of(images, settings, tmp_path)
    record = predict_part(part, settings)
    assert (record.num_samples, record.num_rejected, record.num_known, record.class_pixels) == (2, 1, 0, ())
    first, second, broken = pq.read_table(part.path).to_pylist()
    for row in (first, second):
        assert (picture(row["mask"]) == 1).all(), "the class's line, from 0"
        assert picture(row["mask"]).shape == (SIZE, SIZE)
        assert Image.open(io.BytesIO(row["mask"])).mode == "L"
        assert row["shares"] == [0.0, 1.0]
        assert row["confidence"] == pytest.approx(1 / (1 + np.exp(-5)), rel=1e-4)
        assert row["error"] is None
    assert (broken["mask"], broken["shares"], broken["confidence"]) == (None, None, None)
    assert broken["error"] == "not an image of a known format"


def test_masks_of_the_source_are_counted_as_evaluation_counts_them(tmp_path):
    settings = save_model(tmp_path / "model", Model(name="unet", width=4, depth=2), SCENES, COLOUR)
    images = of_test_split(Data(source="shapes", image_size=SIZE))
    images = images._replace(samples=images.samples[:30])
    records = [predict_part(part, settings) for part in parts_of(images, settings, tmp_path, 2)]
    told = [
        picture(row["mask"])
        for number in range(2)
        for row in pq.read_table(tmp_path / f"part-{number:05d}.parquet").to_pylist()
    ]
    from paceline.tasks.data.sources.generated import read_shapes

    there = np.stack([item.mask for item in read_shapes(images.origin, images.samples, SIZE)]) + 1
    logits = torch.nn.functional.one_hot(torch.tensor(np.stack(told)).long(), 4).permute(0, 3, 1, 2).float()

    class Batch:
        images_NCHW = torch.from_numpy(there).float()[:, None]

    totals = Segmentation(4).statistics((logits, None), Batch, Batch.images_NCHW).sum(0)[1:]
    assert np.sum([record.class_pixels for record in records], axis=0).tolist() == totals.tolist()
    assert sum(record.num_known for record in records) == 30 * SIZE * SIZE
    assert sum(record.num_correct for record in records) == totals[:4].sum()


def test_a_denoiser_that_finds_no_noise_gives_the_picture_back(pictures, tmp_path):
    """Channels without variance too; the pixels are those of the picture, and no noise was added to them."""
    settings = save_model(tmp_path / "model", Model(name="dncnn", width=2, depth=2), ("a", "b"), COLOUR, nothing_off)
    (part,) = parts_of(in_folder(str(pictures / "images"), ()), settings, tmp_path)
    record = predict_part(part, settings)
    assert (record.num_samples, record.num_rejected, record.num_known) == (2, 1, 0)
    first, second, broken = pq.read_table(part.path).to_pylist()
    assert np.array_equal(picture(first["image"]), picture((pictures / "images/a.png").read_bytes()))
    assert (first["change"], second["change"]) == (0, 0)
    assert (broken["image"], broken["change"]) == (None, None)


def test_grey_stays_grey(tmp_path):
    settings = save_model(tmp_path / "model", Model(name="dncnn", width=2, depth=2), ("a", "b"), GREY)
    images = of_test_split(Data(source="textures", image_size=SIZE))
    (part,) = parts_of(images._replace(samples=images.samples[:3]), settings, tmp_path)
    predict_part(part, settings)
    rows = pq.read_table(part.path).to_pylist()
    assert [Image.open(io.BytesIO(row["image"])).mode for row in rows] == ["L"] * 3
    assert all(row["change"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["unet", "dncnn"])
def test_what_is_written_is_not_predicted_again_and_of_another_model_it_is(name, tmp_path):
    model, source = Model(name=name, width=2, depth=2), "shapes" if name == "unet" else "textures"
    settings = save_model(tmp_path / "model", model, SCENES, COLOUR if name == "unet" else GREY)
    images = of_test_split(Data(source=source, image_size=SIZE))
    first, second = parts_of(images._replace(samples=images.samples[:10]), settings, tmp_path, 2)
    record = predict_part(first, settings)
    assert finished_record(first) == record
    assert finished_record(second) is None
    said = json.loads(pq.read_schema(first.path).metadata[METADATA])
    assert said["key"] == first.key
    other = settings.model_copy(update={"precision": "bf16-mixed"})
    assert finished_record(parts_of(images, other, tmp_path)[0]) is None
    parity = check_parity(first, other)[0]
    assert parity.num_samples == 5
    assert parity.unit == {"unet": "pixels", "dncnn": "values"}[name]
    assert 0.9 < parity.agreement <= 1
    assert check_parity(first, settings)[0].agreement == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "dncnn"])
def test_compiled_ahead_it_says_the_same_also_of_a_ragged_batch(name, tmp_path):
    settings = save_model(tmp_path / "model", Model(name=name, width=4, depth=2), SCENES, COLOUR)
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (19, SIZE, SIZE, 3), dtype=np.uint8)
    ours = Predictor(settings.model_copy(update={"compiled": str(tmp_path / "compiled")}))(pixels_NHWC)
    plain = Predictor(settings, plain=True)(pixels_NHWC)
    assert [values.shape for values in ours] == [values.shape for values in plain]
    parity = compare_outputs({"unet": "segment", "dncnn": "denoise"}[name], ours, plain)
    assert (parity.num_samples, parity.agreement) == (19, pytest.approx(1, abs=1e-3))


def test_how_far_two_executions_lie_apart():
    masks, other = np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4), np.uint8)
    other[0, 0] = 3
    found = compare_outputs("segment", (masks, np.array([0.5, 0.5])), (other, np.array([0.5, 0.75])))
    assert (found.agreement, found.max_difference, found.num_samples) == (28 / 32, 0.25, 2)
    pixels = np.full((1, 2, 2, 1), 3, np.uint8)
    shifted = pixels + np.array([0, 2, 3, 250], np.uint8).reshape(1, 2, 2, 1)
    found = compare_outputs("denoise", (pixels,), (shifted,))
    assert (found.agreement, found.max_difference) == (0.5, 250)
