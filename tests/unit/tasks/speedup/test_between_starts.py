import numpy as np
import pytest

from paceline.tasks.measure.paired_ratio import Estimate, estimate_ratio
from paceline.tasks.speedup.between_starts import MIN_STARTS, across_starts


@pytest.mark.parametrize("process_sd", [0.005, 0.01, 0.02, 0.03])
@pytest.mark.parametrize("num_earlier", [MIN_STARTS, 10])
def test_the_interval_covers_the_true_ratio_whatever_starts_differ_by(process_sd, num_earlier):
    """Round noise 2 %, 12 rounds; one process alone covers 95, 84, 58 and 43 %."""
    rng, trials, covered = np.random.default_rng(25), 300, 0
    for _ in range(trials):
        *earlier, own = (
            estimate_ratio(rng.normal(0, process_sd) + rng.normal(0, 0.02, 12)) for _ in range(num_earlier + 1)
        )
        found = across_starts(own, [start.value for start in earlier])
        covered += found.low <= 1 <= found.high
    assert covered >= 0.93 * trials


def test_too_few_earlier_starts_or_no_interval_borrow_nothing():
    own = Estimate(1.1, 1.05, 1.15)
    assert across_starts(own, [1.0] * (MIN_STARTS - 1)) is None
    assert across_starts(Estimate(1.1, None, None), [1.0] * 9) is None
    assert across_starts(own, [1.0] * MIN_STARTS) == own, "never narrower than within the process"
