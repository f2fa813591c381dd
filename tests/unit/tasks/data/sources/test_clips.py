"""Clips as samples: how they are listed, what is generated, how their frames stay together, what is refused."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from paceline.conf.data import Data
from paceline.conf.load import ConfigError, load
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.key import describe
from paceline.tasks.data.loading.loader import make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.prepare import moments
from paceline.tasks.data.sources import generated
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.split import Split
from tests.support import clips
from tests.support.refusals import refused
from tests.support.shards import shards_of

FRAMES = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("clips")
    return root, clips.make_clips(root, per_class=10)


def data_of(root, **changes):
    return Data(source="clips", root=str(root), image_size=16, **({"num_frames": FRAMES} | changes))


def test_a_video_is_a_sample_and_so_is_a_folder_of_frames(made):
    root, _ = made
    (root / "left" / "notes.txt").write_text("not a sample")
    listing = source.list_samples(data_of(root))
    assert listing.class_names == ("left", "right")
    assert listing.num_samples == 20
    assert (listing.channels, listing.origin.num_frames, listing.ignored) == (3 * FRAMES, FRAMES, {".txt": 1})
    names = {name for split in ("train", "validation", "test") for name in listing.split(split).names()}
    assert {"left/004/", "left/009/", "right/003.mkv"} < names


def test_damaged_clips_are_listed_with_the_reason(made, tmp_path):
    root, damaged = made
    data = data_of(root)
    listing = source.list_samples(data)
    records = shards_of(listing, data, tmp_path)
    assert {entry.path for record in records for entry in record.rejected} == damaged
    assert np.load(next((tmp_path / "train").glob("*.images.npy"))).shape[1:] == (16, 16, 3 * FRAMES)


def test_frames_are_taken_in_the_order_of_their_numbers_and_a_changed_one_makes_another_set(tmp_path):
    for label in ("a", "b"):
        for number in range(3):
            clips.write_frames(tmp_path / label / f"clip{number}", clips.grey_levels(12), "frame{}.png")
    (tmp_path / "a" / "clip0" / ".hidden.png").write_bytes(b"")
    data = data_of(tmp_path, num_frames=4, test_fraction=0.34)
    listing, key = source.list_samples(data), describe(data).key
    pixels = read_pixels(listing.origin, listing.train, 16, 12).images_NHWC
    assert pixels[0].reshape(-1, 4, 3).mean(axis=(0, 2)).tolist() == [4, 16, 28, 40], "frame 10 behind frame 9"
    (tmp_path / "a" / "clip1" / "frame3.png").unlink()
    assert describe(data).key != key
    assert describe(data_of(tmp_path, num_frames=5, test_fraction=0.34)).key != describe(data).key


def test_frames_in_an_archive_are_found(tmp_path):
    for label in ("a", "b"):
        for number in range(2):
            clips.write_frames(tmp_path / "clips" / label / str(number), clips.grey_levels(4))
    shutil.make_archive(str(tmp_path / "clips"), "zip", tmp_path / "clips")
    pixels = []
    for root in (tmp_path / "clips", f"zip://::{tmp_path / 'clips.zip'}"):
        listing = source.list_samples(data_of(root, num_frames=4, test_fraction=0, validation_fraction=0))
        found = read_pixels(listing.origin, listing.train, 16, 12)
        assert found.reasons == {}
        pixels.append(found.images_NHWC)
    assert np.array_equal(*pixels)


def test_what_is_wrong_in_a_folder_of_frames_is_told(tmp_path):
    for label in ("a", "b"):
        for number in range(4):
            clips.write_frames(tmp_path / label / str(number), clips.grey_levels(5))
    (tmp_path / "a" / "0" / "4.png").unlink()
    (tmp_path / "a" / "1" / "2.png").write_bytes(b"no picture")
    listing = source.list_samples(data_of(tmp_path, num_frames=5, test_fraction=0, validation_fraction=0))
    found = read_pixels(listing.origin, listing.train, 8, 15)
    assert found.reasons[0] == "4 frames, and data.num_frames=5"
    assert found.reasons[1].startswith("2.png: ")
    assert len(found.positions) == 6
    clips.write_frames(tmp_path / "c", clips.grey_levels(5))
    with refused("data.root", "c/", "CLASS/CLIP/0001.png"):
        source.list_samples(data_of(tmp_path))


def pixels_of_motions(number, size=16):
    listing = source.list_samples(Data(source="motions", num_frames=8))
    found = read_pixels(listing.origin, listing.train[:number], size, 24)
    return found.images_NHWC.reshape(-1, size, size, 8, 3), listing.train.labels[:number]


def test_motions_go_where_their_names_say_and_no_frame_alone_tells():
    """The light's middle on a circle, for opposite sides of a picture are one place, tells all; each frame nothing."""
    clips_NSSTC, labels_N = pixels_of_motions(600)
    turns = np.exp(2j * np.pi * np.arange(16) / 16)
    light_NSST = clips_NSSTC.mean(axis=4) - generated.GROUND
    steps = [
        np.angle((middles[:, 1:] * middles[:, :-1].conj()).sum(1))
        for middles in (np.einsum("nyxt,y->nt", light_NSST, turns), np.einsum("nyxt,x->nt", light_NSST, turns))
    ]
    wanted = np.array([generated.step_of(label) for label in range(len(generated.MOTION_CLASSES))])
    assert (np.stack(steps, axis=1) @ wanted.T).argmax(1).tolist() == labels_N.tolist()
    for frame in (0, 4, 7):
        values = clips_NSSTC[:, :, :, frame].reshape(600, -1) / 255
        told = LogisticRegression(max_iter=50, C=0.01, tol=1e-2).fit(values[:400], labels_N[:400])
        assert told.score(values[400:], labels_N[400:]) < 0.35, "by chance 0.25, and 0.03 of deviation"


def test_motions_are_always_the_same():
    listing = source.list_samples(Data(source="motions"))
    assert (listing.num_samples, listing.class_names) == (1_600, ("east", "north", "west", "south"))
    first, again = (
        read_pixels(listing.origin, part, 16, 24).images_NHWC for part in (listing.train[:4], listing.train[3:4])
    )
    assert np.array_equal(first[3], again[0])


def test_all_frames_have_the_moments_of_their_colours():
    rng = np.random.default_rng(2)
    images = rng.integers(0, 200, (7, 5, 5, 12), dtype=np.uint8)
    images[..., 3:6] //= 4
    found = moments.over_frames(moments.of_images(images), 4)
    colours = images.reshape(-1, 3)
    np.testing.assert_allclose(found.scaled_mean(), np.tile(colours.mean(0) / 255, 4))
    np.testing.assert_allclose(found.scaled_std(), np.tile(colours.std(0) / 255, 4))


@pytest.mark.parametrize("loading", ["resident", "streaming", "foreground"])
def test_all_frames_of_a_clip_are_shifted_and_mirrored_alike(loading):
    """Each pixel of the second frame is that of the first, plus one: so it must be after any augmentation."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 200, (20, 9, 9, 3), dtype=np.uint8)
    images = np.concatenate([first, first + np.uint8(1)], axis=3)
    split = Split("train", [images], np.zeros(20, np.int64), None, (9, 9, 6))
    mean, std = (0.0,) * 6, (1 / 255,) * 6
    loader = make_loader(
        loading,
        LoaderConfig(
            split,
            mean,
            std,
            plan=BatchPlan(20, 5, 1),
            rank=0,
            seed=3,
            augment="flip_shift",
            shift_pixels=3,
            shuffle_mib=1,
            device=torch.device("cpu"),
            channels_last=True,
        ),
    )
    for batch in loader:
        one, two = batch.images_NCHW.split(3, dim=1)
        inside = one > 0
        assert torch.equal(two[inside], one[inside] + 1)
        assert inside.float().mean() > 0.5
    loader.close()


@pytest.mark.parametrize(
    ("preset", "overrides", "wrong"),
    [
        ("motions", ["model.name=resnet18"], ["model.name", "resnet18", "data.source=motions", "model.name=sequence"]),
        ("clips", ["model.name=convblocks"], ["model.name", "model.name=convblocks", "model.name=sequence"]),
        ("digits", ["model.name=sequence"], ["model.name", "data.source=digits", "data.source=clips"]),
        ("digits", ["data.num_frames=4"], ["data.num_frames", "data.num_frames=4", "data.source=digits"]),
        ("motions", ["recipe.augment=flip_shift"], ["recipe.augment", "shift", "none"]),
        ("motions", ["model.test_views=2"], ["model.test_views", "model.test_views=1"]),
        ("motions", ["data.num_frames=1"], ["data.num_frames", 2, 1]),
        ("motions", ["data.root=DIR"], ["data.root", "data.root=DIR", "data.source=motions"]),
    ],
)
def test_what_does_not_fit_is_refused_on_one_line(preset, overrides, wrong):
    with refused(*wrong, kind=ConfigError):
        load(preset, overrides)


def test_clips_of_a_folder_may_be_mirrored():
    assert load("clips", ["data.root=DIR", "recipe.augment=flip_shift"]).recipe.augment == "flip_shift"


def test_an_origin_of_pictures_has_no_frames():
    assert dataclasses.replace(source.list_samples(Data(source="digits")).origin).num_frames == 0
