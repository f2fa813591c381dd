import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from paceline.conf.config import Speedup
from paceline.tasks.errors import RunError
from paceline.tasks.measure.paired_ratio import arm_ratio, joules_per_sample, speedup_ratio, typical_ratio
from paceline.tasks.measure.probe import ArmLostError, ArmRunner, order_of_round, run_probe
from paceline.tasks.records.measurement import Validity
from tests.support.evidence import SimulatedProbe
from tests.support.refusals import refused
from tests.support.simulated_machine import ARM, Machine


class Seen:
    """A watch that has been told what to see, once per attempt."""

    def __init__(self, *contaminated):
        self.left, self.num_begun = list(contaminated), 0

    def __call__(self):
        self.num_begun += 1
        return self

    def stop(self):
        return Validity(contaminated=self.left.pop(0), foreign_load=float(self.num_begun))


def _order(result):
    return ["".join(block.arm[0] for block in blocks) for blocks in result.rounds]


def test_palindromes_and_pieces():
    result = Machine({"baseline": 0.1, "candidate": 0.05}).probe()
    assert _order(result) == ["bc", "cb"] * 4
    assert result.stopped_because == "interval narrow enough"
    assert speedup_ratio(result.rounds).value == pytest.approx(2.0)
    assert {block.num_steps for blocks in result.rounds for block in blocks} == {3}  # 0.25 s of 0.1 s steps
    assert result.rounds[0][0].seconds_per_sample == pytest.approx(0.1 / 32)
    assert result.batch_size == 32
    assert result.samples_per_step == {"baseline": 32, "candidate": 32}


def test_a_block_counts_its_total_time_without_the_first_step_after_a_change_of_arm():
    machine = Machine({"baseline": 0.05, "candidate": 0.05})
    plain = machine.runners["baseline"]
    machine.runners["baseline"] = ArmRunner(
        arm=plain.arm,
        run=lambda num_steps: [0.5, *plain.run(num_steps)[1:-1], 0.15] if num_steps > 2 else plain.run(num_steps),
        samples_per_step=plain.samples_per_step,
    )
    result = machine.probe(steps_per_block=5)
    slow = next(block for block in result.rounds[0] if block.arm == "baseline")
    assert slow.seconds_per_sample == pytest.approx((3 * 0.05 + 0.15) / 4 / plain.samples_per_step)
    assert slow.typical_seconds_per_sample == pytest.approx(0.05 / plain.samples_per_step)
    assert speedup_ratio(result.rounds).value == pytest.approx(0.075 / 0.05)
    assert typical_ratio(result.rounds).value == pytest.approx(1.0)


def test_three_arms_alternate_too():
    result = Machine({"single": 0.1, "candidate": 0.05, "baseline": 0.1}).probe(num_blocks=4)
    assert _order(result) == ["bcs", "scb", "bcs", "scb"]
    assert result.stopped_because == "all blocks done"


@pytest.mark.parametrize("num_roles", [4, 5, 6, 7])
def test_places_cancel_with_many_arms(num_roles):
    roles = tuple(f"r{number}" for number in range(num_roles))
    rounds = [order_of_round(roles, number) for number in range(2 * num_roles)]
    for even, odd in zip(rounds[::2], rounds[1::2], strict=True):
        assert odd == even[::-1]  # a linear drift falls on all alike
    for role in roles:
        assert sorted(order.index(role) for order in rounds) == sorted([*range(num_roles)] * 2)
    # In most rounds the first two, which the ratio is made of, follow each other.
    apart = [abs(order.index("r0") - order.index("r1")) for order in rounds]
    assert apart.count(1) == 2 * (num_roles - 1)


def test_a_drift_falls_on_all_arms_alike():
    roles = ("baseline", "candidate", "single", "no_sync", "half_batch", "synthetic_input")
    machine = Machine(dict.fromkeys(roles, 0.3))
    machine.noise = lambda: 0.002 * machine.now
    result = machine.probe(num_blocks=24, max_seconds=1000, target_half_width=1e-6)
    for role in roles[1:]:
        assert arm_ratio(result.rounds, role, "baseline").value == pytest.approx(1.0, abs=1e-3)


def test_further_arms_are_kept_by_role_and_looked_at_before_stopping():
    course = iter(np.random.default_rng(0).normal(0, 0.1, 10_000))
    steps = {"baseline": 0.1, "candidate": 0.05, "synthetic_input": 0.04, "no_sync": 0.03}
    machine = Machine(steps)
    noisy = machine.runners["no_sync"]
    machine.runners["no_sync"] = ArmRunner(
        arm=noisy.arm.model_copy(update={"variant": "no_sync"}),
        run=lambda num_steps: [second * np.exp(next(course)) for second in noisy.run(num_steps)],
        samples_per_step=16,
    )
    result = machine.probe()
    assert sorted(result.others) == ["no_sync", "synthetic_input"]
    assert result.others["no_sync"].variant == "no_sync"
    assert result.samples_per_step == {"baseline": 32, "candidate": 32, "no_sync": 16, "synthetic_input": 32}
    assert result.stopped_because != "interval narrow enough"
    assert _order(result)[:4] == ["bcns", "sncb", "cnsb", "bsnc"]
    del machine.runners["no_sync"]
    assert machine.probe().stopped_because == "interval narrow enough"


def test_arms_that_diverge_are_marked():
    machine = Machine({"baseline": 0.1, "candidate": 0.1, "half_batch": 0.1})
    for role in ("candidate", "half_batch"):
        machine.runners[role] = replace(machine.runners[role], has_diverged=lambda role=role: role == "half_batch")
    assert machine.probe(num_blocks=4).diverged == ("half_batch",)


def test_both_required_arms_are_required():
    runners = Machine({"baseline": 0.1, "single": 0.1}).runners
    with pytest.raises(ValueError, match="lack candidate"):
        run_probe(runners, Speedup())


def test_contaminated_attempt_is_repeated_until_clean():
    machine, seen = Machine({"baseline": 0.1, "candidate": 0.05}), Seen(True, True, False)
    result = machine.probe(watch=seen)
    assert (result.num_repeats, seen.num_begun) == (2, 3)
    assert result.validity.contaminated is False
    assert result.validity.foreign_load == 3.0  # of the attempt that was kept
    assert len(result.rounds) == 8


@pytest.mark.parametrize(
    ("max_seconds", "num_repeats"),
    [(25.0, 12), (2.0, 2), (0.5, 1)],  # an attempt takes eight rounds of 0.45 s, 0.15 s, and what it is given
)
def test_repeats_end_with_the_time(max_seconds, num_repeats):
    machine = Machine({"baseline": 0.1, "candidate": 0.05})
    result = machine.probe(watch=Seen(*[True] * 20), max_seconds=max_seconds)
    assert result.num_repeats == num_repeats
    assert result.validity.contaminated is True
    assert machine.now <= 2 * max_seconds + 4 * 0.1 + 0.45  # with warm-up, and a round that had to be finished


def test_unwatched_machine_is_unknown():
    result = Machine({"baseline": 0.1, "candidate": 0.05}).probe()
    assert (result.validity, result.num_repeats) == (Validity(), 0)
    assert Machine({"baseline": 0.1, "candidate": 0.05}).probe(watch=Seen(None)).num_repeats == 0


def test_time_limit_holds():
    machine = Machine({"baseline": 3.0, "candidate": 2.0})
    result = machine.probe(max_seconds=22.0)
    assert (len(result.rounds), result.stopped_because) == (4, "time is up")
    assert result.seconds == pytest.approx(4 * 5.0 + 2 * 5.0)  # with two steps of warm-up each


def test_one_round_even_when_time_is_too_short():
    assert len(Machine({"baseline": 3.0, "candidate": 2.0}).probe(max_seconds=0.1).rounds) == 1


def test_warm_up_lasts_until_times_no_longer_fall():
    machine = Machine({"baseline": 0.1, "candidate": 0.1}, warmup=(20.0, 0.8, 0.2))
    result = machine.probe(num_blocks=3, steps_per_block=5)
    assert machine.calls[:5] == [("baseline", 1)] * 5
    assert result.rounds[0][0].seconds_per_sample == pytest.approx(0.1 / 32)


def test_warm_up_has_a_cap():
    machine = Machine({"baseline": 0.1, "candidate": 0.1}, warmup=tuple(0.5**n for n in range(9)))
    machine.probe(num_blocks=3)
    assert machine.calls[:10] == [("baseline", 1)] * 10
    assert machine.calls[10] == ("candidate", 1)


@pytest.mark.parametrize(
    ("step_seconds", "settings", "num_steps"),
    [
        (0.001, {}, 250),
        (1e-6, {}, 1000),
        (2.0, {}, 1),
        (0.01, {"max_seconds": 1.2}, 5),  # 12 rounds of two arms in 1.2 s leave 0.05 s for a block
        (0.01, {"steps_per_block": 7}, 7),
    ],
)
def test_steps_per_block(step_seconds, settings, num_steps):
    result = Machine({"baseline": step_seconds, "candidate": step_seconds / 4}).probe(**settings)
    assert result.rounds[0][0].num_steps == num_steps


@pytest.mark.parametrize(("num_workers", "num_steps"), [(1, 3), (2, 3), (4, 5), (64, 3)])  # 65 take too long
def test_steps_that_wait_for_workers_in_turn_count_by_whole_periods(num_workers, num_steps):
    machine = Machine({"baseline": 0.1, "candidate": 0.04})
    times = itertools.cycle([0.1, *[0.04] * (num_workers - 1)])
    machine.runners["candidate"] = replace(
        machine.runners["candidate"],
        run=lambda number: list(itertools.islice(times, number)),
        period=num_workers,
    )
    result = machine.probe()
    assert result.rounds[0][0].num_steps == num_steps
    if num_workers < num_steps:
        mean = (0.1 + 0.04 * (num_workers - 1)) / num_workers
        assert speedup_ratio(result.rounds).value == pytest.approx(0.1 / mean)


@pytest.mark.parametrize("steps", [[], [0.0], [float("nan")], [-1.0]])
def test_impossible_times_are_refused(steps):
    runner = ArmRunner(arm=ARM, run=lambda num_steps: steps, samples_per_step=1)
    with refused(None, "baseline", kind=RunError):
        run_probe({"baseline": runner, "candidate": runner}, Speedup())


def test_all_ranks_decide_alike_although_their_clocks_differ():
    num_ranks = 3
    barrier = threading.Barrier(num_ranks, timeout=60)
    voice, results = [0.0], [None] * num_ranks

    def agree_of(rank):
        def agree(value):
            if rank == 0:
                voice[0] = value
            barrier.wait()
            common = voice[0]
            barrier.wait()
            return common

        return agree

    def work(rank):
        noise = np.random.default_rng(rank)
        machine = Machine({"baseline": 0.1, "candidate": 0.05 * (1 + rank)}, lambda: noise.normal(0, 0.03))
        if rank:  # has no part in the baseline
            machine.runners["baseline"] = ArmRunner(arm=ARM, run=lambda num_steps: [], samples_per_step=32)
        # Only rank 0's host is contaminated, once; the others follow although theirs never is, or always.
        watch = Seen(True, False) if rank == 0 else Seen(*[rank == 1] * 9)
        results[rank] = machine.probe(agree=agree_of(rank), watch=watch, max_seconds=20)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is not None
    assert [result.num_repeats for result in results] == [1, 1, 1]
    own_host = {"validity": results[0].validity}
    assert results[0] == results[1].model_copy(update=own_host) == results[2].model_copy(update=own_host)


def _student(rng):
    while True:
        yield 0.02 * rng.standard_t(2)


def _bursts(rng):
    """Slowness that lasts three blocks on average, so that it hits neighbours."""
    while True:
        if rng.random() < 0.08:
            slowness = np.log1p(rng.uniform(0.3, 1.0))
            for _ in range(rng.geometric(1 / 3)):
                yield rng.normal(0, 0.01) + slowness
        yield rng.normal(0, 0.01)


def _autocorrelated(rng):
    noise = rng.normal(0, 0.03)
    while True:
        yield noise
        noise = 0.5 * noise + np.sqrt(0.75) * rng.normal(0, 0.03)


def _drift(rng):
    """A machine that gets slower all the time, at a rate of its own, by up to a third over the probe."""
    rate = rng.uniform(-0.006, 0.006)
    for block in itertools.count():
        yield rate * block + 0.015 * rng.standard_t(3)


NOISE = (_student, _bursts, _autocorrelated, _drift)
TWO, SIX = ("baseline", "candidate"), ("baseline", "candidate", "half_batch", "no_sync", "single", "synthetic_input")


def _trials(noise, roles, num_trials, ratio=1.0):
    """Estimates of candidate against baseline from whole probes of a machine that is `noise`; a step is a block."""
    for seed in range(num_trials):
        course = noise(np.random.default_rng(seed))
        seconds = dict.fromkeys(roles, 0.3) | {"candidate": 0.3 / ratio}
        machine = Machine(seconds, course.__next__)
        result = machine.probe(num_blocks=24, max_seconds=24 * 0.3 * len(roles) * 4)
        yield speedup_ratio(result.rounds)


@pytest.mark.parametrize("noise", NOISE)
def test_identical_arms_are_rarely_called_different(noise):
    """The whole probe, early stopping included: at most 5 %. 800 trials: a single batch of 200 is mostly luck."""
    alarms = sum(bool(estimate.significant) for estimate in _trials(noise, TWO, 800))
    assert alarms <= 40


@pytest.mark.parametrize(
    "roles", [pytest.param(TWO, id="two arms"), pytest.param(SIX, id="six arms", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("noise", NOISE)
def test_interval_covers_what_is_true(noise, roles):
    """200 probes of arms that differ: at least 93 % of the intervals hold the true ratio, whatever else is measured."""
    covered = sum(estimate.low <= 1.3 <= estimate.high for estimate in _trials(noise, roles, 200, ratio=1.3))
    assert covered >= 0.93 * 200


@pytest.mark.parametrize("noise", [_student, *(pytest.param(noise, marks=pytest.mark.slow) for noise in NOISE[1:])])
def test_identical_arms_among_six_are_rarely_called_different(noise):
    """As many as 200 trials of identical arms, at most 5 % significant, with all the arms of a diagnosis."""
    assert sum(bool(estimate.significant) for estimate in _trials(noise, SIX, 200)) <= 10


def test_joules_of_a_sample_are_read_around_each_block_of_an_arm():
    machine, watts = Machine({"baseline": 0.01, "candidate": 0.005}), 64.0
    machine.runners = {
        role: replace(runner, joules=lambda: watts * machine.now) for role, runner in machine.runners.items()
    }
    rates = joules_per_sample(machine.probe(num_blocks=8, steps_per_block=10).rounds)
    assert rates == {"baseline": pytest.approx((0.02, 0.02, 0.02)), "candidate": pytest.approx((0.01, 0.01, 0.01))}
    stuck = replace(machine.runners["candidate"], joules=lambda: 5.0)  # a counter that is refreshed too rarely
    machine.runners = machine.runners | {"candidate": stuck}
    assert [*joules_per_sample(machine.probe(num_blocks=8).rounds)] == ["baseline"]
    assert joules_per_sample(Machine({"baseline": 0.01, "candidate": 0.01}).probe().rounds) == {}
    assert joules_per_sample(()) == {}


def test_a_lost_arm_is_left_out_with_its_reason_and_the_others_go_on():
    machine = Machine({"baseline": 0.1, "candidate": 0.05, "competent": 0.07})
    whole = machine.runners["competent"]
    calls = itertools.count()

    def run(num_steps):
        if next(calls) > 5:
            raise ArmLostError("its process ended")
        return whole.run(num_steps)

    machine.runners["competent"] = replace(whole, run=run)
    result = machine.probe(num_blocks=8)
    assert result.left_out == {"competent": "its process ended"}
    assert _order(result)[-2:] == ["bc", "cb"]
    assert len(result.rounds) == 8
    assert arm_ratio(result.rounds, "competent", "candidate").value == pytest.approx(1.4)


def test_an_arm_that_is_lost_in_its_warm_up_takes_no_part():
    machine = Machine({"baseline": 0.1, "candidate": 0.05, "competent": 0.07})

    def run(num_steps):
        raise ArmLostError("no memory")

    machine.runners["competent"] = replace(machine.runners["competent"], run=run)
    result = machine.probe()
    assert (result.left_out, result.others) == ({"competent": "no memory"}, {})
    assert _order(result)[:2] == ["bc", "cb"]


@pytest.mark.parametrize("slow_seconds", [0.0, 2.0, 12.0])
def test_the_competent_loop_takes_part_in_ten_rounds_after_the_warm_up(slow_seconds):
    arms = {"baseline": 0.1, "candidate": 0.1, "competent": 0.1}
    result, _ = SimulatedProbe(arms, slow_seconds=slow_seconds, noise=0.002).measure(num_blocks=40)
    assert bool(result.warm_up) == bool(slow_seconds)
    assert sum(block.arm == "competent" for blocks in result.rounds for block in blocks) == 10
    assert arm_ratio(result.rounds, "competent", "candidate").high is not None


def test_the_competent_loop_leaves_after_ten_rounds():
    noise = np.random.default_rng(0)
    machine = Machine({"baseline": 0.1, "candidate": 0.1, "competent": 0.1}, lambda: noise.normal(0, 0.001))
    result = machine.probe(num_blocks=24, target_half_width=1e-6)
    counts = [sum(block.arm == "competent" for block in blocks) for blocks in result.rounds]
    assert counts == [1] * 10 + [0] * 14


@pytest.mark.parametrize(("own", "plain", "ratio"), [(0.05, 0.05, 1.0), (0.1, 0.05, 0.5), (0.05, 0.1, 2.0)])
def test_a_slow_arm_of_ours_and_a_slow_competent_loop_are_told_apart(own, plain, ratio):
    noise = np.random.default_rng(5)
    machine = Machine({"baseline": 0.2, "candidate": own, "competent": plain}, lambda: noise.normal(0, 0.01))
    found = arm_ratio(machine.probe().rounds, "competent", "candidate")
    assert found.low <= ratio <= found.high
    assert (found.low > 1, found.high < 1) == (ratio > 1, ratio < 1)
