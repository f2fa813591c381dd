import pytest

from paceline.tasks.speedup.study.ledger import Ledger
from paceline.tasks.speedup.study.records import ArmRun
from tests.support.refusals import refused


def noted(arm, repeat, position, **figures):
    return ArmRun(arm=arm, repeat=repeat, position=position, world_size=1, **figures)


def test_what_is_done_is_known_again_and_what_failed_is_not(tmp_path):
    ledger = Ledger(tmp_path / "runs" / "arms.jsonl")
    ledger.add(noted("a", 0, 0))
    ledger.add(noted("b", 0, 1, status="failed", error="out of memory"))
    again = Ledger(tmp_path / "runs" / "arms.jsonl")
    assert again.has("a", 0)
    assert not again.has("b", 0)
    assert not again.has("a", 1)
    again.add(noted("b", 0, 1, samples_per_second=5.0))
    assert [run.samples_per_second for run in Ledger(tmp_path / "runs" / "arms.jsonl").runs()] == [None, 5.0]


def test_a_crash_while_noting_leaves_what_was_noted(tmp_path, monkeypatch):
    path = tmp_path / "arms.jsonl"
    ledger = Ledger(path)
    ledger.add(noted("a", 0, 0))
    monkeypatch.setattr("os.fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ledger.add(noted("b", 0, 1))
    monkeypatch.undo()
    again = Ledger(path)
    assert len(again.runs()) == 1
    again.add(noted("b", 0, 1))
    assert len(Ledger(path).runs()) == 2


def test_what_another_version_noted_is_told(tmp_path):
    path = tmp_path / "arms.jsonl"
    Ledger(path).add(noted("a", 0, 0))
    path.write_text(path.read_text().replace('"repeat"', '"round"'))
    with refused(None, path):
        Ledger(path)
