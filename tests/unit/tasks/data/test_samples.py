"""Samples as columns: the same as a tuple of them, small, and sent in small pieces."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.data.listing import hold_out
from paceline.tasks.data.samples import Sample, Samples, SamplesBuilder

NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=12)
FILES = st.lists(
    st.builds(
        Sample,
        path=st.one_of(
            NAMES, st.binary(min_size=1, max_size=9).map(lambda name: name.decode(errors="surrogateescape"))
        ),
        label=st.integers(-1, 5),
        size=st.integers(0, 2**40),
        stamp=st.text(max_size=8),
        row=st.just(-1),
    ),
    max_size=30,
)


@given(FILES, st.slices(30))
def test_columns_are_a_sequence_of_samples(files: list[Sample], part: slice) -> None:
    samples = Samples.of(files)
    assert list(samples) == files
    assert [samples[index] for index in range(len(files))] == files
    assert list(samples[part]) == files[part]
    assert list(pickle.loads(pickle.dumps(samples[part]))) == files[part]
    assert list(samples.names()) == [sample.name for sample in files]


def test_rows_of_arrays_have_names_of_their_own() -> None:
    samples = Samples.of(Sample("batch", 1, row=row) for row in range(3))
    assert list(samples.names()) == ["batch#0", "batch#1", "batch#2"]
    assert list(pickle.loads(pickle.dumps(samples[1:]))) == list(samples)[1:]
    builder = SamplesBuilder()
    builder.add("batch", 0, row=1)
    builder.add("file", 0)
    with pytest.raises(ValueError, match="1 of 2 samples are rows"):
        builder.build()


def test_a_part_travels_without_the_whole() -> None:
    whole = Samples.of(Sample(f"class/{number:06d}.jpg", 0, 900, str(10**18 + number)) for number in range(20_000))
    dealt = whole[7::20]
    sent = pickle.dumps(dealt)
    assert len(sent) < 100 * len(dealt)
    assert len(pickle.dumps(pickle.loads(sent))) == len(sent)
    assert len(pickle.dumps(whole[5_000:6_000])) < 100_000


@given(st.lists(st.tuples(st.integers(0, 4), NAMES), unique_by=lambda pair: pair[1], max_size=60), st.floats(0, 1))
def test_holding_out_takes_the_least_hashes_of_each_class(named: list[tuple[int, str]], fraction: float) -> None:
    samples = [Sample(name, label) for label, name in named]
    expected: set[Sample] = set()
    for label in range(5):
        members = [sample for sample in samples if sample.label == label]
        members.sort(key=lambda sample: hashlib.sha256(sample.name.encode()).hexdigest())
        expected.update(members[: int(fraction * len(members) + 0.5)])
    kept, held = hold_out(samples, fraction)
    assert list(kept) == [sample for sample in samples if sample not in expected]
    assert list(held) == [sample for sample in samples if sample in expected]
    relabelled = kept.with_labels(np.zeros(len(kept), dtype=np.int32))
    assert {sample.label for sample in relabelled} <= {0}
