"""Merged moments are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.data.prepare import moments


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.sampled_from([1, 3]), st.integers(0, 99))
def test_merged_moments_are_numpys(sizes: list[int], channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 256, (size, 5, 4, channels), dtype=np.uint8) for size in sizes]
    merged = moments.merge(moments.of_images(part) for part in parts)
    everything = np.concatenate(parts).reshape(-1, channels) / 255
    assert merged.scaled_mean() == pytest.approx(everything.mean(0), rel=1e-12)
    assert merged.scaled_std() == pytest.approx(everything.std(0), rel=1e-9, abs=1e-12)


def test_nothing_has_no_moments() -> None:
    with pytest.raises(ValueError, match="no pixel"):
        moments.merge([moments.of_images(np.empty((0, 2, 2, 3), dtype=np.uint8))])
