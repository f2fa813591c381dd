import numpy as np
import pytest

from paceline.conf.config import Speedup
from paceline.tasks.measure.paired_ratio import Interval, estimate_ratio
from paceline.tasks.measure.probe import run_probe
from paceline.tasks.measure.validity import judge
from paceline.tasks.records.measurement import FurtherStarts, Validity
from paceline.tasks.speedup.between_starts import (
    MAX_SHARE,
    MIN_ROUNDS,
    MIN_STARTS,
    across_starts,
    next_start,
    over_processes,
    variance_components,
)
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.planted_ratios import KINDS, RATIOS, PlantedArms
from tests.support.reports import make_probe, make_train


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


HOUR = 3600.0


def trained(seconds, **fields):
    """A training whose start took 4 s; a round of its probe takes about 0.85 s, its warm-up nothing."""
    probe = make_probe(**fields).model_copy(update={"seconds": 1.0})
    return make_train(probe, seconds=seconds, startup_seconds=4.0)


def all_starts(settings, train, seconds_of=lambda planned: 10.0 + planned.num_rounds, spread=0.02):
    """Each planned process in turn, as long as there is one, with ratios that scatter."""
    rng, done, planned = np.random.default_rng(3), FurtherStarts(), []
    while (following := next_start(settings, train, done)).num_rounds:
        planned.append(following)
        probe = make_probe(1.5 * np.exp(rng.normal(0, spread)), following.num_rounds)
        done = FurtherStarts(probes=(*done.probes, probe), seconds=done.seconds + seconds_of(following))
    return planned, done, following.reason


@pytest.mark.parametrize("seconds", [5.0, 30.0, 200.0])
def test_a_short_training_starts_no_further_process(seconds):
    found = next_start(Speedup(), trained(seconds), FurtherStarts())
    assert found.num_rounds == 0
    assert found.reason.startswith("two processes would take about")


def test_a_disturbed_probe_is_repeated_on_demand_alone():
    busy = judge(Validity(foreign_load=0.9, num_cores=2))
    assert next_start(Speedup(), trained(HOUR, validity=busy), FurtherStarts()).reason.startswith("the machine was")
    assert next_start(Speedup(starts=2), trained(HOUR, validity=busy), FurtherStarts()).num_rounds > 0


@pytest.mark.parametrize("seconds", [600.0, HOUR, 10 * HOUR])
def test_a_long_training_is_measured_in_at_most_a_twentieth_of_its_time(seconds):
    planned, done, reason = all_starts(Speedup(), trained(seconds))
    assert 2 <= len(planned) <= 5
    assert done.seconds <= MAX_SHARE * seconds
    assert all(MIN_ROUNDS <= each.num_rounds <= 12 for each in planned)
    assert reason.endswith("% of the training's time")


def test_processes_that_take_longer_than_estimated_are_fewer():
    planned, done, _ = all_starts(Speedup(), trained(1200.0), lambda planned: 28.0)
    assert (len(planned), done.seconds) == (2, 56.0)
    assert planned[0].seconds == pytest.approx(60.0), "a process is ended at the limit of all"
    assert planned[1].seconds == pytest.approx(32.0)


def test_starts_that_differ_much_get_few_rounds_and_others_many():
    differing, _, _ = all_starts(Speedup(), trained(10 * HOUR), spread=0.1)
    alike, _, _ = all_starts(Speedup(), trained(10 * HOUR), spread=0.0)
    assert [each.num_rounds for each in differing[2:]] == [MIN_ROUNDS] * 3
    assert alike[-1].num_rounds > MIN_ROUNDS


def test_the_limit_of_the_measurement_holds_for_all_further_processes():
    settings = Speedup(max_seconds=9.0)
    planned, _, _ = all_starts(settings, trained(HOUR))
    assert len(planned) == 2
    assert sum(each.num_rounds for each in planned) * 0.85 <= 9.0
    assert all(each.block_seconds <= 9.0 for each in planned)
    assert next_start(Speedup(max_seconds=3.0), trained(HOUR), FurtherStarts()).num_rounds == 0


def test_a_number_of_starts_is_measured_however_short_the_training():
    planned, _, _ = all_starts(Speedup(starts=3), trained(5.0))
    assert len(planned) == 3
    assert next_start(Speedup(starts=0), trained(HOUR), FurtherStarts()).reason == "speedup.starts=0"
    bare = make_train(None, startup_seconds=4.0)
    assert next_start(Speedup(starts=3), bare, FurtherStarts()).num_rounds == 0
