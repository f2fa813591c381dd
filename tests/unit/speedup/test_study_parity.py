import numpy as np
import pytest

from tasks.speedup.parity import parity


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], "unknown"),
        ([(10, 11, 10_000)] * 3, "on par"),
        ([(0, 0, 360)] * 3, "on par"),
        ([(5, 400, 10_000)] * 3, "worse"),
        ([(400, 5, 10_000)] * 3, "better"),
        ([(2, 8, 100)], "undecided"),
        ([(20, 60, 10_000)] * 3, "on par"),  # a certain loss, but below one point
    ],
)
def test_verdicts(pairs, expected):
    assert parity(pairs)[1] == expected


def test_repeats_that_disagree_widen_the_interval():
    same, _ = parity([(20, 20, 1000)] * 3)
    torn, verdict = parity([(50, 0, 1000), (0, 50, 1000), (20, 20, 1000)])
    assert same is not None
    assert torn is not None
    assert torn.high - torn.low > 3 * (same.high - same.low)
    assert verdict == "undecided"


def test_the_interval_covers_the_true_difference():
    rng = np.random.default_rng(5)
    num_test, covered, trials = 2000, 0, 400
    for _ in range(trials):
        pairs = []
        for _ in range(3):
            gain, loss = 0.02 + rng.normal(0, 0.003), 0.03 + rng.normal(0, 0.003)
            counts = rng.multinomial(num_test, [gain, loss, 1 - gain - loss])
            pairs.append((int(counts[0]), int(counts[1]), num_test))
        interval, _ = parity(pairs)
        covered += interval.low <= -0.01 <= interval.high
    assert covered >= 0.93 * trials
