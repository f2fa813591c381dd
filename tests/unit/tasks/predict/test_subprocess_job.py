"""A measurement in a process of its own: what it finds, and what becomes of it when it fails."""

import os

import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.predict.subprocess_job import LOG, SOURCE, SubprocessJob, _place_in, run_in_subprocess
from paceline.tasks.predict.throughput import MAX_ROUNDS, _rounds
from tests.support.refusals import refused


def test_a_process_that_fails_is_told_with_its_last_line(tmp_path):
    asked = SubprocessJob(
        module="paceline.tasks.predict.nothing", spec="{}", directory=str(tmp_path / "own"), num_threads=1
    )
    with refused(None, "paceline.tasks.predict.nothing", "1", kind=RunError):
        run_in_subprocess(asked)
    assert "No module named" in (tmp_path / "own" / LOG).read_text()


def test_a_process_that_ends_early_with_status_0_is_told_as_one_that_fails(tmp_path, monkeypatch):
    (tmp_path / "early.py").write_text("print('enough')\nraise SystemExit(0)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = SubprocessJob(module="early", spec="{}", directory=str(tmp_path / "own"), num_threads=1)
    with refused(None, "early", "0", kind=RunError):
        run_in_subprocess(asked)


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TimeoutError, match="sleeper took longer than"):
        run_in_subprocess(
            SubprocessJob(module="sleeper", spec="{}", directory=str(tmp_path / "own"), num_threads=1), seconds=2
        )
    pid = int((tmp_path / "own" / LOG).read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_arms_are_timed_in_turn():
    order = []

    def arm(name, seconds):
        return lambda: (order.append(name), seconds)[1]

    found = _rounds({"eager": arm("eager", 2.0), "executed": arm("executed", 1.0)}, seconds=0.0)
    assert found == {"eager": [2.0] * 6, "executed": [1.0] * 6}
    assert order[:4] == ["eager", "executed", "executed", "eager"]
    assert len(_rounds({"eager": arm("eager", 1.0)}, seconds=60.0)["eager"]) == MAX_ROUNDS


def test_an_error_names_its_place_in_the_users_code_and_the_log(tmp_path, monkeypatch):
    (tmp_path / "rows.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = SubprocessJob(module="rows", spec="{}", directory=str(tmp_path), num_threads=1)
    with pytest.raises(RunError, match="JSONDecodeError") as failure:
        run_in_subprocess(job)
    assert f"in {tmp_path / 'rows.py'}, line 3; see {tmp_path / LOG}" in str(failure.value)


def test_the_place_is_one_of_the_last_error_and_its_causes():
    header, cause = "Traceback (most recent call last):", "The above exception was the direct cause of the following:"
    ours = f'  File "{SOURCE}/predict/job.py", line 9, in main'
    printed = [header, '  File "/code/early.py", line 1, in read', "KeyError: 3"]
    assert _place_in([*printed, header, ours, "RunError: wrong"]) == ""
    chain = [
        header,
        '  File "/code/late.py", line 2, in rows',
        "ValueError: 2",
        "",
        cause,
        "",
        header,
        ours,
        "RunError: 2",
    ]
    assert _place_in([*printed, *chain]) == " in /code/late.py, line 2"
