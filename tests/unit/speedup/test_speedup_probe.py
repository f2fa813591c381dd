import os
import subprocess
import threading
import time

import numpy as np
import pytest

from conf.schema import Speedup
from tasks.errors import RunError
from tasks.records import Arm
from tasks.speedup.contamination import CpuWatch
from tasks.speedup.probe import ArmRunner, run_probe
from tasks.speedup.statistics import speedup_ratio

ARM = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="foreground")


class Machine:
    """Arms whose steps take simulated time."""

    def __init__(self, step_seconds, noise=lambda: 0.0, warmup=()):
        self.now, self.calls, self.noise = 0.0, [], noise
        self.left = {role: list(warmup) for role in step_seconds}
        self.runners = {role: self._runner(role, seconds) for role, seconds in step_seconds.items()}

    def _runner(self, role, seconds):
        def run(num_steps):
            self.calls.append((role, num_steps))
            steps = [
                (self.left[role].pop(0) if self.left[role] else seconds * np.exp(self.noise()))
                for _ in range(num_steps)
            ]
            self.now += sum(steps)
            return steps

        return ArmRunner(arm=ARM, run=run, samples_per_step=32)

    def probe(self, agree=lambda value: value, **settings):
        return run_probe(self.runners, Speedup(**settings), agree=agree, clock=lambda: self.now)


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


def test_three_arms_alternate_too():
    result = Machine({"single": 0.1, "candidate": 0.05, "baseline": 0.1}).probe(num_blocks=4)
    assert _order(result) == ["bcs", "scb", "bcs", "scb"]
    assert result.stopped_because == "all blocks done"


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


@pytest.mark.parametrize("steps", [[], [0.0], [float("nan")], [-1.0]])
def test_impossible_times_are_refused(steps):
    runner = ArmRunner(arm=ARM, run=lambda num_steps: steps, samples_per_step=1)
    with pytest.raises(RunError, match="arm baseline took"):
        run_probe({"baseline": runner, "candidate": runner}, Speedup())


def test_all_ranks_decide_alike_although_their_clocks_differ():
    num_ranks = 3
    barrier = threading.Barrier(num_ranks, timeout=20)
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
        results[rank] = machine.probe(agree=agree_of(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is not None
    assert results[0] == results[1] == results[2]


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


@pytest.mark.parametrize("noise", [_student, _bursts, _autocorrelated])
def test_identical_arms_are_rarely_called_different(noise):
    """The whole probe, early stopping included: at most 5 %. Four batches of 200: a single one is mostly luck."""
    alarms = 0
    for seed in (batch * 10_000 + trial for batch in range(4) for trial in range(200)):
        course = noise(np.random.default_rng(seed))
        machine = Machine({"baseline": 0.3, "candidate": 0.3}, course.__next__)  # a step is a block
        alarms += bool(speedup_ratio(machine.probe(num_blocks=24).rounds).significant)
    assert alarms <= 40


def test_own_work_is_not_foreign():
    # Two watches over the same time differ by this process's work, whatever else the machine does meanwhile.
    with subprocess.Popen(["sleep", "30"]) as idle:
        ours, theirs = CpuWatch([os.getpid()]), CpuWatch([idle.pid])
        started, worked = time.perf_counter(), time.process_time()
        while time.process_time() - worked < 0.5:
            pass
        own = ours.stop().foreign_load
        share = (time.process_time() - worked) / (time.perf_counter() - started)
        foreign = theirs.stop().foreign_load
        idle.kill()
    assert foreign >= share - 0.2
    assert foreign - own == pytest.approx(share, abs=0.2)


def test_work_of_strangers_is_seen_and_nobody_is_nobody():
    watch = CpuWatch([])
    time.sleep(0.05)
    assert watch.stop().foreign_load is None  # without own processes there is no telling
    assert CpuWatch([2**22 + 1]).stop().foreign_load is None
