"""Processes of a side: real ones, with all that can go wrong. None stays behind."""

import contextlib
import signal
import sys
import time

import psutil
import pytest

from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.judge import processes
from paceline.tasks.judge.processes import run_process
from paceline.tasks.judge.records import Question, Side
from tests.support.refusals import refused

LEFT = "1234.5"
"""Seconds of the sleeps that stay behind, by which they are known."""
NEW_SESSION = (
    f'{sys.executable} -c "import os\nif os.fork() == 0:\n os.setsid()\n'
    f" if os.fork() == 0: os.execlp('sleep', 'sleep', '{LEFT}')\n\""
)


def ask(command, **options):
    side = Side(name="new", command=command, directory="/")
    return side, Question(old=side, new=side, **{"budget_seconds": 60, "limit_seconds": 30, **options})


def children():
    """All below this process; other tests of it may have left some running."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def nothing_behind():
    before = children()
    yield
    assert children() <= before
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert LEFT not in process.cmdline()


@pytest.mark.parametrize(
    ("command", "options", "metric"),
    [
        ("echo loss=2; echo loss=0.5 and more", {"metric": r"loss=(\S+)"}, 0.5),
        ("echo 1.5 >&2; echo 2.5", {"metric": r"^\d\.\d$"}, 2.5),
        ("""echo '{"test": {"accuracy": 0.9}}'; echo '{"other": 1}'; echo 7""", {"metric_key": "test.accuracy"}, 0.9),
        ("VARIABLE=3; test -z '' && echo a=$VARIABLE", {"metric": "a=(.*)"}, 3.0),
        ("echo done", {}, None),
    ],
)
def test_output_is_read(command, options, metric):
    run = run_process(*ask(command, **options))
    assert run.metric == metric
    assert run.seconds > 0


def test_a_rate_of_samples_is_the_speed_of_a_training():
    summary = """echo '{"run_id": "a", "train": {"rate": 200.0, "none": null}}'"""
    run = run_process(*ask(summary, rate_key="train.rate"))
    assert (run.seconds, run.run_id) == (0.005, "a")
    with refused("--new"):
        run_process(*ask(summary, rate_key="train.none"))


def test_a_training_says_what_disturbed_it():
    summary = """echo '{"train": {"rate": 200.0, "validity": {"reasons": ["1.50 of 2 cores busy"]}}}'"""
    assert run_process(*ask(summary, rate_key="train.rate")).contaminated == ("1.50 of 2 cores busy",)
    quiet = """echo '{"train": {"rate": 200.0, "validity": null}}'"""
    assert run_process(*ask(quiet, rate_key="train.rate")).contaminated == ()


def test_a_training_may_end_what_it_has_started_elsewhere(tmp_path):
    script = tmp_path / "training.sh"
    script.write_text(f"trap 'touch {tmp_path}/ended; exit' TERM; sleep {LEFT} & wait")
    with refused("--new", 0.5):
        run_process(*ask(f"sh {script}", rate_key="train.rate", limit_seconds=0.5))
    assert (tmp_path / "ended").exists()


def test_steps_count_without_the_first_half():
    command = "for time in 9 8 0.1 0.2 0.3; do echo step took ${time}s; done"
    assert run_process(*ask(command, steps=r"took (.*)s")).seconds == pytest.approx(0.2)
    with refused("--steps"):
        run_process(*ask("echo step took 0s", steps=r"took (.*)s"))


def mark(*times):
    return "printf '%s\\n' " + " ".join(map(str, times)) + ' > "$PACELINE_STEPS"; echo step took 7s'


def test_marked_steps_count_by_their_median_without_the_first_half_or_ten():
    run = run_process(*ask(mark(0, 9, 18, 19, 20, 21.5)))
    assert (run.seconds, run.num_steps) == (1.0, 3)
    run = run_process(*ask(mark(*range(0, 90, 9), *range(100, 150))))
    assert (run.seconds, run.num_steps) == (1.0, 49)
    run = run_process(*ask(mark(0, 1, 2), steps="took (.*)s"))
    assert (run.seconds, run.num_steps) == (7.0, 0), "what is asked for by name counts"


@pytest.mark.parametrize(
    ("command", "is_marked"),
    [("echo done", True), (mark(0, 1, 2), False), (mark(0), None), (mark(3, 3, 3), None)],
    ids=["none", "some", "one", "at once"],
)
def test_steps_are_marked_by_both_sides_or_none(command, is_marked):
    with refused("--new") as caught:
        run_process(*ask(command, is_marked=is_marked))
    assert "step" in str(caught.value)


def test_only_the_first_process_that_marks_steps_is_timed_and_marks_cost_no_imports():
    code = """
import sys
from paceline import step
[step() for _ in range(int(sys.argv[1]))]
assert {"numpy", "pydantic", "torch"}.isdisjoint(sys.modules)
"""
    run = run_process(*ask(f"run() {{ {sys.executable} -c '{code}' $1; }}; run 40 && run 900"))
    assert run.num_steps == 29
    assert run.seconds > 0


@pytest.mark.parametrize(
    ("command", "options", "setting", "says"),
    [
        ("echo out of cheese >&2; exit 3", {}, "--new", "out of cheese"),
        ("exec no-such-program", {}, "--new", "127"),
        ("kill -9 $$", {}, "--new", "signal 9"),
        ("echo loss=high", {"metric": "loss=(.*)"}, "--metric", "high"),
        ("echo loss=nan", {"metric": "loss=(.*)"}, "--metric", "nan"),
        ("echo done", {"metric": "loss=(.*)"}, "--metric", "nothing"),
        ("echo '{}'", {"metric_key": "loss"}, "--metric-key", "nothing"),
        ("echo done", {"steps": "took (.*)s"}, "--steps", "nothing"),
        (f"sleep {LEFT}", {"limit_seconds": 0.3}, "--new", "0.3"),
        (f"trap '' TERM HUP; sleep {LEFT} & setsid sleep {LEFT} & wait", {"limit_seconds": 0.5}, "--new", "0.5"),
        (f"sleep {LEFT} & echo done", {}, "--new", LEFT),
        (f"sleep {LEFT} & exit 1", {}, "--new", "status"),
        (f"(setsid sleep {LEFT} &) ; echo done", {}, "--new", LEFT),
        (NEW_SESSION, {}, "--new", LEFT),
    ],
)
def test_a_side_that_does_not_work_is_refused_and_leaves_nothing(command, options, setting, says, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    with refused(setting) as caught:
        run_process(*ask(command, **options))
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_process_that_starts_another_and_ends_while_it_is_looked_at_hides_none(monkeypatch):
    status, slow = psutil.Process.status, [None]

    def status_after_a_moment(process):
        if slow:
            slow.pop()
            process.wait(10)
        return status(process)

    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(psutil.Process, "status", status_after_a_moment)
    with refused("--new", LEFT):
        run_process(*ask(f"(sleep 0.2; setsid sleep {LEFT} & ) & echo done"))


def test_a_helper_that_ends_soon_after_the_program_is_no_fault():
    run = run_process(*ask("sleep 0.3 & echo done"))
    assert run.seconds < 0.3, "it is not waited for"


def test_an_interruption_ends_the_process(monkeypatch):
    def interrupt(pid, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_process(*ask(f"setsid sleep {LEFT} & sleep {LEFT}"))


def test_a_second_interruption_waits_until_the_processes_are_ended(monkeypatch):
    kill, signals = psutil.Process.kill, [signal.SIGINT]

    def interrupt(pid, seconds):
        while len(psutil.Process(pid).children()) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    def interrupt_once(process):
        if signals:
            signal.raise_signal(signals.pop())
        kill(process)

    monkeypatch.setattr(processes, "_wait", interrupt)
    monkeypatch.setattr(psutil.Process, "kill", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        run_process(*ask(f"setsid sleep {LEFT} & sleep {LEFT}"), defer=defer_signals)
    assert signals == []
