"""Rows of what a `predict_step` returns: columns by name, a row for each sample, complete files."""

import re
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning import rows
from paceline.tasks.train.lightning.rows import PartWriter, table_of


class Boxes(NamedTuple):
    corners: torch.Tensor
    names: list[str]


GRID_NHW = torch.arange(12.0).reshape(2, 3, 2)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (torch.tensor([1.5, 2.5]), {"prediction": [1.5, 2.5]}),
        (GRID_NHW, {"prediction": GRID_NHW.tolist()}),
        (torch.zeros(2, 0), {"prediction": [[], []]}),
        (torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16), {"prediction": [[1.5], [2.5]]}),
        (torch.tensor([True, False]), {"prediction": [True, False]}),
        (np.array(["a", "b"]), {"prediction": ["a", "b"]}),
        (["a", "b"], {"prediction": ["a", "b"]}),
        (("a", "b"), {"prediction": ["a", "b"]}),
        ([torch.tensor([1, 2, 3]), torch.tensor([4])], {"prediction": [[1, 2, 3], [4]]}),
        ([torch.tensor(1.0), torch.tensor(2.0)], {"prediction": [1.0, 2.0]}),
        ([{"word": "a", "place": (1, 2)}, {"word": "b", "place": (3, 4)}], {
            "prediction": [{"word": "a", "place": [1, 2]}, {"word": "b", "place": [3, 4]}]
        }),
        ((torch.tensor([1, 2]), ["a", None]), {"prediction_0": [1, 2], "prediction_1": ["a", None]}),
        (
            {"name": ("a", "b"), "head": {"score": torch.tensor([0.5, 1.0])}},
            {"name": ["a", "b"], "head.score": [0.5, 1.0]},
        ),
        (Boxes(torch.tensor([[1, 2], [3, 4]]), ["a", "b"]), {"corners": [[1, 2], [3, 4]], "names": ["a", "b"]}),
    ],
)  # fmt: skip
def test_a_result_has_a_row_for_each_sample(result, expected):
    assert table_of(result).to_pydict() == expected


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (None, "prediction of predict_step cannot be written: one value of type NoneType for all samples"),
        (torch.tensor(3.0), "one value of type ndarray for all samples"),
        (
            {"loss": 0.5, "label": torch.tensor([1, 2])},
            "loss of predict_step cannot be written: one value of type float",
        ),
        ({}, "predict_step returned an empty dict"),
        ({"head": {}}, "predict_step returned an empty dict"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "a of 2, b of 3 samples"),
        ({"a": object()}, "a of predict_step cannot be written: of type object"),
        ([object(), object()], "prediction of predict_step cannot be written: Could not convert"),
        (["a", 1], "prediction of predict_step cannot be written: "),
        (torch.zeros(2, dtype=torch.complex64), "prediction of predict_step cannot be written: Unsupported numpy type"),
        (torch.eye(2).to_sparse(), "prediction of predict_step cannot be written: "),
    ],
)
def test_what_is_no_row_is_refused(result, fault):
    with pytest.raises(InputError) as refusal:
        table_of(result)
    assert fault in str(refusal.value)
    assert refusal.value.hint


def test_parts_hold_all_rows_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PART_BYTES", 50)
    writer = PartWriter(tmp_path)
    for number in range(5):
        writer.add({"number": torch.tensor([2 * number, 2 * number + 1])}, dataloader=0)
    writer.write()
    parts = sorted(tmp_path.iterdir())
    assert [path.name for path in parts] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert [number for path in parts for number in pq.read_table(path)["number"].to_pylist()] == list(range(10))
    assert (writer.num_rows, writer.num_batches, writer.schema.names) == (10, 5, ["number", "dataloader"])


def test_a_type_may_be_known_later_than_in_the_first_batch(tmp_path):
    writer = PartWriter(tmp_path)
    for note in (None, "late"):
        writer.add({"note": [note], "score": [1 if note is None else 0.5]})
    writer.write()
    assert pq.read_table(tmp_path).to_pydict() == {"note": [None, "late"], "score": [1.0, 0.5]}


@pytest.mark.parametrize("later", [{"label": ["a"]}, {"other": torch.tensor([1])}, {"label": torch.zeros(1, 2)}])
@pytest.mark.parametrize("part_bytes", [1, 1000])
def test_a_batch_of_other_columns_is_named(tmp_path, monkeypatch, later, part_bytes):
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    writer = PartWriter(tmp_path)
    writer.add({"label": torch.tensor([1])})
    with pytest.raises(
        InputError, match=r"batch 1 of predict_step differs from those before, which have label \(int64\)"
    ):
        writer.add(later)


@pytest.mark.parametrize("part_bytes", [1, 1000])
def test_columns_and_fields_may_come_in_another_order(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    writer = PartWriter(tmp_path)
    writer.add({"label": [1], "box": [{"x": 2, "y": 3}]}, dataloader=0)
    writer.add({"box": [{"y": 6, "x": 5}], "label": [4]}, dataloader=1)
    writer.write()
    expected = {"label": [1, 4], "box": [{"x": 2, "y": 3}, {"x": 5, "y": 6}], "dataloader": [0, 1]}
    assert pq.read_table(tmp_path).to_pydict() == expected


@pytest.mark.parametrize(
    ("first", "later", "fault"),
    [
        ([{"word": 1}], [{"word": 2, "error": "bad"}], "error"),
        ([True], [5], "differs"),
        (torch.tensor([1.5]), torch.tensor([0.1], dtype=torch.float64), "double"),
    ],
)
def test_a_later_file_loses_no_field_and_rounds_no_value(tmp_path, monkeypatch, first, later, fault):
    monkeypatch.setattr(rows, "PART_BYTES", 1)
    writer = PartWriter(tmp_path)
    writer.add(first)
    with pytest.raises(InputError, match=fault):
        writer.add(later)
    assert pq.read_table(tmp_path).num_rows == 1


def test_values_without_a_type_for_all_are_refused(tmp_path):
    writer = PartWriter(tmp_path)
    writer.add([2**53 + 1])
    writer.add([1.5])
    with pytest.raises(InputError, match="predict_step"):
        writer.write()


PAIR = (torch.arange(8), torch.ones(8))


@pytest.mark.parametrize(
    "result",
    [[*PAIR], {"both": [*PAIR]}, {"both": PAIR}, (PAIR, PAIR), [each.numpy() for each in PAIR], [PAIR[0], np.ones(8)]],
)
def test_a_list_or_tuple_of_tensors_has_a_value_for_each_sample(result):
    assert table_of(result, 2).num_rows == 2, "one tensor for each sample"
    with pytest.raises(InputError) as refusal:
        table_of(result, 8)
    assert re.search(r" of 2 tensors or arrays, .* 8 samples;", str(refusal.value))
    assert {"mean", "value"} <= {*re.findall(r'"(\w+)":', refusal.value.hint)}, "both ways out"


def test_what_the_hint_advises_is_written():
    assert table_of({"mean": PAIR[0], "variance": PAIR[1]}, 8).num_rows == 8
    values = [torch.zeros(2, 3), np.zeros((2, 4)), torch.zeros(2, 5)]  # of images of other sizes
    table = table_of([{"value": value} for value in values], 2)
    assert table.to_pydict() == {"prediction": [{"value": value.tolist()} for value in values]}


def test_no_part_is_written_without_rows(tmp_path):
    writer = PartWriter(tmp_path)
    writer.add([], 8)
    writer.write()
    assert (writer.num_batches, writer.num_parts, [*tmp_path.iterdir()]) == (1, 0, [])
    writer.add(["found"], 8)
    writer.write()
    assert pq.read_table(tmp_path).to_pydict() == {"prediction": ["found"]}


def test_two_columns_have_two_names(tmp_path):
    with pytest.raises(InputError, match=r"two columns a\.b"):
        table_of({"a": {"b": [1]}, "a.b": [2]})
    with pytest.raises(InputError, match="dataloader"):
        PartWriter(tmp_path).add({"dataloader": [1]}, dataloader=0)
