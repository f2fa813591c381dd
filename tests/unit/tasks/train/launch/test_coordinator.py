"""What the coordinator changes before the next attempt, and what it reads of a training that continues."""

import json

import pytest

from paceline.conf.load import load
from paceline.tasks.errors import LostError, RankError
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.records.measurement import AutotuneResult, Measurement
from paceline.tasks.report.summary import clock_text
from paceline.tasks.train.launch.coordinator import TrainJob, _Attempts, _merge, scores_so_far
from paceline.tasks.train.launch.recovery import Recovery
from paceline.tasks.train.launch.supervisor import RankOutcome
from paceline.tasks.train.plan import resolve
from tests.support.reports import make_train

GPU = Gpu(uuid="GPU-0", name="a GPU", memory_bytes=2**33, compute_capability=(9, 0))
HOST = Hardware(host="here", cpu_name="cpu", num_cores=2, memory_bytes=2**33, cpu_bf16=True, gpus=(GPU,))
RECORDING = "the step cannot be recorded as a CUDA graph: it waits"
ARM = BASELINE.label


def attempts_of(tmp_path, *overrides, **fields):
    config = load("digits", list(overrides))
    fields = {"measurement": None, "may_search": True, "resume": False, "search": None} | fields
    job = TrainJob.model_construct(
        config=config, plan=resolve(config, HOST, 1293), home=str(tmp_path), run_id="run", **fields
    )
    attempts = _Attempts(job, Recovery(tmp_path, 3))
    attempts._number += 1  # one has been made
    return attempts


def no_memory(stage, arm=None):
    return RankError("rank 0 failed: no room", 0, oom_stage=stage, oom_arm=arm)


@pytest.mark.parametrize("error", [LostError("gone"), RankError("rank 0 failed: another reason", 0)])
def test_other_failures_change_nothing(tmp_path, error):
    attempts = attempts_of(tmp_path)
    before = attempts._job
    assert not attempts.adapt(error)
    assert attempts._job is before


def test_an_arm_of_the_search_is_left_out_and_the_others_are_timed_again(tmp_path):
    attempts = attempts_of(tmp_path)
    assert attempts.adapt(no_memory("search", ARM))
    assert attempts._left_out == {ARM: f"{ARM} needs more memory than a GPU has next to the training"}
    assert attempts._searches_again
    assert attempts.adapt(no_memory("search", ARM)), "what cannot be left out ends the search, not the run"
    assert not attempts._searches_again


def test_a_probe_that_does_not_fit_without_its_arms_is_not_made(tmp_path):
    attempts = attempts_of(tmp_path)
    assert attempts.adapt(no_memory("probe", ARM))
    assert attempts._job.config.speedup.baseline == "probe"
    assert attempts.adapt(no_memory("probe", ARM))
    assert attempts._job.config.speedup.baseline == "none"


def test_a_measurement_leaves_out_what_it_can_do_without(tmp_path):
    other = BASELINE.model_copy(update={"loading": "resident"})
    arms = {"baseline": BASELINE, "candidate": other, "more": other.model_copy(update={"precision": "tf32"})}
    attempts = attempts_of(tmp_path, measurement=Measurement(arms=arms, can_leave_out=True))
    assert attempts.adapt(no_memory("search", arms["more"].label))
    for measurement in (Measurement(arms=arms, can_leave_out=True), Measurement(arms=arms)):
        attempts = attempts_of(tmp_path, measurement=measurement)
        with pytest.raises(RankError, match=r"\brecipe\.batch_size\b") as found:
            attempts.adapt(no_memory("search", ARM))
        assert found.value.final


def test_after_a_failed_recording_nothing_that_was_timed_before_counts(tmp_path):
    search = AutotuneResult(probes=(), budget_seconds=1.0, seconds=1.0)
    attempts = attempts_of(tmp_path, search=search)
    assert attempts.adapt(RankError("rank 0 failed: CaptureError", 0, failed_capture=RECORDING))
    plan = attempts._job.plan
    assert (plan.compile, plan.failed_capture, attempts._job.search) == ("off", RECORDING, None)
    assert plan.reasons["compile"].reason == f"no CUDA graph, because {RECORDING}"
    assert attempts._first == attempts._number, "it may search, and reads nothing of the attempt before"


def test_the_layers_of_a_study_are_timed_without_the_graph_and_arms_that_were_asked_for_are_not(tmp_path):
    error = RankError("rank 0 failed: CaptureError", 0, failed_capture=RECORDING)
    layers = attempts_of(tmp_path, measurement=Measurement(arms={}))
    assert layers.adapt(error)
    assert layers._job.plan.compile == "off"
    demanded = attempts_of(tmp_path, measurement=Measurement(arms={"baseline": BASELINE, "candidate": BASELINE}))
    with pytest.raises(RankError):
        demanded.adapt(error)


def test_a_graph_that_was_asked_for_ends_the_run(tmp_path):
    attempts = attempts_of(tmp_path, "execution.compile=graph")
    with pytest.raises(RankError, match=r"\bexecution\.compile=auto\b") as found:
        attempts.adapt(RankError("rank 0 failed: CaptureError", 0, failed_capture=RECORDING))
    assert found.value.final


@pytest.mark.parametrize(
    ("forward", "difference", "words"),
    [
        (9.95, -0.005, ""),
        (10.5, 0.05, "its items add up to 5.0% more than a clock outside of it measured"),
        (7.0, -0.3, "its items add up to 30.0% less than a clock outside of it measured"),
    ],
)
def test_an_item_of_the_budget_that_lies_is_found_by_the_clock_of_the_supervisor(tmp_path, forward, difference, words):
    result = make_train(None, time_budget={"forward": forward}, wall_seconds=forward, peak_memory_bytes=1)
    outcome = RankOutcome(
        rank=0,
        is_first=True,
        result=result.model_dump(mode="json"),
        error=None,
        traceback="",
        failed_at=None,
        wall_seconds=10.0,
    )
    merged = _merge([outcome], Recovery(tmp_path, 3), type(result))
    assert merged.wall_seconds == 10.0
    assert merged.clock_difference == pytest.approx(difference)
    assert clock_text(merged.clock_difference) == words


def write(directory, attempt, scores):
    place = directory / f"attempt-{attempt}" / "rank-0"
    place.mkdir(parents=True)
    if scores is not None:
        (place / "progress.json").write_text(json.dumps({"validation_scores": scores}))


def test_scores_are_those_of_the_newest_attempt_that_has_any(tmp_path):
    assert scores_so_far(tmp_path) == ()
    write(tmp_path, 2, [0.1, 0.2])
    write(tmp_path, 10, [0.1, 0.2, 0.3])
    write(tmp_path, 11, None)
    assert scores_so_far(tmp_path) == (0.1, 0.2, 0.3)


def test_the_step_that_a_lost_rank_has_written_is_known(tmp_path):
    attempts = attempts_of(tmp_path)
    assert attempts._logged_step() == 0
    place = attempts._job.directory / "attempt-0" / "rank-0"
    place.mkdir(parents=True)
    (place / "progress.json").write_text(json.dumps({"step": 13}))
    assert attempts._logged_step() == 13
    attempts._first = attempts._number
    assert attempts._logged_step() == 0, "of an attempt of another process"
