"""The course of a training as properties: whatever groups take it in turn, an epoch has each sample once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.step_schedule import StepSchedule

NUM_EPOCHS = 4


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=8))
def test_groups_of_changing_size_see_each_sample_once_an_epoch(num: int, groups: list[tuple[int, int]]) -> None:
    seen = np.zeros((NUM_EPOCHS, num), dtype=int)
    step = epoch = first_sample = 0
    for number, (batch, num_steps) in enumerate(groups):
        course = StepSchedule(BatchPlan(num, batch), step, epoch, first_sample)
        stop = course.num_steps(NUM_EPOCHS)
        if number < len(groups) - 1:
            stop = min(stop, step + num_steps)
        assert course.samples(step) == seen.sum()
        while step < stop:
            epoch, plan, local = course.locate(step)
            start, end = plan.bounds(local)
            seen[epoch, start:end] += 1
            assert course.samples(step + 1) == seen.sum()
            assert course.ends_epoch(step + 1) == (end == num)
            step += 1
        epoch, first_sample = course.position(step)
        if epoch == NUM_EPOCHS:
            break
    assert (seen == 1).all()
    assert (epoch, first_sample) == (NUM_EPOCHS, 0)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 60))
def test_a_group_that_takes_up_its_own_work_has_the_same_steps(num: int, batch: int, step: int) -> None:
    whole = StepSchedule(BatchPlan(num, batch))
    step = min(step, whole.num_steps(NUM_EPOCHS) - 1)
    resumed = StepSchedule(whole.plan, step, *whole.position(step))
    assert resumed.num_steps(NUM_EPOCHS) == whole.num_steps(NUM_EPOCHS)
    assert resumed.num_past_steps in (step % whole.steps_per_epoch, whole.steps_per_epoch)
    for later in range(step, whole.num_steps(NUM_EPOCHS)):
        epoch, plan, local = whole.locate(later)
        other_epoch, other_plan, other_local = resumed.locate(later)
        assert (epoch, plan.bounds(local)) == (other_epoch, other_plan.bounds(other_local))
        assert whole.even_step(later) == resumed.even_step(later) == later


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 40), st.integers(0, 60))
def test_schedules_stay_in_their_epoch_and_never_go_back(num: int, first: int, second: int, step: int) -> None:
    before = StepSchedule(BatchPlan(num, first))
    step = min(step, before.num_steps(NUM_EPOCHS) - 1)
    after = StepSchedule(BatchPlan(num, second), step, *before.position(step))
    assert 0 <= after.num_past_steps <= after.steps_per_epoch
    steps = range(step, after.num_steps(NUM_EPOCHS))
    even = [after.even_step(later) for later in steps]
    assert even == sorted(even)
    assert [value // after.steps_per_epoch for value in even] == [after.position(later)[0] for later in steps]


def test_a_step_of_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match="step 4 is before 5"):
        StepSchedule(BatchPlan(100, 10), 5, 0, 50).locate(4)
    with pytest.raises(ValueError, match="first_sample"):
        StepSchedule(BatchPlan(100, 10), 5, 0, 100).locate(5)
