"""Order, augmentation and the batch plan as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.loading import order
from tasks.data.loading.order import BatchPlan, epoch_augmentation, epoch_order, share


@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_order_is_a_permutation_and_a_pure_function(num: int, seed: int, epoch: int) -> None:
    first = epoch_order(num, seed, epoch)
    assert first.dtype == np.int64
    assert np.array_equal(np.sort(first), np.arange(num))
    assert np.array_equal(first, epoch_order(num, seed, epoch))


@pytest.mark.parametrize("num", [order.WINDOW, order.WINDOW + 1, 3 * order.WINDOW - 777])
def test_large_orders_are_permutations_whose_windows_touch_few_blocks(num: int) -> None:
    found = epoch_order(num, 7, 3)
    assert np.array_equal(np.sort(found), np.arange(num))
    if num > order.WINDOW:
        blocks = np.unique(found[: order.WINDOW] // order.BLOCK)
        assert len(blocks) <= order.WINDOW // order.BLOCK + 2
    assert not np.array_equal(found, epoch_order(num, 7, 4))
    assert not np.array_equal(found, epoch_order(num, 8, 3))


def test_augmentation_covers_its_range_and_nothing_else() -> None:
    flip, dy, dx = epoch_augmentation(20_000, 1, 0, "flip_shift", 4)
    assert 0.45 < flip.mean() < 0.55
    assert set(dy) == set(dx) == set(range(9))
    assert abs(np.corrcoef(dy, dx)[0, 1]) < 0.05
    assert not epoch_augmentation(100, 1, 0, "shift", 4)[0].any()
    flip, dy, dx = epoch_augmentation(100, 1, 0, "none", 4)
    assert not any(values.any() for values in (flip, dy, dx))
    assert not np.array_equal(
        epoch_augmentation(100, 1, 0, "shift", 4)[1], epoch_augmentation(100, 1, 1, "shift", 4)[1]
    )


@given(st.integers(1, 700), st.integers(1, 130), st.integers(1, 9))
def test_every_position_is_delivered_exactly_once(num: int, batch: int, world: int) -> None:
    plan = BatchPlan(num, batch, world)
    seen = [
        position
        for step in range(plan.steps_per_epoch)
        for rank in range(world)
        for position in range(*plan.local(step, rank))
    ]
    assert seen == list(range(num))
    for step in range(plan.steps_per_epoch):
        sizes = [stop - start for start, stop in (plan.local(step, rank) for rank in range(world))]
        assert max(sizes) - min(sizes) <= 1
        assert sum(plan.weight(step, rank) for rank in range(world)) == pytest.approx(world)


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
    assert BatchPlan(3, 256, 4).local(0, 3) == (3, 3)
    with pytest.raises(ValueError, match="at least 1"):
        BatchPlan(0, 4)
    with pytest.raises(IndexError):
        BatchPlan(10, 5).bounds(2)


@given(st.integers(0, 100), st.integers(1, 12))
def test_share_follows_array_split(num: int, world: int) -> None:
    expected = [list(part) for part in np.array_split(np.arange(num), world)]
    assert [list(range(*share(0, num, rank, world))) for rank in range(world)] == expected
