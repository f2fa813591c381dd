"""Archives of WebDataset: the same pixels as files, read by ranges of bytes, and what is refused before any work."""

import json

import fsspec
import numpy as np
import pytest

from paceline.conf.data import Data
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.key import describe
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.sources import webdataset
from tests.support.archives import COLOURS, jpeg, make_shards, samples_of, save_tar
from tests.support.refusals import refused
from tests.support.shards import shards_of


def data_of(root, **changes):
    return Data(source="webdataset", root=str(root), image_size=16, validation_fraction=0.25, **changes)


def pixels_of(listing, split):
    return read_pixels(listing.origin, listing.split(split), 16, 3)


def test_archives_are_listed_by_split_and_read_as_files(tmp_path):
    make_shards(tmp_path / "tars")
    listing = source.list_samples(data_of(tmp_path / "tars"))
    assert listing.class_names == ("blue", "red")
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (18, 6, 8)
    assert listing.test[0].path == "test-0000.tar/0024.jpg"
    for name in COLOURS:
        (tmp_path / "files" / name).mkdir(parents=True)
    for number in range(24, 32):
        name = sorted(COLOURS)[number % 2]
        path = tmp_path / "files" / name / f"{number:04d}.jpg"
        path.write_bytes(jpeg(COLOURS[name], number, 20 + number % 5))
    files = source.list_samples(
        Data(source="folder", root=str(tmp_path / "files"), test_fraction=0, validation_fraction=0)
    )
    images = pixels_of(files, "train").images_NHWC
    by_name = {path[-8:]: image for path, image in zip(files.train.paths, images, strict=True)}
    found = pixels_of(listing, "test")
    assert found.reasons == {}
    for path, image in zip(listing.test.paths, found.images_NHWC, strict=True):
        assert np.array_equal(image, by_name[path[-8:]])


@pytest.mark.parametrize(
    "label",
    [
        lambda name: (".cls", str(len(name)).encode()),
        lambda name: (".json", json.dumps({"caption": "x", "label": len(name)}).encode()),
        lambda name: (".json", json.dumps({"cls": str(len(name))}).encode()),
    ],
)
def test_labels_are_text_or_json_and_numbers_are_in_their_order(tmp_path, label):
    members = [*samples_of(range(8), label), ("0100.jpg", b"x"), ("0100.cls", b"10\n"), ("0100.txt", b"a caption")]
    save_tar(tmp_path / "all.tar", members)
    for root in (tmp_path, tmp_path / "all.tar"):
        listing = source.list_samples(data_of(root, test_fraction=0))
        assert listing.class_names == ("3", "4", "10")
        assert listing.ignored == {".txt": 1}


def test_only_the_bytes_of_a_sample_are_read(tmp_path):
    """From a disk, and from any file system of fsspec."""
    make_shards(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "train-0000.tar"), "/webdataset/train-0000.tar")
    try:
        found = {}
        for root in (str(tmp_path), "memory://webdataset"):
            listing = source.list_samples(data_of(root, test_fraction=0.2))
            chosen = listing.train.take(
                np.array([at for at, path in enumerate(listing.train.paths) if path.startswith("train-0000.tar/000")])
            )
            found[root] = {
                sample.path: item.picture
                for sample, item in zip(chosen, webdataset.read(listing.origin, chosen, 16), strict=True)
            }
        here, there = found.values()
        for path in here.keys() & there.keys():
            number = int(path[-8:-4])
            assert here[path] == there[path] == jpeg(COLOURS[sorted(COLOURS)[number % 2]], number, 20 + number % 5)
        assert here.keys() & there.keys()
    finally:
        memory.rm("/webdataset", recursive=True)


def test_damaged_images_are_rejected_and_a_changed_archive_is_another_set(tmp_path):
    members = list(samples_of(range(12)))
    members[2] = ("0001.jpg", members[2][1][:100])
    save_tar(tmp_path / "all.tar", members)
    data = data_of(tmp_path, max_rejected_fraction=0.2)
    before = describe(data).key
    records = shards_of(source.list_samples(data), data, tmp_path / "set")
    rejected = [entry for record in records for entry in record.rejected]
    assert [entry.path for entry in rejected] == ["all.tar/0001.jpg"]
    assert sum(record.num_samples for record in records) == 11
    save_tar(tmp_path / "all.tar", members[:-2])
    assert describe(data).key != before


def test_an_archive_that_becomes_shorter_is_noticed(tmp_path):
    save_tar(tmp_path / "all.tar", samples_of(range(12)))
    listing = source.list_samples(data_of(tmp_path))
    content = (tmp_path / "all.tar").read_bytes()
    (tmp_path / "all.tar").write_bytes(content[:2_000])
    assert "ends before" in str(list(read_pixels(listing.origin, listing.train, 16, 3).reasons.values()))


def damaged(cut):
    def make(root):
        save_tar(root / "a.tar", samples_of(range(8)))
        (root / "a.tar").write_bytes(cut((root / "a.tar").read_bytes()))

    return make


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: (root / "a.txt").write_text("x"), ()),
        (lambda root: (root / "a.tar.gz").write_bytes(b"x"), (".gz",)),
        (lambda root: save_tar(root / "a.tar", [("1.jpg", b"x"), ("2.jpg", b"x"), ("2.cls", b"1")]), ("1", "a.tar")),
        (lambda root: save_tar(root / "a.tar", [("1.cls", b"1")]), ("1", "a.tar")),
        (lambda root: save_tar(root / "a.tar", [("1.npy", b"1")]), ("a.tar",)),
        (lambda root: save_tar(root / "a.tar", [("1.json", b"{"), ("1.jpg", b"x")]), ("1.json",)),
        (lambda root: save_tar(root / "a.tar", [("1.json", b'{"label": [1]}'), ("1.jpg", b"x")]), ("1.json",)),
        (lambda root: save_tar(root / "a.tar", [*samples_of([7]), ("0009.cls", b"2"), *samples_of([7])]), ("0009",)),
        (lambda root: save_tar(root / "a.tar", [*samples_of([7, 8]), *samples_of([7])]), ("0007",)),
        (lambda root: save_tar(root / "a.tar", [*samples_of([7]), ("0007.json", b'{"label": 3}')]), ("0007",)),
        (lambda root: save_tar(root / "test.tar", samples_of(range(8))), ("train-0000.tar",)),
        (
            lambda root: [save_tar(root / name, samples_of(range(8))) for name in ("train.tar", "more.tar")],
            ("more.tar",),
        ),
        (lambda root: save_tar(root / "a.tar", samples_of([2, 4, 6])), ("1",)),
        (damaged(lambda content: content[:3_000]), ("a.tar",)),
        (damaged(lambda content: content[:1_024]), ("a.tar",)),
        (damaged(lambda content: content[:2_048] + b"\xff" * 512 + content[2_560:]), ("a.tar",)),
        (damaged(lambda content: b""), ("a.tar",)),
    ],
)
def test_what_is_wrong_is_one_error_before_any_work(tmp_path, make, told):
    make(tmp_path)
    with refused("data.root", tmp_path, *told):
        source.list_samples(data_of(tmp_path))
