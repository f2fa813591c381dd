"""Photographs in their own shapes: what is stored, what a crop of it is, and what damage does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.recipe import Vary
from paceline.tasks.data.decode.transform import scale_bytes
from paceline.tasks.data.loading.augmentation import crops
from paceline.tasks.data.loading.loader import EvaluationLoader, make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.prepare import chunks, store
from paceline.tasks.errors import RunError
from tests.support.photographs import prepare_here, save_photographs
from tests.unit.tasks.data.loading.test_loader import CPU, KINDS, assert_equal
from tests.unit.tasks.data.prepare.test_store import plant

SIZE, STORED = 32, 40
FORMS = {"raw": {"stored_size": STORED}, "jpeg": {"stored_size": STORED, "storage": "jpeg"}}
SQUARES = {"raw": {}, "jpeg": {"storage": "jpeg"}}
CROPS = Vary(crop_scale=(0.08, 1.0), brightness=0.3, mixup=0.2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return save_photographs(tmp_path_factory.mktemp("photographs"))


@pytest.fixture(scope="module")
def sets(root, tmp_path_factory):
    """Prepared sets by name: photographs and squares, as pixels and as JPEG."""
    forms = {
        **{f"photo-{name}": form for name, form in FORMS.items()},
        **{f"square-{n}": f for n, f in SQUARES.items()},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MAX_FILES", 7)  # several shards
        return {
            name: prepare_here(
                Data(source="folder", root=str(root), image_size=SIZE, **form), tmp_path_factory.mktemp(name)
            )
            for name, form in forms.items()
        }


def batches(prepared, kind, num_epochs=2, **changes):
    """Batches of a loader; `thread` is streaming as for a GPU, where a thread gathers."""
    split = open_split(prepared, "train")
    settings = {"augment": "flip_shift", "shift_pixels": 2, "vary": CROPS, "channels_last": False, **changes}
    config = LoaderConfig(
        split,
        prepared.mean,
        prepared.std,
        plan=BatchPlan(split.num_samples, 5),
        rank=0,
        seed=3,
        shuffle_mib=1,
        device=CPU,
        **settings,
    )
    loader = make_loader("streaming" if kind == "thread" else kind, config)
    if kind == "thread":
        loader.in_background = True
    try:
        return [batch for _ in range(num_epochs) for batch in loader]
    finally:
        loader.close()


def stored(split, index):
    """The stored image of a sample, as it lies in its shard."""
    shard = int(split.shards_of(np.array(index)))
    return split._decode(shard, index - int(split._starts[shard]))[0]


def test_stored_images_keep_their_shapes_with_the_shorter_side_at_the_stored_size(sets):
    for name in ("photo-raw", "photo-jpeg"):
        prepared = sets[name]
        assert (prepared.image_shape, prepared.stored_size) == ((SIZE, SIZE, 3), STORED)
        assert store.verify(Path(prepared.path)) == ()
        split = open_split(prepared, "train")
        assert len(split.images) > 1
        assert (split.sizes_N2.min(axis=1) == STORED).all()
        assert set(map(tuple, split.sizes_N2.tolist())) == {(40, 53), (60, 40), (40, 40)}
        assert all(stored(split, index).shape[:2] == tuple(split.sizes_N2[index]) for index in range(split.num_samples))


def test_mean_and_deviation_are_those_of_the_stored_pixels(sets):
    split = open_split(sets["photo-raw"], "train")
    pixels = np.concatenate([stored(split, index).reshape(-1, 3) for index in range(split.num_samples)]) / 255
    assert sets["photo-raw"].mean == pytest.approx(pixels.mean(axis=0))
    assert sets["photo-raw"].std == pytest.approx(pixels.std(axis=0))
    assert sets["photo-jpeg"].mean == sets["photo-raw"].mean, "of the pixels before they are encoded"


@pytest.mark.parametrize("name", ["photo-raw", "photo-jpeg", "square-jpeg"])
@pytest.mark.parametrize("augment", ["none", "flip_shift"])
def test_all_loaders_deliver_the_same_batches(sets, name, augment):
    found = {kind: batches(sets[name], kind, augment=augment) for kind in (*KINDS, "thread")}
    for kind in (*KINDS[1:], "thread"):
        assert_equal(found[KINDS[0]], found[kind])
    half = len(found["streaming"]) // 2
    assert not torch.equal(found["streaming"][0].images_NCHW, found["streaming"][half].images_NCHW)


@pytest.mark.parametrize("name", ["photo-raw", "photo-jpeg"])
def test_a_crop_is_a_box_of_the_stored_image_with_its_real_pixels(sets, name):
    split = open_split(sets[name], "train")
    draw_N = np.arange(split.num_samples)
    boxes_N4 = crops(CROPS, draw_N, 3, split.sizes_N2)
    assert (boxes_N4[:, :2] >= 0).all()
    assert (boxes_N4[:, :2] + boxes_N4[:, 2:] <= split.sizes_N2).all()
    wide = split.sizes_N2[:, 1] > STORED
    assert (boxes_N4[wide, 1] + boxes_N4[wide, 3] > STORED + (53 - STORED) // 2).any(), "beyond the middle square"
    found_NHWC = split.gather(draw_N, None, boxes_N4)
    for index, (top, left, height, width) in enumerate(boxes_N4.tolist()):
        cut = Image.fromarray(stored(split, index)[top : top + height, left : left + width])
        expected = np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        assert np.abs(found_NHWC[index].astype(int) - expected).max() <= 1, "as Pillow scales, antialiased"


def test_any_number_of_threads_gathers_the_same(sets):
    split = open_split(sets["photo-jpeg"], "train")
    everything = np.arange(split.num_samples)
    number = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found.append(split.gather(everything))
    finally:
        torch.set_num_threads(number)
    np.testing.assert_array_equal(*found)
    with pytest.raises(IndexError):
        split.gather(np.array([split.num_samples]))


def test_evaluation_sees_the_scaled_middle_as_squares_have_it(sets):
    means = {}
    for name, prepared in sets.items():
        split = open_split(prepared, "test")
        ((_, batch),) = EvaluationLoader(split, (0.0,) * 3, (1.0,) * 3, CPU, False).batches(100)
        assert batch.images_NCHW.shape == (split.num_samples, 3, SIZE, SIZE)
        means[name] = batch.images_NCHW
    for name in ("photo-raw", "photo-jpeg", "square-jpeg"):
        difference = (means[name] - means["square-raw"]).abs().mean()
        assert difference < 0.06, name
    assert not torch.equal(means["photo-raw"], means["square-raw"])


def test_pixels_far_above_the_size_are_decoded_at_a_fraction(root, tmp_path):
    data = Data(source="folder", root=str(root), image_size=8, stored_size=60, storage="jpeg", jpeg_quality=100)
    split = open_split(prepare_here(data, tmp_path), "train")
    assert [split._decode(0, 0, shortest)[1] for shortest in (15, 31, 32, 63, 64)] == [1, 1, 2, 2, 4]
    half = split._decode(0, 0, 32)[0]
    assert half.shape[:2] == tuple(-(-split.sizes_N2[0] // 2))
    small, full = split.image(0), scale_bytes(stored(split, 0), (8, 8), "bilinear")
    assert small.shape == full.shape


def damage_by_cutting(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_a_shard_that_is_cut_short_is_one_error_and_prepared_again(root, tmp_path):
    data = Data(source="folder", root=str(root), image_size=SIZE, storage="jpeg")
    prepared = prepare_here(data, tmp_path)
    damage_by_cutting(Path(prepared.path) / "train" / "00000.images.npy")
    with pytest.raises(RunError, match=r"00000\.images\.npy.*recorded.*; run again") as caught:
        open_split(prepared, "train")
    assert "\n" not in str(caught.value)
    assert store.find(tmp_path, prepared.key) is None, "set aside"
    assert [path.name.startswith(".damaged") for path in (tmp_path / "prepared").iterdir()] == [True]


@pytest.mark.parametrize("kinds", [("images",), ("shapes",), ("images", "shapes")])
def test_shards_of_another_set_are_one_error(root, tmp_path, kinds):
    """With sizes and hashes that fit, as if somebody had copied files and corrected the manifest."""
    data = Data(source="folder", root=str(root), image_size=SIZE, storage="jpeg", stored_size=STORED)
    mine = prepare_here(data, tmp_path / "mine")
    other = prepare_here(data.model_copy(update={"stored_size": 50}), tmp_path / "other")
    for kind in kinds:
        name = f"train/00000.{kind}.npy"
        plant(Path(mine.path), name, (Path(other.path) / name).read_bytes())
    with pytest.raises(RunError, match=r"train.*; remove the set and run again") as caught:
        open_split(mine, "train").gather(np.arange(mine.num_train))
    assert "\n" not in str(caught.value)
