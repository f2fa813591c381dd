"""infra/judge-ci on a real repository: a faster branch, and a history in files that the next job uses."""

import os
import subprocess
import sys

import pytest

from paceline.tasks.judge.ledger import read_ledger
from tests.support.documents import ROOT

WORK = "total = 0\nfor number in range({}):\n    total += number * number % 7\nprint('loss=0.5')\n"


@pytest.mark.slow
def test_a_branch_is_judged_and_the_history_stays(tmp_path):
    place = tmp_path / "work"
    place.mkdir()
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch", "main"], check=True)
    for branch, number in (("main", 2_500_000), ("faster", 1_500_000), ("broken", "none")):
        subprocess.run([*git, "checkout", "--quiet", "-B", branch], check=True)
        (place / "work.py").write_text(WORK.format(number))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", branch], check=True)

    def judge(branch):
        command = [sys.executable, ROOT / "infra/judge-ci", "--state", tmp_path / "state", "--out", tmp_path / "out.md"]
        sides = ["--old", "main", "--new", branch, "--budget", "60", "--metric", "loss=(.+)"]
        store = os.environ | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
        done = subprocess.run([*command, *sides, "--", sys.executable, "work.py"], cwd=place, env=store, check=False)
        return done.returncode, (tmp_path / "out.md").read_text()

    status, text = judge("faster")
    if status == 4 and "contaminated" in text:
        pytest.skip(f"the machine is busy: {text}")
    assert (status, text.splitlines()[0]) == (0, "### Speed: KEEP")
    assert "![Ratio of each round, with the interval](out.svg)" in text
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1
    (ledger,) = (tmp_path / "state" / "judge").glob("*.json")
    assert [each.outcome for each in read_ledger(ledger).candidates] == ["KEEP"]
    assert (tmp_path / "state" / "mlflow.db").exists()
    status, text = judge("broken")
    assert (status, text.splitlines()[0]) == (2, "### Speed: not judged")
    assert "NameError" in text
