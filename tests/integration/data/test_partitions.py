"""Workers list the partitions of a source, with the key that one process finds."""

import pytest

from paceline.conf.data import Data
from paceline.tasks.data import partitions
from paceline.tasks.data.key import describe
from tests.support.archives import make_shards, samples_of, save_tar
from tests.support.jobs import two_workers
from tests.support.pictures import make_pictures
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def workers():
    with two_workers() as address:
        yield address


def test_the_key_of_a_set_does_not_depend_on_who_lists(workers, tmp_path, monkeypatch):
    make_pictures(tmp_path / "folder")
    make_shards(tmp_path / "webdataset")
    for kind in ("folder", "webdataset"):
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))  # what workers do not share
        data = Data(source=kind, root=str(tmp_path / kind), image_size=16)
        alone = describe(data)
        with partitions.list_on(workers):
            assert describe(data) == alone


def test_an_error_of_a_partition_is_the_users(workers, tmp_path):
    save_tar(tmp_path / "a.tar", samples_of(range(8)))
    save_tar(tmp_path / "b.tar", [("1.jpg", b"x")])
    with partitions.list_on(workers), refused("data.root", tmp_path, "b.tar"):
        describe(Data(source="webdataset", root=str(tmp_path)))
