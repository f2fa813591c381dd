import numpy as np
import pytest

from paceline.tasks.speedup.study.parity import parity, score_parity


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


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], "unknown"),
        ([(0.001, 0.002)] * 3, "on par"),
        ([(-0.05, 0.004)] * 3, "worse"),
        ([(0.05, 0.004)] * 3, "better"),
        ([(-0.004, 0.01)], "undecided"),
        ([(-0.005, 0.001)] * 3, "on par"),  # a certain loss, but below one point
        ([(0.03, 0.001), (-0.03, 0.001), (0.0, 0.001)], "undecided"),  # the repeats disagree
    ],
)
def test_verdicts_on_other_scores(pairs, expected):
    assert score_parity(pairs)[1] == expected


def test_the_interval_of_a_score_holds_the_choice_of_samples_which_repeats_share():
    """Each trial has one test split, which moves all its repeats alike, and a little noise of each training."""
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        shared = rng.normal(-0.01, 0.004)
        interval, _ = score_parity([(shared + rng.normal(0, 0.001), 0.004) for _ in range(3)])
        covered += interval.low <= -0.01 <= interval.high
    assert covered >= 0.93 * 400


def test_repeats_on_the_same_test_samples_do_not_make_them_more():
    """What two networks tell differently of a split they do in each repeat: its choice is one draw, not six."""
    rng = np.random.default_rng(6)
    num_test, covered, trials = 2000, 0, 400
    for _ in range(trials):
        gained, lost, _ = (int(count) for count in rng.multinomial(num_test, [0.02, 0.03, 0.95]))
        interval, _ = parity([(gained, lost, num_test)] * 6)
        covered += interval.low <= -0.01 <= interval.high
    assert covered >= 0.93 * trials
    assert parity([(0, 2, 360)] * 6)[1] == "undecided"
