"""The referee's simulations, with other seeds: python -m tests.benchmarks.simulate_intervals [SECTION ...].

Prints, for each section, shares with their upper (or lower) 95 % confidence bounds, and the seconds that it took on one
core. Simulated times only: it may run on a busy machine.
"""

import itertools
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np
from scipy import stats

from paceline.conf.load import load
from paceline.tasks.measure import paired_ratio
from paceline.tasks.measure import probe as probe_module
from paceline.tasks.measure.carry_over import allow_for, carry_over
from paceline.tasks.measure.paired_ratio import (
    FIXED_CONFIDENCE,
    Interval,
    estimate_ratio,
    location_interval,
    look_confidence,
    planned_looks,
    signed_rank_depth,
    speedup_ratio,
)
from paceline.tasks.measure.probe import ArmRunner
from paceline.tasks.measure.warm_up import num_warm_up
from paceline.tasks.records.measurement import Block, Validity
from paceline.tasks.speedup.between_starts import across_starts
from paceline.tasks.speedup.study.inference import FAMILY_LEVEL, MARGIN, adjust, holds_parity, parity
from paceline.tasks.train.autotune import search
from paceline.tasks.train.autotune.choice import best_role, choose
from paceline.tasks.train.plan import arm_of, resolve
from tests.support.noise import NOISE, autoregressive, log_ratios_of
from tests.support.simulated_machine import Machine
from tests.support.spent_error import spent_error
from tests.support.studies import HARDWARE

SEED = 2511
PLAN = 24
TARGET = 0.02


def at_most(count, trials):
    """Upper end of the one-sided 95 % interval of a share (Clopper and Pearson 1934)."""
    return 1.0 if count == trials else float(stats.beta.ppf(0.95, count + 1, trials - count))


def share(count, trials):
    return f"{count / trials:.3f} (at most {at_most(count, trials):.3f})"


def coverage(count, trials):
    return f"{count / trials:.3f} (at least {1 - at_most(trials - count, trials):.3f})"


def spent_by_simulation(looks, trials=100_000):
    """The same for longer plans, where the signs are too many to enumerate."""
    rng, missed, batch = np.random.default_rng(SEED), 0, 2000
    for _ in range(trials // batch):
        values = rng.normal(size=(batch, looks[-1]))
        alive = np.ones(batch, bool)
        for count in looks:
            ranks = np.abs(values[:, :count]).argsort(axis=1).argsort(axis=1) + 1
            sums = np.where(values[:, :count] > 0, ranks, 0).sum(axis=1)
            depth = signed_rank_depth(count, look_confidence(count))
            alive &= (sums >= depth) & (sums <= count * (count + 1) // 2 - depth)
        missed += int(np.sum(~alive))
    return missed, trials


def spending():
    """Error that all looks together spend, as the plan declares it."""
    cumulative = {last: spent_error(planned_looks(PLAN), last) for last in (8, 10, 12, 16, 20, 24)}
    print(f"looks {list(planned_looks(PLAN))}: { {last: round(value, 4) for last, value in cumulative.items()} }")
    odd = max(spent_error(planned_looks(PLAN), last) for last in range(9, PLAN, 2))
    print(f"most with a last look after an odd number of rounds, when time is up: {odd:.4f}")
    wider = mixture(PLAN) / stats.norm.ppf(0.99)
    print(f"normal mixture at {PLAN} rounds over a level of 98 %: {wider:.2f} times as wide")
    for plan in (12, 40, 100, 300):
        looks = planned_looks(plan)
        every = sorted({*looks, plan})
        print(f"plan of {plan}: looks {every}: {share(*spent_by_simulation(every))}")


def mixture(num_rounds):
    """Half-width of the normal mixture at a known variance, in standard errors (Howard et al. 2021)."""
    ends = []
    for prior in np.arange(0.2, 60, 0.1):
        total = num_rounds + prior
        ends.append(np.sqrt(total / num_rounds * (2 * np.log(20) + np.log(total / prior))))
    return min(ends)


def _percentile(values, reduce):
    picks = np.random.default_rng(1).integers(0, values.shape[1], (400, values.shape[1]))
    return np.quantile(reduce(values[:, picks], axis=2), [0.025, 0.975], axis=1)


def _student(values):
    reach = stats.t.ppf(0.975, values.shape[1] - 1) * values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])
    return values.mean(axis=1) - reach, values.mean(axis=1) + reach


def _widened(values):
    found = [estimate_ratio(row) for row in values]
    return np.log([one.low for one in found]), np.log([one.high for one in found])


def _before(values):
    """The rule until November 2026: 98 % at each look, widened by any autocorrelation."""
    with (
        mock.patch.object(paired_ratio, "look_confidence", return_value=0.98),
        mock.patch.object(paired_ratio, "USUAL_AUTOCORRELATION", 0.0),
    ):
        return _widened(values)


METHODS = {
    "percentile bootstrap of the mean": lambda values: _percentile(values, np.mean),
    "percentile bootstrap of the median": lambda values: _percentile(values, np.median),
    "Student t over rounds": _student,
    "signed rank, level 95 %": lambda values: location_interval(values, FIXED_CONFIDENCE)[1:],
    "signed rank, level 98 %": lambda values: location_interval(values, 0.98)[1:],
    "the same, widened by autocorrelation": _before,
    "this module": _widened,
}


def stop(method, values, looks):
    """Low and high ends, and rounds, at the moment when the probe would stop."""
    low, high, rounds = (np.zeros(len(values)) for _ in range(3))
    going = np.ones(len(values), bool)
    for number in sorted({*looks, values.shape[1]}):
        ends = method(values[going, :number])
        stops = (np.exp(ends[1]) - np.exp(ends[0])) / 2 <= TARGET
        stops |= number == values.shape[1]
        chosen = np.flatnonzero(going)[stops]
        low[chosen], high[chosen], rounds[chosen] = ends[0][stops], ends[1][stops], number
        going[chosen] = False
    return low, high, rounds


def methods(trials=1000):
    """Coverage of each method, the worst of all kinds of noise."""
    for name, method in METHODS.items():
        worst = {}
        for number in (6, 8, 12, 24, "stopped early"):
            covered = {}
            for index, (kind, noise) in enumerate(NOISE.items()):
                rounds = PLAN if number == "stopped early" else number
                values = log_ratios_of(noise(np.random.default_rng([SEED, index]), (trials, 2 * rounds)))
                looks = planned_looks(PLAN) if number == "stopped early" else ()
                low, high, _ = stop(method, values, looks) if looks else (*method(values), rounds)
                covered[kind] = float(np.mean((low <= 0) & (high >= 0)))
            kind = min(covered, key=covered.get)
            worst[number] = f"{covered[kind]:.3f} ({kind})"
        print(f"{name}: {worst}", flush=True)


def price(trials=500):
    """Width and rounds until the stop, over those of the rule before, on the same values."""
    for index, (kind, noise) in enumerate(NOISE.items()):
        values = log_ratios_of(noise(np.random.default_rng([SEED, 10, index]), (trials, 2 * PLAN)))
        widths, rounds = [], []
        for number in (8, 12, PLAN):
            now, then = (method(values[:, :number]) for method in (_widened, _before))
            widths.append(f"{np.mean(now[1] - now[0]) / np.mean(then[1] - then[0]):.3f}")
        for method in (_widened, _before):
            low, high, stopped = stop(method, values, planned_looks(PLAN))
            rounds.append(f"{np.mean(stopped):.1f} rounds, half-width {np.mean(high - low) / 2:.4f}")
        print(
            f"{kind}: width x {', '.join(widths)} at 8, 12, 24 rounds; stops: {'; before: '.join(rounds)}", flush=True
        )


def _probe(noise, step_seconds=None, transient=None, **settings):
    """A probe on the simulated machine with one step a block; `transient` multiplies the times of the first rounds."""
    machine = Machine(step_seconds or {"baseline": 0.3, "candidate": 0.3}, noise)
    if transient is not None:
        machine.runners = {role: _slow_at_first(runner, *transient[role]) for role, runner in machine.runners.items()}
    return machine.probe(**{"num_blocks": PLAN, "max_seconds": 1000.0, "steps_per_block": 1, **settings})


def _slow_at_first(runner, factor, num_steps):
    done = itertools.count()
    run = runner.run

    def slow(number):
        return [second * (factor if next(done) < num_steps else 1.0) for second in run(number)]

    return ArmRunner(runner.arm, slow, runner.samples_per_step)


def course(kind, rng):
    values = iter(NOISE[kind](rng, (1, 4 * PLAN + 40))[0])
    return values.__next__


def probes(trials=1000):
    """Whole probes of equal arms: what is called different, rounds until the stop, and width, by kind of noise."""
    for index, kind in enumerate(NOISE):
        rng = np.random.default_rng([SEED, 1, index])
        found = [_probe(course(kind, rng)) for _ in range(trials)]
        effects = [carry_over(one.rounds, "baseline", "candidate") for one in found]
        ratios = [allow_for(speedup_ratio(one.rounds), effect) for one, effect in zip(found, effects, strict=True)]
        widths = [ratio.half_width for ratio in ratios if ratio.half_width is not None]
        rounds = np.mean([len(one.warm_up) + len(one.rounds) for one in found])
        carried = np.mean([effect is not None and effect.significant for effect in effects])
        different = share(sum(bool(ratio.significant) for ratio in ratios), trials)
        print(
            f"{kind}: different {different}; rounds {rounds:.1f}, "
            f"half-width {np.mean(widths):.4f}, without interval {trials - len(widths)}; warm-up in "
            f"{np.mean([bool(one.warm_up) for one in found]):.3f}, carry-over in {carried:.3f}",
            flush=True,
        )


def autocorrelation(trials=1500):
    """Coverage under the stopping rule when neighbouring ratios are alike."""
    for name, correlation, drift in [*((str(r), r, 0.0) for r in (0.0, 0.25, 0.35, 0.5)), ("drift of 3 %", 0.0, 0.03)]:
        rng = np.random.default_rng([SEED, 2])
        values = autoregressive(rng, (trials, PLAN), correlation) + np.linspace(-drift / 2, drift / 2, PLAN)
        for method in ("signed rank, level 98 %", "the same, widened by autocorrelation", "this module"):
            low, high, rounds = stop(METHODS[method], values, planned_looks(PLAN))
            print(
                f"{name}, {method}: {coverage(int(np.sum((low <= 0) & (high >= 0))), trials)}, {np.mean(rounds):.1f} "
                f"rounds, half-width {np.mean(high - low) / 2:.4f}",
                flush=True,
            )


def warm_up(trials=500):
    """A transient of 25 % in one arm and 15 % in the other over the first rounds, of 8 and of up to 24."""
    for plan, slow, trimmed in itertools.product((8, PLAN), (2, 4, 6), (False, True)):
        rng, covered, withheld, dropped = np.random.default_rng([SEED, 3, slow]), 0, 0, []
        transient = {"baseline": (1.25, 2 + slow), "candidate": (1.15, 2 + slow)}
        for _ in range(trials):
            with mock.patch.object(probe_module, "num_warm_up", num_warm_up if trimmed else lambda rounds: 0):
                probe = _probe(lambda rng=rng: rng.normal(0, 0.02), transient=transient, num_blocks=plan)
            ratio = speedup_ratio(probe.rounds)
            withheld += ratio.low is None
            covered += ratio.low is not None and ratio.low <= 1 <= ratio.high
            dropped.append(len(probe.warm_up))
        print(
            f"plan of {plan}, first {slow} rounds slow, {'trimmed' if trimmed else 'not trimmed'}: covers {covered}, "
            f"no interval {withheld}, of {trials}; rounds dropped {np.mean(dropped):.1f}",
            flush=True,
        )


def carry(trials=500):
    """The candidate takes longer when it runs after the baseline; blocks scatter by 1 %, the machine slowly by 2 %."""
    for extra in (0.0, 0.01, 0.02, 0.04):
        rng, seen, covered, plain, biases = np.random.default_rng([SEED, 4]), 0, 0, 0, []
        for _ in range(trials):
            logs = autoregressive(rng, (1, 2 * PLAN), 0.95, 0.02)[0].reshape(PLAN, 2) + rng.normal(0, 0.01, (PLAN, 2))
            logs[::2, 1] += extra
            rounds = []
            for number, pair in enumerate(logs):
                arms = ("candidate", "baseline") if number % 2 else ("baseline", "candidate")
                seconds = [float(np.exp(log)) for log in pair]
                rounds.append(
                    [
                        Block(arm=arm, seconds_per_sample=one, num_steps=1)
                        for arm, one in zip(arms, seconds, strict=True)
                    ]
                )
            effect, ratio = carry_over(rounds, "baseline", "candidate"), speedup_ratio(rounds)
            seen += effect.significant
            biases.append(effect.bias)
            wide = allow_for(ratio, effect)
            plain, covered = plain + (ratio.low <= 1 <= ratio.high), covered + (wide.low <= 1 <= wide.high)
        print(
            f"{extra:.0%} extra: significant {seen / trials:.3f}, bias {np.mean(biases):+.4f}; covers "
            f"{plain / trials:.3f}, with the allowance {coverage(covered, trials)}",
            flush=True,
        )


def starts(trials=3000):
    """Coverage of the true ratio by the interval across starts, and within the process, round noise 2 %."""
    for process_sd, earlier in itertools.product((0.005, 0.01, 0.02, 0.03), (4, 10)):
        rng, covered, alone = np.random.default_rng([SEED, 5]), 0, 0
        for _ in range(trials):
            *before, own = (_one_start(rng, process_sd) for _ in range(earlier + 1))
            wide = across_starts(own, [start.value for start in before])
            covered += wide.low <= 1 <= wide.high
            alone += own.low <= 1 <= own.high
        print(
            f"process sd {process_sd:.1%}, {earlier} earlier starts: {coverage(covered, trials)}; within the process "
            f"{alone / trials:.3f}",
            flush=True,
        )


def _one_start(rng, process_sd) -> Interval:
    values = rng.normal(0, process_sd) + rng.normal(0, 0.02, PLAN)
    for number in planned_looks(PLAN):
        found = estimate_ratio(values[:number])
        if found.half_width <= TARGET:
            break
    return found


def equal_arms(trials=400):
    """Equal arms in the search of `auto`: how often it departs from the rules."""
    for copy_sd, number in itertools.product((0.0, 0.005, 0.02), (1, 3, 5)):
        rng, departed = np.random.default_rng([SEED, 6]), 0
        roles = ["candidate", "baseline", *(f"other {index}" for index in range(1, number))]
        for _ in range(trials):
            seconds = {role: 0.3 * np.exp(rng.normal(0, copy_sd)) for role in roles}
            settings = {"target_half_width": search.HALF_WIDTH, "num_blocks": search.MAX_ROUNDS}
            probe = _probe(lambda rng=rng: rng.normal(0, 0.01), seconds, **settings)
            departed += best_role(probe, 0.0, 1000) is not None
        print(f"{number} equal arms, {copy_sd:.1%} per copy: departs {share(departed, trials)}", flush=True)
    plan = resolve(load("digits"), HARDWARE, 1293)
    for copy_sd in (0.0, 0.005, 0.02):
        rng, departed = np.random.default_rng([SEED, 7]), 0
        with mock.patch.object(search, "has_compiler", return_value=False):
            for _ in range(trials):
                found = search.autotune(_equal_bench(rng, copy_sd), plan, 100_000, None)
                departed += arm_of(choose(plan, found, arm_of(plan), 100_000)) != arm_of(plan)
        print(f"a complete search, {copy_sd:.1%} per copy: departs {share(departed, trials)}", flush=True)


def _equal_bench(rng, copy_sd):
    offsets = {}

    def runner(stack: ExitStack, arm, ready=None):
        offset = offsets.setdefault(arm, rng.normal(0, copy_sd))

        def run(number):
            return [0.01 * np.exp(offset + rng.normal(0, 0.01))] * number

        return ArmRunner(arm, run, arm.batch_size or 64)

    watch = SimpleNamespace(stop=Validity)
    return SimpleNamespace(runner=runner, left_out=lambda arms: {}, watch=lambda: watch, samples_per_device=64)


def studies(trials=10_000):
    """Any false "significant" among the arms of a study, which share their baseline."""
    draws = {
        "normal": lambda rng, shape: rng.normal(0, 0.02, shape),
        "t": lambda rng, shape: 0.02 * rng.standard_t(3, shape),
    }
    for (name, draw), arms, repeats in itertools.product(draws.items(), (7,), (3, 6)):
        rng, false = np.random.default_rng([SEED, 8]), 0
        for _ in range(trials):
            times = draw(rng, (arms, repeats))
            logs = {str(arm): list(times[arm] - times[0]) for arm in range(1, arms)}
            false += min(adjust(logs).values()) <= FAMILY_LEVEL
        print(f"{arms} arms, {repeats} repeats, {name}: {share(false, trials)}", flush=True)


def equivalence(trials=2000):
    """Parity at a true loss of twice the margin, and of nothing; the test samples are the same in all repeats."""
    for loss, samples, repeats in itertools.product((2 * MARGIN, MARGIN, 0.0), (360, 2000, 10_000), (1, 3, 6)):
        rng, passed = np.random.default_rng([SEED, 9]), 0
        for _ in range(trials):
            lost, gained = rng.binomial(samples, 0.02 + loss), rng.binomial(samples, 0.02)
            pairs = []
            for _ in range(repeats):
                seeds = round(rng.normal(0, 0.003) * samples)
                extra = rng.binomial(samples, 0.01, 2)
                pairs.append((gained + extra[0] + max(0, seeds), lost + extra[1] + max(0, -seeds), samples))
            passed += holds_parity(parity(pairs)[1])
        print(f"true loss {loss:.0%}, {samples} samples, {repeats} repeats: passes {share(passed, trials)}", flush=True)


SECTIONS = (spending, methods, price, probes, autocorrelation, warm_up, carry, starts, equal_arms, studies, equivalence)

if __name__ == "__main__":
    for section in SECTIONS:
        if len(sys.argv) == 1 or section.__name__ in sys.argv[1:]:
            print(f"# {section.__name__}: {section.__doc__.splitlines()[0]}", flush=True)
            started = time.process_time()
            section()
            print(f"{section.__name__}: {time.process_time() - started:.0f} s\n", flush=True)
