import time

import pytest

from paceline.tasks.errors import InputError, LostError, RankError
from paceline.tasks.files import write_durably
from paceline.tasks.train.launch import recovery as module
from paceline.tasks.train.launch.recovery import Recovery
from paceline.tasks.train.rank.checkpoint import checkpoint_path, digest_path


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)


def make(tmp_path, max_restarts=2):
    return Recovery(tmp_path, max_restarts)


def save(directory, step):
    import hashlib

    path = checkpoint_path(directory, step)
    write_durably(path, b"weights")
    digest_path(path).write_text(hashlib.sha256(b"weights").hexdigest())


def test_restarts_are_recorded_with_cause_and_lost_steps(tmp_path, caplog):
    recovery = make(tmp_path)
    recovery.record_start(0)
    save(tmp_path, 40)
    error = RankError("rank 1 failed: ended by SIGKILL", 1)
    recovery.judge(error, num_ranks=2, steps_done=55, failed_at=time.monotonic() - 0.5)
    recovery.record_start(40)
    (restart,) = recovery.restarts
    assert (restart.cause, restart.rank, restart.num_ranks) == ("rank 1 failed: ended by SIGKILL", 1, 2)
    assert (restart.first_step, restart.lost_steps) == (40, 15)
    assert caplog.messages == [
        "rank 1 failed: ended by SIGKILL; restarting the group",
        f"Resuming from step 40 {restart.seconds:.1f} s after the failure; at least 15 steps are repeated",
    ]
    assert 0.5 <= restart.seconds <= recovery.lost_seconds + 0.5, "it counts from when the failure was noticed"


def test_without_progress_only_so_many_are_made(tmp_path):
    recovery = make(tmp_path, max_restarts=2)
    recovery.record_start(0)
    recovery.judge(LostError("a"), 2, 5)
    recovery.record_start(0)
    recovery.judge(LostError("b"), 2, 5)
    recovery.record_start(0)
    with pytest.raises(LostError, match="c"):
        recovery.judge(LostError("c"), 2, 5)


def test_progress_makes_up_for_earlier_failures(tmp_path):
    recovery = make(tmp_path, max_restarts=1)
    recovery.record_start(0)
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
        recovery.judge(LostError("gone"), 2, step + 1)
        recovery.record_start(step)
    assert len(recovery.restarts) == 4


def test_what_a_rank_raises_on_purpose_is_final(tmp_path):
    with pytest.raises(RankError, match="is nan"):
        make(tmp_path).judge(RankError("train/loss is nan at step 3", 0, final=True), 1, 3)


def test_the_same_error_is_not_tried_a_third_time(tmp_path):
    recovery = make(tmp_path, max_restarts=10)
    recovery.record_start(0)
    recovery.judge(RankError("rank 0 failed: TypeError"), 1, 0)
    recovery.record_start(0)
    with pytest.raises(RankError, match="TypeError"):
        recovery.judge(RankError("rank 0 failed: TypeError"), 1, 0)


def test_patience_begins_with_the_first_failure(tmp_path):
    recovery = make(tmp_path)

    def absent():
        raise InputError("no scheduler answers")

    with pytest.raises(InputError, match="no scheduler"):
        recovery.wait_for_cluster(absent)
    recovery.judge(LostError("the Dask scheduler is gone"), 2, 5)
    with pytest.raises(LostError) as error:
        recovery.wait_for_cluster(absent)
    assert error.value.final
    with pytest.raises(LostError) as again:
        recovery.judge(error.value, 0, 0)  # it is not tried again
    assert again.value is error.value
    assert recovery.wait_for_cluster(lambda: 7) == 7


def test_the_wait_for_workers_is_told_apart_from_the_restart(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.15)
    recovery, answers = make(tmp_path), iter([InputError("1 worker for 2 ranks"), TimeoutError("silent"), 7])

    def find():
        answer = next(answers)
        with recovery.waiting():
            time.sleep(0.1)  # for the scheduler to answer
            if isinstance(answer, Exception):
                raise answer
        time.sleep(0.1)  # for the search among its workers
        return answer

    recovery.record_start(0)
    recovery.judge(LostError("a worker is gone"), 2, 5)
    assert recovery.wait_for_cluster(find) == 7
    recovery.record_start(0)
    (restart,) = recovery.restarts
    assert 0.6 <= restart.wait_seconds <= restart.seconds - 0.25, "the first pause and the search are of the restart"
    assert f" s after the failure ({restart.wait_seconds:.1f} s of them waiting for the cluster); " in caplog.text
    recovery.judge(LostError("a worker is gone"), 2, 5)
    assert recovery.wait_for_cluster(lambda: 7) == 7
    recovery.record_start(0)
    assert recovery.restarts[1].wait_seconds == 0


@pytest.mark.parametrize(("error", "progress", "pauses"), [
    (RankError("rank 1 failed: ended by SIGKILL"), True, False),
    (RankError("rank 1 failed: ended by SIGKILL"), False, True),
    (LostError("a worker is gone"), True, False),
    (LostError("a worker is gone"), False, True),
])  # fmt: skip
def test_only_a_restart_without_progress_waits(tmp_path, monkeypatch, error, progress, pauses):
    pause = []
    monkeypatch.setattr(module.time, "sleep", pause.append)
    recovery = make(tmp_path)
    recovery.record_start(0)
    if progress:
        save(tmp_path, 10)
    recovery.judge(error, 2, 12)
    assert bool(pause) == pauses
