"""A task decodes on its share of the cores of its host."""

import threading

import pytest

from paceline.conf.data import Data
from paceline.tasks.data.decode import transform
from paceline.tasks.data.prepare import shard
from paceline.tasks.data.sources import registry as source
from tests.support.photographs import save_photographs
from tests.support.shards import shards_of


@pytest.mark.parametrize(("num_tasks", "num_threads"), [(1, 4), (2, 2), (4, 1), (9, 1), (0, 1)])
@pytest.mark.parametrize("form", [{}, {"stored_size": 40, "storage": "jpeg"}])
def test_the_cores_of_a_host_are_shared_by_its_tasks(tmp_path, monkeypatch, num_tasks, num_threads, form):
    data = Data(source="folder", root=str(save_photographs(tmp_path / "images", 40)), image_size=32, **form)
    decode, together = transform.decode, threading.Barrier(num_threads)
    seen = set()

    def decode_together(*arguments):
        if len(seen) < num_threads:
            seen.add(threading.get_ident())
            together.wait(timeout=60)  # breaks if fewer threads decode
        return decode(*arguments)

    monkeypatch.setattr(transform, "decode", decode_together)
    monkeypatch.setattr(shard, "usable_cores", lambda: 4)
    records = shards_of(source.list_samples(data), data, tmp_path / "set", num_tasks)
    assert len(seen) == num_threads
    monkeypatch.undo()
    alone = shards_of(source.list_samples(data), data, tmp_path / "alone")
    assert [record.files for record in records] == [record.files for record in alone]
