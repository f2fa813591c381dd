"""Partitions of a listing: the same listing as from one piece, and none of a sample twice."""

import os

import fsspec
import pytest
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.sources import folder, webdataset
from paceline.tasks.data.sources import registry as source
from tests.support.archives import make_shards, samples_of, save_tar
from tests.support.refusals import refused

LAYOUTS = {
    "classes": ["a/1.png", "a/deep/2.png", "a-b/1.png", "b/1.png", "b/.hidden/1.png", "b/notes.txt", "README"],
    "splits": ["train/a/1.png", "train/b/2.png", "test/b/1.png", "test/a/1.png", "train/x.txt", "more/c/1.png"],
    "a split is a class": ["test_a/1.png", "val/1.png", "val/x/2.png", "z.csv"],
}


def save(root, paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".png"):
            Image.new("RGB", (8, 8)).save(root / path)
        else:
            (root / path).write_text("x")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_tree_in_partitions_is_the_tree(tmp_path, layout, is_remote):
    save(tmp_path, LAYOUTS[layout])
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/partitions", recursive=True)
    root = "memory://partitions" if is_remote else str(tmp_path)
    try:
        whole = folder._read_below(root, folder.IMAGE_SUFFIXES, "")
        parts = folder._read_partitions(root, folder.IMAGE_SUFFIXES)
        assert list(parts.files.with_labels(whole.files.labels)) == list(whole.files)
        assert set(parts.folders) == set(whole.folders)
        assert [parts.folders[label] for label in parts.files.labels] == [
            whole.folders[label] for label in whole.files.labels
        ]
        assert parts.ignored == whole.ignored
    finally:
        memory.rm("/partitions", recursive=True)


@pytest.mark.parametrize("paths", [["a/1.png"], ["a/1.png", "b/1.png", "c.png"], ["1.png"]])
def test_what_has_no_partitions_is_read_in_one_piece(tmp_path, paths):
    save(tmp_path, paths)
    assert folder._read_partitions(str(tmp_path), folder.IMAGE_SUFFIXES) is None


@pytest.mark.parametrize("links", [{"c": "a"}, {"b/again": "../a"}])
def test_partitions_that_list_one_sample_twice_are_refused(tmp_path, links):
    save(tmp_path, ["a/1.png", "b/2.png"])
    for place, target in links.items():
        (tmp_path / place).symlink_to(target)
    with refused("data.root", tmp_path, "a/", f"{next(iter(links))[0]}/"):
        folder._read_partitions(str(tmp_path), folder.IMAGE_SUFFIXES)


def test_a_link_back_up_the_tree_ends_in_a_partition_too(tmp_path):
    save(tmp_path, ["train/a/1.png", "train/b/2.png"])
    (tmp_path / "train" / "a" / "top").symlink_to(tmp_path)
    (tmp_path / "train" / "b" / "up").symlink_to(tmp_path / "train")
    assert len(folder._read_partitions(str(tmp_path), folder.IMAGE_SUFFIXES).files) == 2


def test_an_archive_that_is_linked_twice_is_refused(tmp_path):
    save_tar(tmp_path / "a.tar", samples_of(range(8)))
    (tmp_path / "b.tar").symlink_to("a.tar")
    with refused("data.root", "a.tar", "b.tar"):
        source.list_samples(Data(source="webdataset", root=str(tmp_path)))


def test_an_archive_is_indexed_once_until_its_size_or_time_changes(tmp_path, monkeypatch):
    make_shards(tmp_path)
    indexed = []
    index = webdataset._index

    def watched(*arguments):
        indexed.append(arguments[1].path)
        return index(*arguments)

    monkeypatch.setattr(webdataset, "_index", watched)
    data = Data(source="webdataset", root=str(tmp_path))
    first = source.list_samples(data)
    assert len(indexed) == 3
    again = source.list_samples(data)
    assert len(indexed) == 3
    assert (again.sha256, again.ignored) == (first.sha256, first.ignored)
    os.utime(tmp_path / "train-0001.tar", ns=(1, 1))
    assert source.list_samples(data).sha256 != first.sha256
    assert indexed[3:] == ["train-0001.tar"]
