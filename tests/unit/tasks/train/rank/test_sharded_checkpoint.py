import itertools
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from paceline.tasks.errors import RunError
from paceline.tasks.train.rank import checkpoint_io
from paceline.tasks.train.rank.checkpoint import checkpoint_path, newest_valid_checkpoint, part_path
from paceline.tasks.train.rank.checkpoint_io import (
    AtomicCheckpointIO,
    ShardedStrategy,
    join,
    load,
    load_full,
    load_rest,
    prune,
    split_off_rows,
    write_with_digest,
)
from tests.support.refusals import refused

WEIGHT = torch.arange(14.0).view(7, 2)
PLACE = ("state_dict", "weight")


def write(directory, step, bounds=(0, 3, 7), num_parts=None):
    """A checkpoint of ranks with the rows between these bounds; only the first `num_parts` of its parts."""
    path = checkpoint_path(directory, step)
    path.mkdir(parents=True)
    ranks = list(itertools.pairwise(bounds))
    for rank, (start, stop) in enumerate(ranks[:num_parts]):
        rest = {"state_dict": {"count": torch.tensor(step)}, "step": step} if rank == 0 else {}
        part = {"rows": {PLACE: (start, len(WEIGHT), WEIGHT[start:stop].clone())}, "rest": rest}
        write_with_digest(part_path(path, rank, len(ranks)), part, path / "attempt-0")
    return path


@pytest.mark.parametrize("bounds", [(0, 7), (0, 3, 7), (0, 2, 4, 6, 7, 7)])
def test_any_number_of_ranks_joins_the_rows_that_it_needs(tmp_path, bounds):
    path = write(tmp_path, 1, bounds)
    assert torch.equal(load_full(path)["state_dict"]["weight"], WEIGHT)
    assert load_rest(path).keys() == load_full(path).keys() == {"state_dict", "step"}
    for start, stop in [(0, 0), (0, 4), (2, 5), (5, 7), (7, 7)]:
        part = join(path, lambda read, _, start=start, stop=stop: read(start, stop))
        assert torch.equal(part["state_dict"]["weight"], WEIGHT[start:stop])


def test_a_part_that_is_missing_leaves_the_checkpoint_before_it(tmp_path):
    before, path = write(tmp_path, 1), write(tmp_path, 2, num_parts=1)
    assert newest_valid_checkpoint(tmp_path) == before
    assert path.is_dir(), "its ranks may still be writing it"


def test_a_part_without_its_digest_is_missing_and_a_damaged_one_is_set_aside(tmp_path):
    before, second, third = (write(tmp_path, step) for step in (1, 2, 3))
    part_path(third, 1, 2).with_name("part-1-of-2.pt.sha256").unlink()
    assert newest_valid_checkpoint(tmp_path) == second
    damaged = part_path(second, 1, 2)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    assert newest_valid_checkpoint(tmp_path) == before
    assert second.with_suffix(".ckpt.damaged").is_dir()


def test_two_complete_checkpoints_stay_whatever_crashes_have_left(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    for step in (4, 5):
        write(tmp_path, step, num_parts=1)
    prune(tmp_path)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, step) for step in (2, 3)]


def test_one_rank_replaces_what_a_sharded_group_has_left_at_a_step(tmp_path):
    path = write(tmp_path, 2, num_parts=1)
    (plugin := AtomicCheckpointIO(tmp_path / "attempt-0")).save_checkpoint({"step": 2}, path)
    plugin.teardown()
    assert newest_valid_checkpoint(tmp_path) == path
    assert load_full(path) == load(path) == {"step": 2}


class Evil:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_of_a_planted_part_is_executed(tmp_path):
    path = write(tmp_path, 1)
    evil = {"rows": {PLACE: Evil(tmp_path / "pwned")}, "rest": {}}
    write_with_digest(part_path(path, 1, 2), evil, tmp_path / "attempt-0")
    with refused(None, kind=RunError):
        load_full(path)
    assert not (tmp_path / "pwned").exists()


def test_sharded_tensors_are_split_off_and_all_else_is_copied():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(WEIGHT.clone(), mesh, (Shard(0),), run_check=False)
        plain = torch.ones(2)
        rows = {}
        rest = split_off_rows({"a": [{"b": sharded, "c": plain}], "d": 1.5}, (), rows)
    finally:
        distributed.destroy_process_group()
    plain.zero_()
    assert rest["a"][0].keys() == {"c"}
    assert (rest["a"][0]["c"].tolist(), rest["d"]) == ([1, 1], 1.5)
    ((place, (start, num_rows, part)),) = rows.items()
    assert (place, start, num_rows) == (("a", 0, "b"), 0, 7)
    assert torch.equal(part, WEIGHT)


def sharded(directory):
    strategy = ShardedStrategy(1)
    strategy.checkpoint_io = AtomicCheckpointIO(directory / "attempt-0")
    return strategy


def test_training_continues_while_a_part_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()

    def write_later(*arguments):
        assert may_write.wait(10)
        write_with_digest(*arguments)

    monkeypatch.setattr(checkpoint_io, "write_with_digest", write_later)
    strategy, first, second = sharded(tmp_path), checkpoint_path(tmp_path, 1), checkpoint_path(tmp_path, 2)
    weight = torch.ones(2)
    strategy.save_checkpoint({"weight": weight}, first)
    weight.zero_()  # the next step changes the weights before they are written
    assert newest_valid_checkpoint(tmp_path) is None
    may_write.set()
    strategy.save_checkpoint({"weight": weight}, second)
    assert load_full(first)["weight"].tolist() == [1, 1], "complete before the next one is started"
    strategy.checkpoint_io.wait()
    assert newest_valid_checkpoint(tmp_path) == second


def test_a_part_that_cannot_be_written_is_an_error_and_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    strategy = sharded(tmp_path)
    strategy.save_checkpoint({"step": 1}, checkpoint_path(tmp_path, 1))
    strategy.checkpoint_io.wait()

    def full(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    strategy.save_checkpoint({"step": 2}, checkpoint_path(tmp_path, 2))
    with pytest.raises(OSError, match="No space"):
        strategy.save_checkpoint({"step": 3}, checkpoint_path(tmp_path, 3))
    assert newest_valid_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1)
