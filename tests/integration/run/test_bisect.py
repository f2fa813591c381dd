"""`paceline bisect` on a repository with planted work, in one commit of which the program does not run."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from mlflow.artifacts import load_dict
from mlflow.tracking import MlflowClient

from tests.support.slow_history import make_history
from tests.support.wheels import write_wheel

BISECT = (sys.executable, "-m", "paceline.flows.cli", "bisect", "--json")


@pytest.fixture
def bisect(tmp_path):
    def call(*arguments):
        environment = os.environ | {"PACELINE_HOME": str(tmp_path / "home")}
        environment.pop("MLFLOW_TRACKING_URI", None)
        words = [*BISECT, *arguments, "--", sys.executable, "-S", "work.py"]
        place = tmp_path / "repository"
        done = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, check=False)
        return done, json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.mark.slow
def test_a_planted_commit_is_found_and_recorded(bisect, tmp_path):
    make_history(tmp_path / "repository", 16, 11, 500_000, 0.3)
    (tmp_path / "repository" / "work.py").write_text("raise SystemExit('not committed')")
    done, told = bisect("--good", "main~16", "--bad", "main", "--budget", "250")
    if any(each["contaminated"] for each in told["series"][-1]["rounds"]) and told["outcome"] != "FOUND":
        pytest.skip(f"the machine is busy: {told['reason']}")
    assert (told["outcome"], done.returncode) == ("FOUND", 0), done.stderr
    assert [commit["subject"] for commit in told["commits"]] == ["Change 11"]
    assert told["ratio"]["high"] < 1
    assert f"outcome  FOUND: {told['commits'][0]['name'][:12]} Change 11" in done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("judgements").experiment_id])
    assert (run.info.run_id, run.data.tags["paceline.judgement"]) == (told["run_id"], "FOUND")
    assert load_dict(f"{run.info.artifact_uri}/summary.json") == told
    listed = subprocess.run(
        ["git", "-C", tmp_path / "repository", "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


WORK = """
version = {version}


def work(number):
    for _ in range(int(number * ({slow} if version == 2 else 1))):
        pass
"""


@pytest.mark.slow
def test_a_planted_package_is_found(bisect, tmp_path, monkeypatch):
    place, wheels = tmp_path / "repository", tmp_path / "wheels"
    place.mkdir()
    wheels.mkdir()
    names = [f"part{number}" for number in range(6)]
    for name, version in itertools.product(names, (1, 2)):
        write_wheel(wheels, name, f"{version}.0", WORK.format(version=version, slow=3 if name == "part4" else 1))
    for file, version in (("fast.txt", 1), ("slow.txt", 2)):
        (place / file).write_text("".join(f"{name}=={version}.0\n" for name in names))
    imports = ", ".join(names)
    (place / "work.py").write_text(f"import {imports}\nfor part in ({imports}):\n    part.work(1_000_000)\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    done, told = bisect("--good", "fast.txt", "--bad", "slow.txt", "--budget", "250")
    assert "outcome" in told, told
    if any(each["contaminated"] for each in told["series"][-1]["rounds"]) and told["outcome"] != "FOUND":
        pytest.skip(f"the machine is busy: {told['reason']}")
    assert (told["outcome"], done.returncode) == ("FOUND", 0), done.stderr
    assert told["commits"] == [{"name": "part4", "subject": "1.0 -> 2.0"}]
    assert told["ratio"]["high"] < 1
    assert "part4 1.0 -> 2.0 makes it slower" in done.stderr
    assert list((tmp_path / "home" / "judge").iterdir()) == []


def test_a_revision_that_does_not_work_is_refused(bisect, tmp_path):
    make_history(tmp_path / "repository", 2, None, 1, 0.0)
    place = tmp_path / "repository"
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "rm", "--quiet", "work.py"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "Remove it"], check=True)
    done, told = bisect("--good", "main~3", "--bad", "main", "--budget", "20")
    assert (done.returncode, told["setting"]) == (2, "--bad")
    assert "status 2" in told["error"]
    assert list((tmp_path / "home" / "judge").iterdir()) == []
