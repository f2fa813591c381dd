"""Ledgers in files: bases, levels, and judgements at the same time."""

import pytest

from paceline.tasks.judge.ledger import Base, Candidate, open_ledger, read_ledger
from paceline.tasks.judge.lord import next_level
from tests.support.refusals import refused

BASE = Base(command="python train.py", directory="/work")


def candidate(number, outcome):
    return Candidate(number=number, time="now", command="x", outcome=outcome, ratio=None, level=0.01, run_id="a")


def test_each_candidate_changes_the_level_of_the_next(tmp_path):
    outcomes = ["RETEST", "KEEP", "UNFINISHED", "DISCARD"]
    for number, outcome in enumerate(outcomes, 1):
        with open_ledger(tmp_path / "judge", BASE, None) as (ledger, put):
            assert ledger.next_level == next_level([each == "KEEP" for each in outcomes[: number - 1]])
            put(candidate(number, "UNFINISHED"))
            put(candidate(number, outcome))
    stored = read_ledger(tmp_path / "judge" / f"{BASE.key}.json")
    assert [each.outcome for each in stored.candidates] == outcomes


def test_a_judgement_without_a_candidate_makes_no_ledger(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_ledger(tmp_path, BASE, None):
        raise KeyboardInterrupt
    assert list(tmp_path.glob("*.json")) == []


def test_a_ledger_of_another_base_is_refused(tmp_path):
    with open_ledger(tmp_path, BASE, "mine") as (_, put):
        put(candidate(1, "KEEP"))
    other = BASE.model_copy(update={"commit": "a" * 40})
    with refused("--ledger", "mine", BASE.directory) as caught, open_ledger(tmp_path, other, "mine"):
        pass
    assert caught.value.hint == f"--ledger {other.key}"
    with open_ledger(tmp_path, BASE, "mine") as (ledger, _):
        assert len(ledger.candidates) == 1


def test_two_judgements_do_not_share_a_level(tmp_path):
    with (
        open_ledger(tmp_path, BASE, "mine"),
        refused("--ledger", "mine"),
        open_ledger(tmp_path, BASE, "mine"),
    ):
        pass


def test_only_the_ledger_itself_is_reported_as_in_use(tmp_path):
    with pytest.raises(BlockingIOError), open_ledger(tmp_path, BASE, "mine"):
        raise BlockingIOError


def test_a_damaged_ledger_is_refused(tmp_path):
    (tmp_path / "mine.json").write_text("{")
    with refused("--ledger", "mine.json"), open_ledger(tmp_path, BASE, "mine"):
        pass
