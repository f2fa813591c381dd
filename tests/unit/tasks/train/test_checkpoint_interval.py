"""How far apart checkpoints are: trainings of made-up costs and steps, on a clock of their own."""

import pytest

from paceline.tasks.data.loading.sampling import BatchPlan, StepSchedule
from paceline.tasks.train.checkpoint_interval import MAX_LOST_SECONDS, MAX_SHARE, MIN_SECONDS, CheckpointInterval, rule

WARM_UP = 20.0
"""Seconds that a first step takes longer, as where it is compiled."""


class Training:
    """One that asks the interval as the callback does."""

    def __init__(self, cost, step_seconds, num_steps, steps_per_epoch, log_steps=50, start=(0, 0, 0)):
        self.course = StepSchedule(BatchPlan(steps_per_epoch, 1), *start)
        self.now = 1000.0
        self.interval = CheckpointInterval(self.course, log_steps, start[0], self.now)
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

    @property
    def gaps(self):
        return [gap for _, gap in self.saved]


def steady(cost, step_seconds, num_steps, steps_per_epoch, **more):
    return Training(lambda _: cost, lambda _: step_seconds, num_steps, steps_per_epoch, **more)


def test_a_cheap_checkpoint_is_written_every_half_minute_inside_an_epoch():
    found = steady(cost=0.02, step_seconds=0.1, num_steps=10_000, steps_per_epoch=10_000)
    assert {MIN_SECONDS <= gap <= 2 * MIN_SECONDS for gap in found.gaps} == {True}
    assert len(found.saved) > 15
    assert all(step % 50 == 0 for step, _ in found.saved), "where the host waits for the device anyway"
    assert found.interval.choice.value == 300
    assert found.interval.choice.reason == (
        "a checkpoint takes 20.0 ms, a step 100.0 ms: 30 s apart, 0.07% of the time; up to 60 s of work can be lost"
    )


@pytest.mark.parametrize("cost", [0.6, 1.0, 3.0, 5.9])
@pytest.mark.parametrize("steps_per_epoch", [7, 350, 100_000])
def test_both_bounds_hold_as_long_as_they_can(cost, steps_per_epoch):
    found = steady(cost, 0.2, 20_000, steps_per_epoch)
    later = found.gaps[1:]  # what the first costs is not known before it
    assert cost * len(later) <= MAX_SHARE * sum(later) * 1.001
    assert found.lost <= MAX_LOST_SECONDS
    assert "because" not in found.interval.choice.reason


def test_an_expensive_checkpoint_keeps_to_its_share_and_says_what_can_be_lost():
    found = steady(cost=12.0, step_seconds=1.0, num_steps=10_000, steps_per_epoch=7_000)
    assert found.gaps[0] == pytest.approx(MIN_SECONDS, abs=21)
    assert all(600 <= gap <= 650 for gap in found.gaps[1:])
    assert found.interval.choice.value == 600
    assert found.interval.choice.reason == (
        "a checkpoint takes 12.0 s, a step 1.0 s: 600 s apart, 1.96% of the time; up to 600 s of work can be lost, "
        "because checkpoints no more than 300 s apart would take more than 2%"
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
    assert [step for step, _ in steady(0.5, 40.0, 4, 100).saved] == [1, 2, 3, 4]


@pytest.mark.parametrize(("before", "after"), [(0.01, 0.1), (0.1, 0.01)])
def test_steps_that_become_slower_or_faster_are_noticed(before, after):
    found = Training(lambda _: 0.02, lambda step: before if step <= 10_000 else after, 30_000, 100_000)
    assert found.lost <= MAX_LOST_SECONDS
    assert all(MIN_SECONDS <= gap <= 2 * MIN_SECONDS for gap in found.gaps[-3:])


def test_one_slow_write_does_not_move_the_next_checkpoints():
    usual = steady(1.0, 0.1, 20_000, 100_000)
    slow = usual.saved[4][0]
    found = Training(lambda step: 40.0 if step == slow else 1.0, lambda _: 0.1, 20_000, 100_000)
    assert found.saved[4] == usual.saved[4]
    assert found.gaps[5] == pytest.approx(usual.gaps[5])


def test_a_resumed_training_counts_from_where_it_resumes():
    found = steady(0.02, 0.1, 2_000, 1_000, start=(5_300, 5, 300))
    assert found.asked[0] == 5_301
    assert found.gaps[0] >= MIN_SECONDS
    assert 6_000 in {step for step, _ in found.saved}, "an epoch's end"


def test_the_rule_is_said_before_the_cost_is_known():
    assert rule().value == "by cost"
    assert steady(0.02, 0.01, 1_000, 5_000).interval.choice is None
