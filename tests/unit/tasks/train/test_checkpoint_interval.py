"""How far apart checkpoints are: trainings of made-up costs and steps, on a clock of their own."""

import os

import pytest

from paceline.tasks.data.loading.sampling import BatchPlan, StepSchedule
from paceline.tasks.train.checkpoint_interval import (
    MAX_LOST_SECONDS,
    MAX_SHARE,
    MIN_SECONDS,
    CheckpointInterval,
    FailureHistory,
    read_failures,
    rule,
)

FREQUENT = FailureHistory(num_failures=999, device_hours=976)
"""One failure in a device hour."""
RARE = FailureHistory(device_hours=10_000)

WARM_UP = 20.0
"""Seconds that a first step takes longer, as where it is compiled."""


class Training:
    """One that asks the interval as the callback does."""

    def __init__(
        self,
        cost,
        step_seconds,
        num_steps,
        steps_per_epoch,
        log_steps=50,
        start=(0, 0, 0),
        history=FREQUENT,
        num_devices=1,
    ):
        self.course = StepSchedule(BatchPlan(steps_per_epoch, 1), *start)
        self.now = 1000.0
        self.interval = CheckpointInterval(self.course.epoch_end, log_steps, start[0], self.now, self.read, num_devices)
        self.history, self.num_reads = history, 0
        self.saved, self.asked = [], []
        """(step, seconds since the one before, or since the start); steps."""
        self.lost = 0.0
        next_step, before = start[0] + 1, self.now
        for step in range(start[0] + 1, start[0] + num_steps + 1):
            self.now += step_seconds(step)
            self.lost = max(self.lost, self.now - before)
            if step < next_step:
                continue
            self.asked.append(step)
            next_step = self.interval.next_step(step, self.now)
            assert next_step >= step
            if next_step == step:
                self.saved.append((step, self.now - before))
                self.now += cost(step)
                next_step, before = self.interval.record_checkpoint(step, cost(step), self.now), self.now
                assert next_step > step

    def read(self):
        self.num_reads += 1
        return self.history

    @property
    def gaps(self):
        return [gap for _, gap in self.saved]


def steady(cost, step_seconds, num_steps, steps_per_epoch, **more):
    return Training(lambda _: cost, lambda _: step_seconds, num_steps, steps_per_epoch, **more)


@pytest.mark.parametrize(
    ("cost", "history", "num_devices", "seconds"),
    [
        (0.5, FREQUENT, 1, 60.0),  # sqrt(2 x 0.5 s x 3,600 s)
        (0.5, FREQUENT, 2, 42.4),
        (0.32, FailureHistory(), 3, 135.8),  # the prior, one failure in 24 device hours, over three devices
        (0.125, FailureHistory(num_failures=3, device_hours=40), 4, 60.0),  # (40 + 24) h / (3 + 1) / 4
    ],
)
def test_the_interval_is_that_of_young(cost, history, num_devices, seconds):
    found = steady(cost, 0.1, 20_000, 100_000, log_steps=5, history=history, num_devices=num_devices)
    assert found.interval.seconds == pytest.approx(seconds, rel=0.01)
    assert all(gap == pytest.approx(seconds, abs=0.8) for gap in found.gaps[1:])
    assert found.num_reads == 1


def test_a_cheap_checkpoint_is_written_every_half_minute_inside_an_epoch():
    found = steady(cost=0.02, step_seconds=0.1, num_steps=10_000, steps_per_epoch=10_000)
    assert {MIN_SECONDS <= gap <= 2 * MIN_SECONDS for gap in found.gaps} == {True}
    assert len(found.saved) > 15
    assert all(step % 50 == 0 for step, _ in found.saved), "where the host waits for the device anyway"
    assert found.interval.choice.value == 300
    assert found.interval.choice.reason == (
        "a checkpoint takes 20.0 ms, a step 100.0 ms; one failure in 1.0 device hours (999 in 976.0 recorded, 1 in 24 "
        "assumed); Young's interval is 12.0 s, but a restart takes as long: 30 s apart, 0.07% of the time; up to 60 s "
        "of work can be lost"
    )


@pytest.mark.parametrize("history", [FREQUENT, RARE])
@pytest.mark.parametrize("cost", [0.6, 1.0, 3.0, 5.8])
@pytest.mark.parametrize("steps_per_epoch", [7, 350, 100_000])
def test_both_bounds_hold_as_long_as_they_can(cost, steps_per_epoch, history):
    found = steady(cost, 0.2, 40_000, steps_per_epoch, history=history)
    assert cost * len(found.saved) <= MAX_SHARE * (found.now - 1000.0), "the first too, whose cost is not known before"
    assert found.lost + cost <= MAX_LOST_SECONDS
    assert "because" not in found.interval.choice.reason
    closest = "up to 300 s may be lost" if history is RARE and cost < 5 else "checkpoints may take 2%"
    bound = f", but {closest}: " if history is RARE or cost > 1 else ""
    assert f" s{bound or ': '}" in found.interval.choice.reason


def test_the_time_to_the_disk_counts_as_work_that_can_be_lost():
    interval = CheckpointInterval(StepSchedule(BatchPlan(10_000, 1)).epoch_end, 50, 0, 0.0, lambda: RARE, 1)
    interval.record_checkpoint(300, 1.0, 31.0, write_seconds=99.0)
    assert interval.seconds == MAX_LOST_SECONDS - 30.0 - 100.0
    assert "up to 300 s of work can be lost" in interval.choice.reason


def test_an_expensive_checkpoint_keeps_to_its_share_and_says_what_can_be_lost():
    found = steady(cost=12.0, step_seconds=1.0, num_steps=10_000, steps_per_epoch=7_000)
    assert found.gaps[0] == pytest.approx(MIN_SECONDS, abs=21)
    assert all(600 <= gap <= 650 for gap in found.gaps[1:])
    assert found.interval.choice.value == 600
    assert found.interval.choice.reason == (
        "a checkpoint takes 12.0 s, a step 1.0 s; one failure in 1.0 device hours (999 in 976.0 recorded, 1 in 24 "
        "assumed); Young's interval is 293.9 s, but checkpoints may take 2%: 600 s apart, 1.96% of the time; up to "
        "612 s of work can be lost, because checkpoints no more than 300 s apart would take more than 2%"
    )


def test_short_epochs_are_saved_at_their_ends_and_not_each():
    found = steady(cost=0.007, step_seconds=0.02, num_steps=20_000, steps_per_epoch=11, log_steps=5)
    assert all(step % 11 == 0 for step, _ in found.saved)
    assert all(MIN_SECONDS <= gap <= MIN_SECONDS + 11 * 0.02 for gap in found.gaps)


def test_epochs_of_up_to_two_intervals_are_saved_at_their_ends_alone():
    found = steady(cost=0.02, step_seconds=0.1, num_steps=9_000, steps_per_epoch=500)
    assert [step for step, _ in found.saved] == list(range(500, 9_001, 500))


def test_it_is_asked_at_few_steps():
    found = steady(cost=0.02, step_seconds=0.001, num_steps=400_000, steps_per_epoch=1_000_000)
    assert len(found.saved) == 13
    assert len(found.asked) <= 12 + 3 * len(found.saved)
    assert sum(step % 50 != 0 for step in found.asked) <= 7, "a wait for the device, of which a training has few"


def test_slow_first_steps_are_not_taken_for_the_pace():
    found = Training(lambda _: 0.02, lambda step: 0.01 + WARM_UP * (step == 1), 20_000, 100_000)
    assert all(MIN_SECONDS <= gap <= 2 * MIN_SECONDS for gap in found.gaps)


def test_a_step_longer_than_the_interval_is_followed_by_a_checkpoint():
    assert [step for step, _ in steady(0.1, 40.0, 4, 100).saved] == [1, 2, 3, 4]
    found = steady(0.1, 400.0, 4, 100)
    assert [step for step, _ in found.saved] == [1, 2, 3, 4]
    assert found.interval.choice.reason.endswith("up to 400 s of work can be lost, because a step takes that long")


@pytest.mark.parametrize(("before", "after"), [(0.01, 0.1), (0.1, 0.01)])
def test_steps_that_become_slower_or_faster_are_noticed(before, after):
    found = Training(lambda _: 0.02, lambda step: before if step <= 10_000 else after, 30_000, 100_000)
    assert found.lost <= MAX_LOST_SECONDS
    assert all(MIN_SECONDS <= gap <= 2 * MIN_SECONDS for gap in found.gaps[-3:])


def test_steps_that_become_ten_times_as_slow_cost_no_more_than_the_bound():
    found = Training(lambda _: 0.02, lambda step: 0.02 if step <= 20_000 else 0.2, 30_000, 100_000, history=RARE)
    assert found.lost <= MAX_LOST_SECONDS + 30


def test_one_slow_write_is_made_up_for_and_then_forgotten():
    usual = steady(1.0, 0.1, 40_000, 100_000)
    slow = usual.saved[4][0]
    found = Training(lambda step: 20.0 if step == slow else 1.0, lambda _: 0.1, 40_000, 100_000)
    assert found.saved[4] == usual.saved[4]
    assert usual.gaps[5] < found.gaps[5] <= MAX_LOST_SECONDS - 1.0
    assert 19.0 + len(found.saved) <= MAX_SHARE * (found.now - 1000.0)
    assert found.gaps[-1] == pytest.approx(usual.gaps[-1])


def test_a_resumed_training_counts_from_where_it_resumes():
    found = steady(0.02, 0.1, 2_000, 1_000, start=(5_300, 5, 300))
    assert found.asked[0] == 5_301
    assert found.gaps[0] >= MIN_SECONDS
    assert 6_000 in {step for step, _ in found.saved}, "an epoch's end"


def test_the_rule_is_said_before_the_cost_is_known():
    assert rule().value == "by cost"
    short = steady(0.02, 0.01, 1_000, 5_000)
    assert short.interval.choice is None
    assert short.num_reads == 0, "a short training does not wait for the record"


def make_attempt(home, run, number, started, seconds, num_ranks=1):
    """An attempt at a training, by the times of its files; without progress where it took no time."""
    for rank in range(num_ranks):
        directory = home / "runs" / run / f"attempt-{number}" / f"rank-{rank}"
        directory.mkdir(parents=True)
        for name, time in [("spec.json", started), *([("progress.json", started + seconds)] if seconds else [])]:
            (directory / name).touch()
            os.utime(directory / name, (time, time))


def test_failures_are_counted_from_the_attempts_of_earlier_trainings(tmp_path):
    assert read_failures(tmp_path) == FailureHistory()
    make_attempt(tmp_path, "undisturbed", 0, 1e6, 3600, num_ranks=2)
    make_attempt(tmp_path, "lost-twice", 0, 2e6, 1800)
    make_attempt(tmp_path, "lost-twice", 1, 3e6, 900, num_ranks=4)
    make_attempt(tmp_path, "lost-twice", 2, 4e6, 1800)
    make_attempt(tmp_path, "measured-again", 0, 5e6, 3600)
    make_attempt(tmp_path, "measured-again", 1, 6e6, 0)
    make_attempt(tmp_path, "never-started", 0, 7e6, 0)
    found = read_failures(tmp_path)
    assert found == FailureHistory(num_failures=2, device_hours=2 + 0.5 + 1 + 0.5 + 1)
    assert found.hours_per_failure == pytest.approx((5 + 24) / 3)
    assert found.reason == "one failure in 9.7 device hours (2 in 5.0 recorded, 1 in 24 assumed)"
