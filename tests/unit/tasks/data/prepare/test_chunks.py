"""How a listing is cut into chunks and portions, and how what they reject is put in order."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.conf.data import Data
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing
from paceline.tasks.data.prepare.chunks import ChunkPlanner, chunks_of
from paceline.tasks.data.prepare.moments import Moments
from paceline.tasks.data.prepare.shard import Rejected, ShardRecord
from paceline.tasks.data.prepare.store import RejectedSpool
from paceline.tasks.data.samples import Sample, Samples
from paceline.tasks.data.split import first_reader


def listing(num_train: int, num_test: int = 0, size: int = 900) -> SampleListing:
    def files(number: int) -> Samples:
        return Samples.of(Sample(f"{index:07d}.jpg", index % 2, size) for index in range(number))

    return SampleListing(Origin("files"), ("a", "b"), files(num_train), files(0), files(num_test), channels=3)


def cutter(found: SampleListing, image_size: int = 32) -> ChunkPlanner:
    return ChunkPlanner(found, Data(source="folder", root="x", image_size=image_size), Path("nowhere"))


@given(st.integers(1, 40_000), st.integers(0, 9_000), st.integers(1, 5), st.integers(1, 3))
@example(4_097, 4_097, 1, 1)  # ten chunks of 819 or 820
def test_every_chunk_is_in_one_portion_of_its_reader(
    num_train: int, num_test: int, num_readers: int, num_threads: int
) -> None:
    cut = cutter(listing(num_train, num_test))
    portions = list(cut.portions(num_readers, num_threads))
    chunks = [(chunk.split, chunk.number) for portion in portions for chunk in portion.chunks]
    assert sorted(chunks) == sorted((chunk.split, chunk.number) for chunk in cut.chunks())
    assert len(set(chunks)) == len(chunks)
    assert len({portion.key for portion in portions}) == len(portions)
    for portion in portions:
        num_files = sum(len(chunk.samples) for chunk in portion.chunks)
        assert len(portion.chunks) == 1 or num_files <= 4_096 + len(portion.chunks)  # chunks of a split differ by one
        for chunk in portion.chunks:
            assert portion.reader == first_reader(chunk.split, chunk.number, cut.num_chunks[chunk.split], num_readers)


def test_portions_are_large_and_end_small() -> None:
    sizes = [len(portion.chunks) for portion in cutter(listing(40_960)).portions(2, 1)]
    assert sizes == [4, 4] * 4 + [2, 2, 1, 1, 1, 1]
    # One worker of eight threads: none waits for another that has taken all.
    assert [len(portion.chunks) for portion in cutter(listing(8_192)).portions(1, 8)] == [1] * 8
    # Of large images one chunk is seconds of work.
    large = cutter(listing(4_096, size=200_000), image_size=224)
    assert {len(portion.chunks) for portion in large.portions(2, 1)} == {1}


def test_a_chunk_is_bounded_in_count_and_bytes() -> None:
    assert chunks_of(listing(100_000).train, Origin("files"), 3_072) == 98
    assert chunks_of(listing(10_240).train, Origin("files"), 224 * 224 * 3) == -(-10_240 // 445)
    assert chunks_of(listing(1_000, size=10 * 2**20).train, Origin("files"), 3_072) == 157
    assert chunks_of(listing(16_384).train, Origin("digits"), 64) == 2
    assert chunks_of(listing(3, size=2**30).train, Origin("files"), 3_072) == 3  # never an empty one


def test_rejected_samples_are_listed_in_the_order_of_the_shards(tmp_path: Path) -> None:
    def record(split: str, number: int, count: int) -> ShardRecord:
        rejected = tuple(
            Rejected(path=f"{split}/{number}/{place}", split=split, class_name="a", reason="no")  # type: ignore[arg-type]
            for place in range(count)
        )
        moments = Moments(count=0, mean=(0.0,), sum_of_squares=(0.0,))
        return ShardRecord(
            split=split,  # type: ignore[arg-type]
            number=number,
            num_samples=0,
            files=(),
            class_counts=(0,),
            moments=moments,
            rejected=rejected,
        )

    with closing(RejectedSpool(tmp_path)) as spool:
        for split, number, count in (("test", 0, 1), ("train", 10, 2), ("validation", 0, 1), ("train", 9, 3)):
            assert spool.take_rejected(record(split, number, count)).rejected == ()
        assert spool.take_rejected(record("train", 0, 0)) == record("train", 0, 0)
        assert spool.num_rejected == 7
        assert spool.restore(record("train", 9, 0)) == record("train", 9, 3)
        lines = b"".join(spool.pieces()).decode().splitlines()
    found = [Rejected.model_validate_json(line) for line in lines]
    assert found[0].path == "train/9/0"
    places = [(SPLITS.index(entry.split), int(entry.path.split("/")[1])) for entry in found]
    assert places == sorted(places)
    assert Counter(entry.split for entry in found) == {"train": 5, "validation": 1, "test": 1}
    assert list(tmp_path.iterdir()) == []
