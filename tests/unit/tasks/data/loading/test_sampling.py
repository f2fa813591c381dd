"""Order, augmentation, the batch plan and the course of a training as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.tasks.data.loading.sampling import (
    BatchPlan,
    Shuffle,
    StepSchedule,
    alternating_flips,
    apportion,
    deal,
    epoch_augmentation,
    epoch_order,
    share,
)

SHUFFLE = Shuffle.of(32 * 32 * 3, 256)


def in_shards(samples_N: np.ndarray) -> np.ndarray:
    """Shards of 37 samples."""
    return samples_N // 37


@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_order_is_a_permutation_and_a_pure_function(num: int, seed: int, epoch: int) -> None:
    first = epoch_order(num, seed, epoch, SHUFFLE)
    assert first.dtype == np.int64
    assert np.array_equal(np.sort(first), np.arange(num))
    assert np.array_equal(first, epoch_order(num, seed, epoch, SHUFFLE))


@pytest.mark.parametrize("num", [SHUFFLE.window, SHUFFLE.window + 1, 3 * SHUFFLE.window - 777])
def test_large_orders_are_permutations_whose_windows_touch_few_blocks(num: int) -> None:
    found = epoch_order(num, 7, 3, SHUFFLE)
    assert np.array_equal(np.sort(found), np.arange(num))
    if num > SHUFFLE.window:
        blocks = np.unique(found[: SHUFFLE.window] // SHUFFLE.block)
        assert len(blocks) <= SHUFFLE.window // SHUFFLE.block + 2
    assert not np.array_equal(found, epoch_order(num, 7, 4, SHUFFLE))
    assert not np.array_equal(found, epoch_order(num, 8, 3, SHUFFLE))


@pytest.mark.parametrize(
    ("sample_bytes", "window_mib", "expected"),
    [
        (32 * 32 * 3, 256, Shuffle(window=85 * 1024, block=1024)),
        (224 * 224 * 3, 256, Shuffle(window=66 * 27, block=27)),
        (2**24, 8, Shuffle(window=1, block=1)),  # never less than a sample
    ],
)
def test_blocks_and_windows_are_cut_by_the_size_of_samples(
    sample_bytes: int, window_mib: int, expected: Shuffle
) -> None:
    assert Shuffle.of(sample_bytes, window_mib) == expected


def test_augmentation_covers_its_range_and_nothing_else() -> None:
    flip, dy, dx = epoch_augmentation(epoch_order(20_000, 1, 0, SHUFFLE), 1, 0, "flip_shift", 4)
    assert 0.45 < flip.mean() < 0.55
    assert set(dy) == set(dx) == set(range(9))
    assert abs(np.corrcoef(dy, dx)[0, 1]) < 0.05
    hundred = np.arange(100)
    assert not epoch_augmentation(hundred, 1, 0, "shift", 4)[0].any()
    flip, dy, dx = epoch_augmentation(hundred, 1, 0, "none", 4)
    assert not any(values.any() for values in (flip, dy, dx))
    assert not np.array_equal(
        epoch_augmentation(hundred, 1, 0, "shift", 4)[1], epoch_augmentation(hundred, 1, 1, "shift", 4)[1]
    )


@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_alternating_flips_show_each_sample_both_ways(num: int, seed: int, epoch: int) -> None:
    seen = []
    for at in (epoch, epoch + 1, epoch + 2):
        order = epoch_order(num, seed, at, SHUFFLE)
        flip, dy, dx = epoch_augmentation(order, seed, at, "alternating_flip_shift", 2)
        of_sample = np.empty(num, dtype=np.bool_)
        of_sample[order] = flip
        seen.append(of_sample)
        for shifts, expected in zip((dy, dx), epoch_augmentation(order, seed, at, "shift", 2)[1:], strict=True):
            assert np.array_equal(shifts, expected), "the windows are those without flips"
    assert np.array_equal(seen[0], ~seen[1])
    assert np.array_equal(seen[0], seen[2])


def test_half_of_the_samples_are_flipped_in_an_epoch_and_others_with_another_seed() -> None:
    found = alternating_flips(20_000, 1, 0)
    assert 0.45 < found.mean() < 0.55
    assert 0.45 < (found == alternating_flips(20_000, 2, 0)).mean() < 0.55


@given(st.integers(1, 700), st.integers(1, 130), st.integers(1, 9))
def test_every_position_is_delivered_exactly_once(num: int, batch: int, world: int) -> None:
    assume(min(num, batch) >= world)
    plan = BatchPlan(num, batch, world)
    order = epoch_order(num, num, 0, SHUFFLE)
    seen = []
    for step in range(plan.steps_per_epoch):
        parts = [plan.local(step, rank, order, in_shards) for rank in range(world)]
        sizes = tuple(map(len, parts))
        assert sizes == plan.sizes(step)
        assert max(sizes) - min(sizes) <= 1
        assert all(np.all(np.diff(part) > 0) for part in parts)
        seen += sorted(np.concatenate(parts))
        assert sum(plan.weight(step, rank) for rank in range(world)) == pytest.approx(world)
    assert seen == list(range(num))


@given(st.integers(1, 700), st.integers(1, 130), st.data())
def test_global_batches_do_not_depend_on_the_world(num: int, batch: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, max(1, batch // 8)))
    alone, together = BatchPlan(num, batch, 1), BatchPlan(num, batch, world)
    assert [alone.bounds(s) for s in range(alone.steps_per_epoch)] == [
        together.bounds(s) for s in range(together.steps_per_epoch)
    ]


def test_a_small_rest_is_folded_and_a_larger_one_stands_alone() -> None:
    assert BatchPlan(256 + 31, 256).steps_per_epoch == 1
    assert BatchPlan(256 + 32, 256).steps_per_epoch == 2
    few = BatchPlan(3, 256, 4)
    assert (few.sizes(0), few.weight(0, 3)) == ((3, 3, 3, 3), 1.0), "all of them for each, or a rank would have none"
    assert few.local(0, 3, np.arange(3), in_shards).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        BatchPlan(0, 4)
    with pytest.raises(IndexError):
        BatchPlan(10, 5).bounds(2)


@given(st.integers(0, 100), st.integers(1, 12))
def test_share_follows_array_split(num: int, world: int) -> None:
    expected = [list(part) for part in np.array_split(np.arange(num), world)]
    assert [list(range(*share(0, num, rank, world))) for rank in range(world)] == expected


LOADS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@given(st.integers(0, 1000), LOADS)
def test_shares_are_within_one_sample_of_their_part(num: int, loads: list[float]) -> None:
    parts = apportion(num, loads)
    assert sum(parts) == num
    exact = [num * load / sum(loads) for load in loads]
    if num >= len(loads):
        assert min(parts) >= 1
    if min(exact) >= 1:
        assert all(abs(part - wanted) < 1 + 1e-9 for part, wanted in zip(parts, exact, strict=True))


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(1e-3, 1e3))
def test_equal_loads_are_even_shares(num: int, world: int, load: float) -> None:
    starts = [share(0, num, rank, world) for rank in range(world)]
    assert apportion(num, [load] * world) == tuple(stop - start for start, stop in starts)


@given(st.integers(1, 700), st.integers(1, 130), LOADS)
def test_global_batches_do_not_depend_on_the_loads(num: int, batch: int, loads: list[float]) -> None:
    world = len(loads)
    assume(min(num, batch) >= world)
    even, uneven = BatchPlan(num, batch, world), BatchPlan(num, batch, world, tuple(loads))
    assert even.steps_per_epoch == uneven.steps_per_epoch
    for step in range(uneven.steps_per_epoch):
        assert even.bounds(step) == uneven.bounds(step)
        parts = [uneven.local(step, rank, np.arange(num), in_shards) for rank in range(world)]
        assert sorted(np.concatenate(parts)) == list(range(*even.bounds(step)))
        assert sum(uneven.weight(step, rank) for rank in range(world)) == pytest.approx(world)


def test_a_slow_rank_has_its_sample_and_the_ragged_last_batch_is_shared_alike() -> None:
    plan = BatchPlan(64 + 16, 64, 2, (3.0, 1.0))
    assert [plan.sizes(step) for step in range(2)] == [(48, 16), (12, 4)]
    assert apportion(4, (1e9, 1.0, 1.0)) == (2, 1, 1)
    for loads in ((1.0,), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="one positive number for each rank"):
            BatchPlan(10, 5, 2, loads)


def test_ranks_read_their_own_shards_first() -> None:
    num, world = 49 * 1_024, 4
    plan, order = BatchPlan(num, 2_048, world), epoch_order(num, 1, 0, SHUFFLE)
    shards = np.arange(num) // 1_024
    own = 0
    for step in range(plan.num_full_steps):
        for rank in range(world):
            samples = order[plan.local(step, rank, order, shards.__getitem__)]
            own += np.count_nonzero(shards[samples] % world == rank)
    assert own / (plan.num_full_steps * 2_048) > 0.96, "by chance it would be a quarter"


def test_what_nobody_owns_fills_the_parts_in_order() -> None:
    assert list(deal(np.array([0, 0, 0, 1, 0, 1]), (3, 3))) == [0, 0, 0, 1, 1, 1]
    assert list(deal(np.array([1, 1, 1, 1, 0, 1]), (2, 4))) == [1, 1, 1, 1, 0, 0]
    assert list(deal(np.zeros(6, dtype=np.int64), (2, 3, 1))) == [0, 0, 1, 1, 1, 2], "one shard: ranges"


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
    assert resumed.num_past_steps in (step % whole.plan.steps_per_epoch, whole.plan.steps_per_epoch)
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
    assert 0 <= after.num_past_steps <= after.plan.steps_per_epoch
    steps = range(step, after.num_steps(NUM_EPOCHS))
    even = [after.even_step(later) for later in steps]
    assert even == sorted(even)
    assert [value // after.plan.steps_per_epoch for value in even] == [after.position(later)[0] for later in steps]


def test_a_step_of_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match="step 4 is before 5"):
        StepSchedule(BatchPlan(100, 10), 5, 0, 50).locate(4)
    with pytest.raises(ValueError, match="first_sample"):
        StepSchedule(BatchPlan(100, 10), 5, 0, 100).locate(5)
