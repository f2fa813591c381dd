"""Images at their own sizes: cut into tiles, told of, put together again."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.model import Model
from paceline.flows.checks.pretrained import check_own_size
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.transfer import reach_and_stride
from paceline.tasks.predict.job import cut, in_folder, key_of, of_test_split
from paceline.tasks.predict.part import check_parity, predict_part
from paceline.tasks.predict.predictor import Predictor
from paceline.tasks.predict.tiles import Grid, bands_of, grid_for, put
from tests.support.refusals import refused
from tests.support.saved_models import save_model

CLASSES = ("dark", "light", "other")


def settings_of(directory, name="unet", depth=2, channels=3):
    directory.mkdir(exist_ok=True)
    model = Model(name=name, width=4, depth=depth)
    return save_model(directory / "model", model, CLASSES, (16, 16, channels)).model_copy(update={"own_size": True})


def rows_of(images, settings, out):
    (part,) = cut(images, out, key_of(settings, images), 1)
    record = predict_part(part, settings)
    return record, pq.read_table(part.path).to_pylist()


def picture(content):
    return np.asarray(Image.open(io.BytesIO(content)))


def mirrored(image_HWC, margin, height, width):
    """The image and what lies around it, of a size."""
    beside = [(margin, size - margin - pixels) for size, pixels in zip((height, width), image_HWC.shape, strict=False)]
    return np.pad(image_HWC, (*beside, (0, 0)), mode="symmetric")


# Tiles


@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    step=st.sampled_from([1, 4, 8]),
    margins=st.integers(0, 3),
    inner=st.integers(1, 4),
)
def test_what_is_told_of_tiles_lies_where_it_was(height, width, step, margins, inner):
    grid = Grid(side=(2 * margins + inner) * step, margin=margins * step, step=step)
    image_HWC = np.random.default_rng(height * 91 + width).integers(0, 255, (height, width, 2), dtype=np.uint8)
    found_HWC = np.full_like(image_HWC, 255)
    around = mirrored(image_HWC, grid.margin, height + 100 + grid.margin, width + 100 + grid.margin)
    for band in bands_of(image_HWC, grid):
        for number, tile_HWC in enumerate(band.tiles_MHWC):
            assert max(tile_HWC.shape[:2]) <= grid.side
            assert all(side % step == 0 for side in tile_HWC.shape[:2])
            rows = slice(band.top, band.top + tile_HWC.shape[0])
            columns = slice(number * band.width, number * band.width + tile_HWC.shape[1])
            assert band.top % step == band.width % step == 0, "halved where the image is"
            assert np.array_equal(tile_HWC, around[rows, columns])
        put(band, band.tiles_MHWC, found_HWC, grid)
    assert np.array_equal(found_HWC, image_HWC)


@pytest.mark.parametrize(("name", "depth"), [("unet", 1), ("unet", 2), ("unet", 3), ("dncnn", 2), ("dncnn", 7)])
def test_a_network_looks_no_farther_than_it_says(name, depth):
    torch.manual_seed(0)
    network = build_network(Model(name=name, width=2, depth=depth), (16, 16, 1), 3, 0).double().eval()
    for weight in network.parameters():
        weight.data.abs_()  # nothing is cut off, nothing cancels out
    reach, stride = reach_and_stride(network)
    size = 2 * grid_for(reach, stride).margin + 2 * stride
    images_NCHW = torch.rand(1, 1, size, size, dtype=torch.float64)
    for centre in range(size // 2, size // 2 + stride):  # wherever it lies among those that become one
        seen_NCHW = images_NCHW.clone().requires_grad_()
        network(seen_NCHW)[0][:, :, centre, centre].square().sum().backward()
        farthest = (seen_NCHW.grad[0, 0].nonzero() - centre).abs().max()
        assert reach / 2 < farthest <= reach


@pytest.mark.parametrize(("name", "depth"), [("unet", 2), ("dncnn", 4)])
def test_a_large_image_in_tiles_is_told_of_as_a_whole(name, depth, tmp_path):
    """Against one pass over the image and what lies around it."""
    settings = settings_of(tmp_path, name, depth)
    model = Predictor(settings)
    image_HWC = np.random.default_rng(0).integers(0, 255, (300, 210, 3), dtype=np.uint8)
    assert len(list(bands_of(image_HWC, model._grid))) > 1
    found = model.whole(image_HWC)
    margin = model._grid.margin
    around_HWC = mirrored(image_HWC, margin, 384 + 2 * margin, 224 + 2 * margin)
    expected = model(around_HWC[np.newaxis])
    for told, whole in zip(found, expected, strict=True):
        inner = whole[0, margin : margin + 300, margin : margin + 210]
        assert told.shape == inner.shape
        if told.dtype == np.uint8:
            differences = np.abs(told.astype(int) - inner)
            assert (differences > 0).mean() < 1e-3, "but for rounding"
        else:
            np.testing.assert_allclose(told, inner, atol=1e-5)


# Files


def test_each_image_gets_a_mask_of_its_size(tmp_path):
    rng, sizes = np.random.default_rng(0), [(5, 9), (40, 31), (16, 16)]
    for number, size in enumerate(sizes):
        path = tmp_path / "root" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(path)
    (tmp_path / "root" / "broken.png").write_bytes(b"no picture")
    settings = settings_of(tmp_path)
    images = in_folder(str(tmp_path / "root"), ())
    record, rows = rows_of(images, settings, tmp_path)
    assert (record.num_samples, record.num_rejected, record.num_known) == (3, 1, 0)
    assert [row["error"] for row in rows] == [None, None, None, "not an image of a known format"]
    assert record.read_seconds > 0
    assert record.predict_seconds > 0
    model = Predictor(settings)
    for row, size in zip(rows, sizes, strict=False):
        assert picture(row["mask"]).shape == size
        shares = np.bincount(picture(row["mask"]).ravel(), minlength=3) / np.prod(size)
        np.testing.assert_allclose(row["shares"], shares, atol=1e-6)
        classes_HW, best_HW = model.whole(picture((tmp_path / "root" / row["path"]).read_bytes()))
        assert np.array_equal(picture(row["mask"]), classes_HW)
        assert row["confidence"] == pytest.approx(best_HW.mean(), rel=1e-5)
    assert rows[-1]["mask"] is None
    (part,) = cut(images, tmp_path, key_of(settings, images), 1)
    parity = check_parity(part, settings)[0]
    assert (parity.num_samples, parity.unit) == (3, "pixels")
    assert parity.agreement > 0.99


def test_masks_of_the_source_are_counted_at_their_own_sizes(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(20):
        size = (20 + number, 33)
        pixels = {"images": rng.integers(0, 255, (*size, 3), dtype=np.uint8)}
        pixels["masks"] = rng.choice(np.array([0, 1, 2, 255], np.uint8), size)
        for kind, values in pixels.items():
            (tmp_path / "root" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(tmp_path / "root" / kind / f"{number:02d}.png")
    (tmp_path / "root" / "classes.txt").write_text("\n".join(CLASSES))
    images = of_test_split(Data(source="pairs", root=str(tmp_path / "root"), image_size=16))
    record, rows = rows_of(images, settings_of(tmp_path), tmp_path)
    known, right = 0, 0
    for row in rows:
        mask = picture((tmp_path / "root" / row["path"].replace("images", "masks")).read_bytes())
        told = picture(row["mask"])
        assert told.shape == mask.shape
        known += int((mask != 255).sum())
        right += int(((told == mask) & (mask != 255)).sum())
    assert (record.num_known, record.num_correct) == (known, right)
    assert (sum(record.class_pixels[:3]), sum(record.class_pixels[6:])) == (right, known)


def test_a_denoiser_gives_images_of_their_sizes_back(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "root").mkdir()
    for number, size in enumerate([(300, 20), (7, 8)]):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / "root" / f"{number}.png")
    settings = settings_of(tmp_path, "dncnn", 3)
    _, rows = rows_of(in_folder(str(tmp_path / "root"), ()), settings, tmp_path)
    for row in rows:
        seen, told = picture((tmp_path / "root" / row["path"]).read_bytes()), picture(row["image"])
        assert told.shape == seen.shape
        assert row["change"] == pytest.approx(np.sqrt(np.square(told.astype(float) - seen).mean()), rel=1e-5)


def test_what_is_too_small_to_be_cropped_is_still_held_against_the_plain_model(tmp_path):
    (tmp_path / "root").mkdir()
    Image.new("RGB", (9, 40)).save(tmp_path / "root" / "a.png")
    for name in ("unet", "dncnn"):
        (tmp_path / name).mkdir()
        settings = settings_of(tmp_path / name, name, 2)
        images = in_folder(str(tmp_path / "root"), (), fit="crop")
        (part,) = cut(images, tmp_path / name, key_of(settings, images), 1)
        assert check_parity(part, settings)[0].num_samples == 1


def test_values_of_masks_without_a_class_are_not_counted(tmp_path):
    mask = np.full((20, 20), 1, np.uint8)
    mask[10:] = 7
    for kind, pixels in (("images", np.zeros((20, 20, 3), np.uint8)), ("masks", mask)):
        (tmp_path / "root" / kind).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(pixels).save(tmp_path / "root" / kind / f"{number:02d}.png")
    (tmp_path / "root" / "classes.txt").write_text("\n".join(CLASSES))
    images = of_test_split(Data(source="pairs", root=str(tmp_path / "root"), image_size=16))
    for own in (False, True):
        settings = settings_of(tmp_path / str(own)).model_copy(update={"own_size": own})
        record, rows = rows_of(images, settings, tmp_path / str(own))
        assert record.num_known == len(rows) * (200 if own else 128)


def test_it_is_another_prediction_than_at_one_size(tmp_path):
    settings = settings_of(tmp_path)
    (tmp_path / "root").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "root" / "a.png")
    images = in_folder(str(tmp_path / "root"), ())
    keys = {key_of(settings.model_copy(update={"own_size": own}), images) for own in (False, True)}
    keys.add(key_of(settings.model_copy(update={"own_size": False}), in_folder(str(tmp_path / "root"), (), fit="crop")))
    assert len(keys) == 3


def test_a_model_of_whole_images_is_refused():
    with refused("--own-size"):
        check_own_size(Model(), (16, 16, 3), (3, 0))
    check_own_size(Model(name="unet", width=2, depth=1), (16, 16, 3), (3, 0))
    with refused("--own-size", "unet", 1024, 2048):
        check_own_size(Model(name="unet", width=1, depth=7), (128, 128, 3), (3, 0))
