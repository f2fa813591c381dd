import numpy as np
import pytest

from paceline.conf.config import Speedup
from paceline.tasks.measure.records import FurtherStarts
from paceline.tasks.measure.validity import judge
from paceline.tasks.records.measurement import Validity
from paceline.tasks.speedup.start_plan import MAX_SHARE, MIN_ROUNDS, next_start
from tests.support.reports import make_probe, make_train

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
