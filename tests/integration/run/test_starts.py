"""Further fresh processes after a training, which show how starts differ."""

import json
import os
import signal
import time

import pytest

from paceline.tasks.files import load_result
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.train.launch.rank_process import log_of, running_ranks
from tests.integration.conftest import SMALL

RUN = [*SMALL, "execution.loading=resident", "speedup.baseline=probe", "speedup.starts=2", "speedup.max_seconds=2"]


def rank_of(home, attempt):
    """The process of an attempt's rank, once it is there."""
    give_up = time.monotonic() + 300
    while time.monotonic() < give_up:
        for directory in home.glob("runs/*"):
            for pid in running_ranks(directory.name):
                if f"/attempt-{attempt}/" in log_of(pid):
                    return pid
        time.sleep(0.05)
    pytest.fail(f"no rank of attempt {attempt}")


@pytest.mark.slow
def test_a_run_repeats_its_probe_in_fresh_processes(program, tmp_path):
    process = program("run", "digits", *RUN, "--json", PACELINE_HOME=str(tmp_path))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    speedup = json.loads(out.splitlines()[-1])["speedup"]
    (stored,) = tmp_path.glob("runs/*/starts.json")
    starts = load_result(stored, FurtherStarts)
    arms = {(probe.baseline.label, probe.candidate.label) for probe in starts.probes}
    assert arms == {(speedup["baseline"], speedup["candidate"])}
    assert len(starts.probes) == 2
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == 3, "each in a process of its own"
    assert "speedup.starts=2: took" in err
    if not any(probe.validity.contaminated for probe in starts.probes):
        assert (speedup["scope"], speedup["starts"], speedup["num_starts"]) == ("across starts", "measured", 3)
        assert isinstance(speedup["significant"], bool)
    assert speedup["variance"]["step"] > 0


@pytest.mark.slow
def test_a_killed_or_interrupted_process_costs_no_result(program, tmp_path):
    """Ctrl-C in the first one; the resumed run does not train again, and its first further process is killed."""
    process = program("run", "digits", *RUN, "--json", PACELINE_HOME=str(tmp_path))
    rank_of(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    (directory,) = tmp_path.glob("runs/*")
    process = program("run", "--resume", directory.name, "--json", PACELINE_HOME=str(tmp_path))
    os.kill(rank_of(tmp_path, 2), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    speedup = summary["speedup"]
    assert (speedup["scope"], speedup["significant"], speedup["starts"]) == ("within this process", None, None)
    assert speedup["starts_reason"].startswith("a further process failed: rank 0 ")
    assert "The training has finished before" in err
    assert summary["train"]["restarts"] == []
