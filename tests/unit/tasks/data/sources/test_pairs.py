"""Pictures with masks: generated ones, and folders of them with everything that can be wrong."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.decode.transform import DecodeError, decode_mask
from paceline.tasks.data.loading.loader import make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.records.data import PreparedSet
from tests.support.refusals import refused

CLASSES = ("sky", "tree", "house")


def png(array: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG", **options)
    return stream.getvalue()


def save_pair(root: Path, name: str, mask: np.ndarray, size: tuple[int, int] | None = None) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    shape = size or mask.shape[:2]
    for kind, array in (("images", rng.integers(0, 256, (*shape, 3), dtype=np.uint8)), ("masks", mask)):
        path = root / kind / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(array))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "pairs"
    rng = np.random.default_rng(0)
    for number in range(20):
        save_pair(place, f"day/{number:02d}", rng.choice([0, 1, 2, 255], (12, 12)).astype(np.uint8))
    (place / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return place


def prepare(data: Data, home: Path) -> PreparedSet:
    listing = source.list_samples(data)
    with store.temporary(home, "0" * 64) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = manifest.build(listing, data, "0" * 64, records, sum(len(record.rejected) for record in records))
        path = store.publish(home, directory, facts, [])
    return facts.to_prepared_set(path, reused=False, seconds=0.0)


def test_a_set_with_masks_has_them_as_its_last_channel(root: Path, tmp_path: Path) -> None:
    prepared = prepare(Data(source="pairs", root=str(root), image_size=12), tmp_path)
    assert prepared.image_shape == (12, 12, 4)
    assert prepared.picture_shape == (12, 12, 3)
    assert prepared.class_names == CLASSES
    assert (prepared.mean[3], prepared.std[3]) == (0.0, 1 / 255)
    split = open_split(prepared, "train")
    listing = source.list_samples(Data(source="pairs", root=str(root), image_size=12))
    images = split.gather(np.arange(split.num_samples))
    for sample, stored in zip(listing.train, images, strict=True):
        mask = np.asarray(Image.open(root / sample.path.replace("images", "masks", 1)))
        assert np.array_equal(stored[..., 3], mask + np.uint8(1)), "0 is what was 255"
        assert np.array_equal(stored[..., :3], np.asarray(Image.open(root / sample.path)))
    counts = np.bincount(images[..., 3].ravel(), minlength=4)[1:]
    assert prepared.class_counts["train"] == tuple(counts), "pixels"


def test_folders_of_splits_are_kept(root: Path) -> None:
    whole = root.with_name("splits")
    for split, number in (("train", 3), ("val", 1), ("test", 2)):
        for index in range(number):
            save_pair(whole / split, str(index), np.zeros((9, 9), np.uint8))
    (whole / "classes.txt").write_text("a\nb\n")
    listing = source.list_samples(Data(source="pairs", root=str(whole)))
    assert [len(listing.split(name)) for name in ("train", "validation", "test")] == [3, 1, 2]
    assert [sample.path for sample in listing.validation] == ["val/images/0.png"]


def test_a_changed_mask_is_another_set(root: Path) -> None:
    data = Data(source="pairs", root=str(root))
    before = source.list_samples(data).sha256
    save_pair(root, "day/03", np.zeros((12, 12), np.uint8))
    assert source.list_samples(data).sha256 != before


def test_what_cannot_be_used_is_listed_with_its_reason(root: Path, tmp_path: Path) -> None:
    save_pair(root, "day/00", np.full((12, 12), 7, np.uint8))
    save_pair(root, "day/01", np.zeros((12, 12), np.uint8), size=(10, 12))
    save_pair(root, "day/02", np.zeros((12, 12, 3), np.uint8))
    (root / "masks/day/03.png").write_bytes(b"no picture")
    listing = source.list_samples(Data(source="pairs", root=str(root), test_fraction=0, validation_fraction=0))
    data = Data(source="pairs", root=str(root), image_size=12, test_fraction=0, validation_fraction=0)
    with store.temporary(tmp_path, "1" * 64) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
    reasons = {Path(it.path).stem: it.reason for record in records for it in record.rejected}
    assert sorted(reasons) == ["00", "01", "02", "03"]
    assert reasons["00"] == "its mask holds 7, and the set has 3 classes from 0"
    assert reasons["01"].startswith("its mask has (12, 12) pixels, and the image (12, 10)")
    assert "mode RGB" in reasons["02"]
    assert reasons["03"].startswith("its mask: ")


@pytest.mark.parametrize(
    ("damage", "data"),
    [
        (lambda root: (root / "classes.txt").unlink(), ["classes.txt"]),
        (lambda root: (root / "classes.txt").write_text("one\n"), ["classes.txt", 1]),
        (lambda root: (root / "classes.txt").write_text("a\n\nb\n"), ["classes.txt", 2]),
        (lambda root: (root / "masks/day/00.png").unlink(), [1, 20, "images/", "masks/", "day/00.png"]),
        (lambda root: (root / "images/day/00.png").unlink(), [1, 20, "masks/", "images/", "day/00.png"]),
        (lambda root: (root / "masks/day/00.png").rename(root / "masks/day/00.jpg"), [".jpg", ".png"]),
    ],
)
def test_a_wrong_layout_is_told_before_any_work(root: Path, damage, data: list[object]) -> None:
    damage(root)
    with refused("data.root", root, *data):
        source.list_samples(Data(source="pairs", root=str(root)))


def test_masks_are_cropped_as_their_images_and_never_mixed() -> None:
    mask = np.repeat(np.repeat(np.array([[0, 2, 0, 0], [1, 2, 2, 0]], np.uint8), 10, 0), 10, 1)
    image = np.zeros((20, 40, 3), np.uint8)
    image[mask == 2] = (255, 0, 0)
    found = decode_mask(png(mask), png(image), 8)
    assert found.shape == (8, 8)
    assert set(np.unique(found)) <= {1, 2, 3}
    red = np.asarray(Image.open(io.BytesIO(png(image))).crop((10, 0, 30, 20)).resize((8, 8)))[..., 0] > 127
    assert ((found == 3) == red).mean() > 0.9


def test_a_turned_photograph_has_a_turned_mask() -> None:
    rng = np.random.default_rng(0)
    pixels, stored = rng.integers(0, 255, (6, 10, 3), dtype=np.uint8), rng.integers(0, 3, (6, 10), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = png(pixels, exif=exif)
    upright = np.rot90(stored, -1)
    lying = decode_mask(png(stored), turned, 6)
    assert np.array_equal(lying, decode_mask(png(upright), turned, 6)), "as it lies in the file, or as it is shown"
    with pytest.raises(DecodeError, match="pixels"):
        decode_mask(png(stored[:5]), turned, 6)


def test_generated_sets_are_always_the_same_and_hold_every_class() -> None:
    for name, channels, classes in (("shapes", 4, 4), ("textures", 1, 3)):
        listing = source.list_samples(Data(source=name))
        assert listing.num_samples == {"shapes": 2000, "textures": 1200}[name]
        first = read_pixels(listing.origin, listing.train[:40], 32, channels).images_NHWC
        again = read_pixels(listing.origin, listing.train[10:11], 32, channels).images_NHWC
        assert first.shape == (40, 32, 32, channels)
        assert np.array_equal(first[10], again[0])
        assert len(listing.class_names) == classes
        if name == "shapes":
            shares = np.bincount(first[..., 3].ravel(), minlength=5) / first[..., 3].size
            assert shares[0] == 0
            assert (shares[1:] > 0.02).all(), shares


@pytest.mark.parametrize("loading", ["resident", "streaming", "foreground"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_mask_moves_with_its_picture_and_keeps_its_values(tmp_path: Path, loading: str, channels_last: bool) -> None:
    """Pictures that say what their masks do."""
    rng, root = np.random.default_rng(0), tmp_path / "pairs"
    for number in range(12):
        mask = rng.integers(0, 3, (16, 16), dtype=np.uint8)
        for kind, array in (("images", np.repeat((mask * 100)[..., None], 3, axis=2)), ("masks", mask)):
            (root / kind).mkdir(parents=True, exist_ok=True)
            (root / kind / f"{number}.png").write_bytes(png(array))
    (root / "classes.txt").write_text("\n".join(CLASSES))
    data = Data(source="pairs", root=str(root), image_size=16, test_fraction=0.1, validation_fraction=0)
    prepared = prepare(data, tmp_path)
    split = open_split(prepared, "train")
    loader = make_loader(
        loading,
        LoaderConfig(
            split,
            prepared.mean,
            prepared.std,
            plan=BatchPlan(split.num_samples, 4),
            rank=0,
            seed=1,
            augment="flip_shift",
            shift_pixels=3,
            shuffle_mib=1,
            device=torch.device("cpu"),
            channels_last=channels_last,
            draws=True,
        ),
    )
    draws = []
    for batch in loader:
        mask = batch.images_NCHW[:, 3]
        assert set(mask.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}, "exactly"
        assert (mask == 0).any(), "what shifts bring in is no class"
        picture = (batch.images_NCHW[:, 0] * prepared.std[0] + prepared.mean[0]) * 255
        inside = mask > 0
        torch.testing.assert_close(picture[inside], (mask[inside] - 1) * 100, atol=1e-3, rtol=0)
        draws += batch.noise_seeds_N.tolist()
    loader.close()
    assert sorted(draws) == list(range(split.num_samples)), "each another, and the next epoch's go on"
    assert next(iter(loader)).noise_seeds_N.min() >= split.num_samples
    loader.close()
