"""`paceline judge` on programs without any code of Paceline, and with planted differences of real work."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from mlflow.artifacts import load_dict
from mlflow.tracking import MlflowClient

from tests.support.outputs import told_by
from tests.support.own_lightning import PACKAGE
from tests.support.own_lightning import SMALL as SMALL_OWN
from tests.support.scratch_cluster import ScratchCluster

WORK = """
import sys
total = 0
for number in range(int(sys.argv[1])):
    total += number * number % 7
print(f"loss={float(sys.argv[2])}")
"""
STEPS = """
import sys, time
from paceline import step
time.sleep(0.3)
for _ in range(40):
    total = 0
    for number in range(int(sys.argv[1])):
        total += number * number % 7
    if len(sys.argv) == 2:
        step()
"""
LOGGED = """
import sys
import mlflow
with mlflow.start_run(run_name="mine"):
    mlflow.log_metric("loss", float(sys.argv[2]))
total = 0
for number in range(int(sys.argv[1])):
    total += number * number % 7
"""
JUDGE = (sys.executable, "-m", "paceline.flows.cli", "judge")
NUM_STEPS = 1_500_000


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    environment = os.environ | {"PACELINE_HOME": str(tmp_path / "home")}
    environment.pop("MLFLOW_TRACKING_URI", None)

    def call(*arguments):
        done = subprocess.run(
            [*JUDGE, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done, told_by("judge", done.stdout) if "--json" in arguments else None

    return call


def skip_if_busy(told):
    if told["outcome"] == "RETEST" and any(each["contaminated"] for each in told["rounds"]):
        pytest.skip(f"the machine is busy: {told['rounds'][-1]['contaminated']}")


def side(num_steps, loss=0.5):
    return f"{sys.executable} work.py {num_steps} {loss}"


def sides(old, new):
    return ("--old", old, "--new", new, "--metric", r"loss=(\S+)", "--lower-is-better", "--budget", "60", "--json")


@pytest.mark.slow
def test_planted_work_is_found_and_counted(judge, tmp_path):
    base, outcomes = side(int(1.25 * NUM_STEPS)), []
    for candidate in (side(NUM_STEPS), side(int(1.6 * NUM_STEPS)), side(NUM_STEPS, loss=0.6)):
        done, told = judge(*sides(base, candidate))
        if told["num_rounds"] < 12 and told["outcome"] == "RETEST":
            pytest.skip(f"the machine is busy: {told['rounds'][-1]['contaminated']}")
        outcomes.append((told["outcome"], done.returncode, told["parity"], told["candidate"]))
        assert told["ratio"]["low"] < told["ratio"]["value"] < told["ratio"]["high"]
        assert f"outcome  {told['outcome']}: " in done.stderr
    assert outcomes == [("KEEP", 0, "on par", 1), ("DISCARD", 3, "on par", 2), ("DISCARD", 3, "worse", 3)]
    done, told = judge("--ledger", "--json")
    (ledger,) = told["ledgers"]
    assert [each["outcome"] for each in ledger["candidates"]] == ["KEEP", "DISCARD", "DISCARD"]
    assert done.returncode == 0
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("judgements").experiment_id])
    assert {run.info.run_id: run.data.tags["paceline.judgement"] for run in runs} == {
        each["run_id"]: each["outcome"] for each in ledger["candidates"]
    }
    stored = load_dict(f"{runs[0].info.artifact_uri}/summary.json")
    assert all(len(each["runs"]) == 4 for each in stored["rounds"])


@pytest.mark.slow
def test_a_metric_in_mlflow_counts_and_its_runs_are_nested(judge, tmp_path):
    (tmp_path / "logged.py").write_text(LOGGED)
    old, new = (f"{sys.executable} logged.py {NUM_STEPS} {loss}" for loss in (0.5, 0.6))
    options = ("--mlflow-metric", "loss", "--lower-is-better", "--budget", "300", "--json")
    done, told = judge("--old", old, "--new", new, *options)
    skip_if_busy(told)
    assert (told["outcome"], done.returncode, told["parity"]) == ("DISCARD", 3, "worse"), done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("judgements").experiment_id])
    nested = [run for run in runs if run.info.run_name == "mine"]
    assert len(nested) == 2 + sum(len(each["runs"]) for each in told["rounds"])
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {told["run_id"]}
    assert "report.html" in {each.path for each in client.list_artifacts(told["run_id"])}


@pytest.mark.slow
def test_marked_steps_count_in_place_of_the_process(judge, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    old, new = (f"{sys.executable} steps.py {number}" for number in (40_000, 30_000))
    limits = ("--budget", "100", "--json")
    done, told = judge("--old", old, "--new", new, *limits)
    skip_if_busy(told)
    assert told["outcome"] == "KEEP"
    assert told["ratio"]["value"] > 1.2, "by the processes it is less than 1.15"
    assert {run["num_steps"] for each in told["rounds"] for run in each["runs"]} == {29}
    assert " for a marked step" in done.stderr
    done, told = judge("--old", old, "--new", f"{new} silent", *limits)
    assert (done.returncode, told["setting"]) == (2, "--new")


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("exit 3", "status 3"),
        ("echo nothing", "nothing that matches"),
        ("sleep 1234.5 & echo loss=1", "left processes"),
    ],
    ids=["a failure", "no metric", "a process behind"],
)
def test_a_side_that_does_not_work_counts_no_judgement(new, says, judge, tmp_path):
    done, told = judge(*sides("echo loss=1", new))
    assert done.returncode == 2
    assert says in told["error"]
    assert told["hint"]
    assert list((tmp_path / "home" / "judge").glob("*.json")) == []
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    assert client.search_runs([client.get_experiment_by_name("judgements").experiment_id]) == []


def test_a_signal_ends_both_sides_and_counts_nothing(tmp_path):
    command = [*JUDGE, "--old", "touch started; setsid sleep 1234.5 & sleep 1234.5", "--new", "true", "--json"]
    environment = os.environ | {"PACELINE_HOME": str(tmp_path / "home")}
    environment.pop("MLFLOW_TRACKING_URI", None)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < until:
        time.sleep(0.05)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(60) == 143
    assert descendants
    assert not [each for each in descendants if each.is_running()]
    assert list((tmp_path / "home" / "judge").glob("*.json")) == []


@pytest.mark.slow
def test_two_revisions_are_judged_in_worktrees(judge, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / ".gitignore").write_text("home\n")
    subprocess.run([*git, "init", "--quiet"], check=True)
    for seconds in (0.2, 0.05):
        (tmp_path / "work.py").write_text(f"import time; time.sleep({seconds}); print('loss=0.5')")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", "one"], check=True)
    command = (*sides("HEAD~1", "HEAD"), "--", sys.executable, "work.py")
    done, told = judge(*command)
    assert (told["outcome"], done.returncode) in (("KEEP", 0), ("RETEST", 4)), done.stderr
    assert told["old"].startswith("HEAD~1 (")
    skip_if_busy(told)
    assert told["outcome"] == "KEEP"
    assert 2 < told["ratio"]["value"] < 4
    (tmp_path / "work.py").write_text("changed")
    done, told = judge(*command)
    assert (done.returncode, told["setting"]) == (2, "--new")
    listed = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_slower_setting_of_a_training_is_discarded(judge, tmp_path):
    """Ten rounds or more of four trainings, each with a start of its own."""
    shared, new = ("recipe.num_epochs=2", "recipe.warmup_epochs=0.5"), "execution.precision=64-true"
    done, told = judge("digits", *shared, "--old", "", "--new", new, "--budget", "2400", "--json")
    skip_if_busy(told)
    assert (told["outcome"], done.returncode) == ("DISCARD", 3), done.stderr
    assert told["new"] == f"paceline run digits {' '.join(shared)} {new}"
    assert told["ratio"]["high"] < 0.8
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    assert {each.name for each in client.search_experiments()} <= {"judgements", "Default"}
    runs = client.search_runs([client.get_experiment_by_name("judgements").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    nested = [run for run in runs if run.info.run_id != told["run_id"]]
    assert len(nested) == 2 + sum(len(each["runs"]) for each in told["rounds"])
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {told["run_id"]}
    assert {run.data.params["speedup.baseline"] for run in nested} == {"none"}
    assert len(list((tmp_path / "home" / "prepared").iterdir())) == 1, "both sides use one prepared set"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_ranks_on_a_cluster_by_address_are_judged(judge):
    shared = ["recipe.num_epochs=2", "recipe.warmup_epochs=0.5", "execution.num_devices=2", "execution.num_threads=1"]
    with ScratchCluster(2) as cluster:
        there = ["cluster.kind=address", f"cluster.address={cluster.address}"]
        sides = ("--old", "", "--new", "execution.precision=64-true")
        done, told = judge("digits", *shared, *there, *sides, "--budget", "2400", "--json")
    skip_if_busy(told)
    assert (told["outcome"], done.returncode) == ("DISCARD", 3), done.stderr
    assert told["ratio"]["high"] < 0.9


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_own_lightning_code_is_judged(judge, tmp_path):
    """A GPT of twice the depth is slower."""
    code = ["--code", str(PACKAGE)]
    shared = [*SMALL_OWN, "trainer.max_epochs=2", f"data.init_args.directory={tmp_path / 'data'}"]
    sides = ("--old", "", "--new", "model.init_args.depth=4")
    quality = ("--metric-key", "metrics.val_loss", "--lower-is-better", "--margin", "1")
    done, told = judge(str(PACKAGE / "config.yaml"), *code, *shared, *sides, *quality, "--budget", "2400", "--json")
    skip_if_busy(told)
    assert (told["outcome"], done.returncode) == ("DISCARD", 3), done.stderr
    assert told["ratio"]["high"] < 0.9
