"""Ledgers in files: bases, levels, and judgements at the same time."""

import subprocess

import pytest

from paceline.tasks.judge.ledger import Base, Candidate, base_of, open_ledger, read_ledger
from paceline.tasks.judge.lord import next_level
from tests.support.refusals import refused

BASE = Base(command="python train.py", directory="/work")


def candidate(number, outcome):
    return Candidate(number=number, time="now", command="x", outcome=outcome, ratio=None, level=0.01, run_id="a")


def test_each_candidate_changes_the_level_of_the_next(tmp_path):
    outcomes = ["RETEST", "KEEP", "DISCARD"]
    for number, outcome in enumerate(outcomes, 1):
        with open_ledger(tmp_path / "judge", BASE, None) as (ledger, add):
            assert ledger.next_level == next_level([each == "KEEP" for each in outcomes[: number - 1]])
            add(candidate(number, outcome))
    stored = read_ledger(tmp_path / "judge" / f"{BASE.key}.json")
    assert [each.outcome for each in stored.candidates] == outcomes


def test_an_unfinished_judgement_is_not_in_it(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_ledger(tmp_path, BASE, None):
        raise KeyboardInterrupt
    assert list(tmp_path.glob("*.json")) == []


def test_a_ledger_of_another_base_is_refused(tmp_path):
    with open_ledger(tmp_path, BASE, "mine") as (_, add):
        add(candidate(1, "KEEP"))
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


@pytest.mark.parametrize("name", ["../x", "a b", "x" * 65])
def test_a_name_is_no_path(name, tmp_path):
    with refused("--ledger"), open_ledger(tmp_path / "judge", BASE, name):
        pass


def test_a_damaged_ledger_is_refused(tmp_path):
    (tmp_path / "mine.json").write_text("{")
    with refused("--ledger", "mine.json"), open_ledger(tmp_path, BASE, "mine"):
        pass


def test_a_base_is_known_by_its_command_and_its_commit(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    bases = [base_of("x", str(tmp_path))]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for message in ("one", "two"):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", message], check=True)
        bases += [base_of("x", str(tmp_path)), base_of("y", str(tmp_path))]
    assert bases[0].commit is None
    assert len({base.key for base in bases}) == len(bases)
    assert base_of("x", str(tmp_path)) == bases[3]
