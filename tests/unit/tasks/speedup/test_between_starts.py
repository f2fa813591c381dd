import numpy as np
import pytest

from paceline.conf.config import Speedup
from paceline.tasks.measure.paired_ratio import Interval, estimate_ratio
from paceline.tasks.measure.probe import run_probe
from paceline.tasks.speedup.between_starts import MIN_STARTS, across_starts, over_processes, variance_components
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.planted_ratios import KINDS, RATIOS, PlantedArms
from tests.support.reports import make_probe


def start(rng, process_sd, num_rounds, round_sd=0.02, ratio=1.0):
    """A probe of one process whose rounds have noise of their own, next to that of the start."""
    logs = np.log(ratio) + rng.normal(0, process_sd) + rng.normal(0, round_sd, num_rounds)
    probe = make_probe(1.0, num_rounds, 0.0)
    rounds = tuple(
        tuple(
            block.model_copy(update={"seconds_per_sample": np.exp(log) if block.arm == "baseline" else 1.0})
            for block in blocks
        )
        for blocks, log in zip(probe.rounds, logs, strict=True)
    )
    return probe.model_copy(update={"rounds": rounds})


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
    own = Interval(value=1.1, low=1.05, high=1.15)
    assert across_starts(own, [1.0] * (MIN_STARTS - 1)) is None
    assert across_starts(Interval(value=1.1), [1.0] * 9) is None
    assert across_starts(own, [1.0] * MIN_STARTS) == own, "never narrower than within the process"


@pytest.mark.parametrize(
    ("num_further", "num_rounds", "process_sd"),
    [(2, 4, 0.0), (2, 4, 0.005), (2, 4, 0.01), (2, 4, 0.02), (2, 4, 0.03), (5, 8, 0.02)],
)
def test_processes_of_one_run_cover_the_true_ratio_whatever_starts_differ_by(process_sd, num_further, num_rounds):
    """Round noise 2 %; the training's own process has 12 rounds. One process alone covers 43 % at 3 %."""
    rng, trials, covered = np.random.default_rng(26), 250, 0
    for _ in range(trials):
        probes = [start(rng, process_sd, number) for number in (12, *[num_rounds] * num_further)]
        found = over_processes(probes)
        covered += found.low <= 1 <= found.high
    assert covered >= 0.93 * trials


def test_two_processes_have_no_interval():
    rng = np.random.default_rng(1)
    assert over_processes([start(rng, 0.01, 12), start(rng, 0.01, 4)]) is None


def test_the_components_are_those_that_were_planted():
    rng = np.random.default_rng(2)
    found = [variance_components([start(rng, 0.02, number) for number in (12, 6, 6, 6)]) for _ in range(300)]
    assert np.sqrt(np.mean([each.process for each in found])) == pytest.approx(0.02, rel=0.1)
    assert np.sqrt(np.mean([each.block for each in found])) == pytest.approx(0.02, rel=0.05)
    alone = variance_components([start(rng, 0.02, 12)])
    assert alone.process is None, "unknown from one process"
    assert alone.block is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_ratio_lies_in_the_printed_interval(kind):
    """The short form of `infra/bench calibration`: 60 starts on a clock that only counts, at default settings."""
    covered = called = 0
    for seed in range(60):
        arms = PlantedArms(RATIOS[seed % len(RATIOS)], kind, seed)
        result = speedup_result(run_probe(arms.runners(), Speedup(), clock=arms.clock))
        covered += result.low <= arms.truth <= result.high
        called += arms.ratio == 1 and result.significant_within_process and kind != "unequal"
    assert covered >= 0.93 * 60
    assert called <= 1
