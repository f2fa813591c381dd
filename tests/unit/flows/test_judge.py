"""A judgement with a real ledger and a real store, on a machine that is always taken as quiet."""

import json
import signal
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows import judge as flow
from paceline.tasks.judge import rounds
from paceline.tasks.judge.lord import next_level
from paceline.tasks.judge.records import Question
from paceline.tasks.records.measurement import Validity
from tests.support.refusals import refused

OLD, NEW = "sleep 0.03; echo loss=0.5", "echo loss=0.5"
FAILING = "echo >> runs; n=$(wc -l < runs); test $n -lt {} || exit 3; echo loss=$((n / 2 % 2))"
"""Its metric is undecided, so that only its failure ends the judgement."""


TRAINING = """
echo "$@" >> sides
test $1 = old && rate=100 || rate=150
id=$(head -n $(wc -l < sides) ids | tail -n 1)
echo '{"run_id": "'$id'", "train": {"steady": '$rate'}, "evaluate": {"accuracy": 0.9'${2#seed=}'}}'
"""
"""Prints the summary of a training, with a score that depends on its seed alone."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def judge(home, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(rounds, "MIN_WATCHED_SECONDS", 0.01)
    quiet = SimpleNamespace(stop=Validity)
    monkeypatch.setattr(flow, "judge_sides", partial(rounds.judge_sides, watch=lambda pids: quiet))

    def call(new):
        sides = {
            name: {"name": name, "command": command, "directory": str(tmp_path)}
            for name, command in (("old", OLD), ("new", new))
        }
        options = {"metric": "loss=(.*)", "budget_seconds": 60, "limit_seconds": 60}
        return flow.judge_commands(Environment(), Question(**sides, **options), None)

    return call


def candidates(tmp_path):
    found = [each for each in flow.ledgers(Environment(), None) if each.base.directory == str(tmp_path)]
    return [each for ledger in found for each in ledger.candidates]


def status(run_id):
    return MlflowClient(Environment().tracking_uri).get_run(run_id).info.status


def last_run():
    client = MlflowClient(Environment().tracking_uri)
    return client.search_runs([client.get_experiment_by_name("judgements").experiment_id])[0].info


def test_a_failure_counts_from_the_first_look_on_and_commits_change_no_ledger(judge, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    with refused("--new"), judge(FAILING.format(18)):
        pass
    assert candidates(tmp_path) == []
    (tmp_path / "runs").unlink()
    with refused("--new"), judge(FAILING.format(24)):
        pass
    assert [each.outcome for each in candidates(tmp_path)] == ["UNFINISHED"]
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "a candidate"], check=True)
    with judge(NEW) as judgement:
        assert (judgement.outcome, judgement.candidate, judgement.level) == ("KEEP", 2, next_level([False]))
    artifacts = MlflowClient(Environment().tracking_uri).list_artifacts(judgement.run_id)
    assert {each.path for each in artifacts} == {"pictures", "report.html", "summary.json"}
    kept = candidates(tmp_path)[1]
    assert (kept.outcome, kept.run_id, status(kept.run_id)) == ("KEEP", judgement.run_id, "FINISHED")


def test_a_signal_while_the_outcome_is_recorded_waits_until_it_is_printed(judge, tmp_path, monkeypatch):
    printed = []
    interrupt(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt), judge(NEW) as judgement:
        printed.append(judgement.outcome)
    assert printed == ["KEEP"]
    assert status(judgement.run_id) == "FINISHED"
    assert candidates(tmp_path)[0].run_id == judgement.run_id


def test_a_second_signal_leaves_the_outcome_and_no_running_run(judge, tmp_path, monkeypatch):
    interrupt(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt), judge(NEW):
        pytest.fail("the second signal is delivered at once")
    assert last_run().status == "KILLED"
    assert [(each.outcome, each.run_id) for each in candidates(tmp_path)] == [("KEEP", None)]


def interrupt(monkeypatch, num_signals):
    log_facts = flow.tracking.log_facts

    def call(*arguments):
        for _ in range(num_signals):
            signal.raise_signal(signal.SIGINT)
        log_facts(*arguments)

    monkeypatch.setattr(flow.tracking, "log_facts", call)


def test_a_store_that_fails_loses_no_outcome(judge, home, tmp_path, caplog, capfd):
    artifacts = home / "mlartifacts"
    (tmp_path / "break.sh").write_text(f"rm -rf {artifacts}; echo > {artifacts}; echo loss=0.5")
    with judge("sh break.sh") as judgement:
        assert (judgement.outcome, judgement.run_id) == ("KEEP", None)
    assert "MLflow did not take the judgement" in caplog.text + capfd.readouterr().err
    assert last_run().status != "RUNNING", "the run of this judgement, or the one before if it could not even begin"
    assert [(each.outcome, each.run_id) for each in candidates(tmp_path)] == [("KEEP", None)]


def test_trainings_of_a_round_share_a_seed_and_their_runs_are_nested(judge, tmp_path):
    (tmp_path / "training.sh").write_text(TRAINING)
    client = MlflowClient(Environment().tracking_uri)
    experiment_id = flow.check_store(client.tracking_uri, "judgements", Environment().artifact_root)
    run_ids = [client.create_run(experiment_id).info.run_id for _ in range(100)]
    (tmp_path / "ids").write_text("\n".join(run_ids))
    sides = {
        name: {"name": name, "command": f"sh training.sh {name}", "directory": str(tmp_path), "shown": f"run {name}"}
        for name in ("old", "new")
    }
    options = {"metric_key": "evaluate.accuracy", "rate_key": "train.steady"}
    question = Question(**sides, **options, budget_seconds=60, limit_seconds=60)
    old = load("digits", ["seed=40"])
    with flow.judge_settings(Environment(), question, old, None) as judgement:
        assert (judgement.outcome, judgement.parity, judgement.new) == ("KEEP", "on par", "run new")
        assert judgement.ratio.value == pytest.approx(1.5)
        assert (judgement.old_seconds, judgement.difference.value) == (0.01, 0)
    rows = [line.split() for line in (tmp_path / "sides").read_text().splitlines()]
    (old_side, seed), (new_side, same) = rows[:2]
    assert (old_side, new_side, same) == ("old", "new", seed)
    first = int(seed.removeprefix("seed="))
    rounds = [rows[first : first + 4] for first in range(2, len(rows), 4)]
    for number, of_round in enumerate(rounds):
        assert [seed for _, seed in of_round] == [f"seed={first + number}"] * 4
        assert sorted(side for side, _ in of_round) == ["new", "new", "old", "old"]
    parents = [client.get_run(run_id).data.tags.get("mlflow.parentRunId") for run_id in run_ids]
    assert parents == [judgement.run_id] * len(rows) + [None] * (100 - len(rows))
    assert [run.run_id for each in judgement.rounds for run in each.runs] == run_ids[2 : len(rows)]
    with flow.judge_settings(Environment(), question, old.with_seed(41), None) as other:
        assert other.ledger != judgement.ledger
    with flow.judge_settings(Environment(), question, old, None) as again:
        assert (again.ledger, again.candidate) == (judgement.ledger, 2)
    assert f"seed={first}" not in (tmp_path / "sides").read_text().split()[2 * len(rows) :], "other seeds"


def test_trainings_that_other_work_disturbed_do_not_count(judge, tmp_path):
    """The watch of this machine sees nothing, as where the ranks are on another one."""
    summary = {"train": {"steady": 100, "validity": {"reasons": ["1.50 of 2 cores busy"]}}, "evaluate": {"accuracy": 1}}
    command = f"echo '{json.dumps(summary)}' #"  # what follows is the seed
    sides = {name: {"name": name, "command": command, "directory": str(tmp_path)} for name in ("old", "new")}
    options = {"metric_key": "evaluate.accuracy", "rate_key": "train.steady"}
    question = Question(**sides, **options, budget_seconds=8, limit_seconds=8)
    with flow.judge_settings(Environment(), question, load("digits", ["seed=40"]), None) as judgement:
        assert (judgement.outcome, judgement.num_rounds) == ("RETEST", 0)
        assert {each.contaminated for each in judgement.rounds} == {("1.50 of 2 cores busy",)}
    assert candidates(tmp_path) == []
