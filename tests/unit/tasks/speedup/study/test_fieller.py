import numpy as np
import pytest

from paceline.tasks.speedup.study.fieller import ratio_of_means


def test_the_interval_covers_the_true_ratio():
    rng, trials, covered = np.random.default_rng(25), 1000, 0
    for _ in range(trials):
        above, below = rng.multivariate_normal([6, 2], [[0.5, 0.1], [0.1, 0.05]], 5).T
        found = ratio_of_means(above, below)
        covered += found is None or found.low <= 3 <= found.high
    assert 0.93 <= covered / trials <= 0.97


def test_it_is_bounded_only_where_the_denominator_is_not_zero():
    assert ratio_of_means([1.0, 2.0, 3.0], [0.1, -0.1, 0.05]) is None
    assert ratio_of_means([1.0, 2.0], [1.0, 1.0]) is None
    found = ratio_of_means([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
