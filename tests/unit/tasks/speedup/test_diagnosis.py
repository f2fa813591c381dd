"""Planted bottlenecks: a simulated machine whose step is made of known parts must get them named and sized."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.conf.config import Speedup
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.records.execution import BASELINE, Arm
from paceline.tasks.speedup.diagnosis import MIN_SHARE, diagnose
from paceline.tasks.speedup.verdict import speedup_result
from paceline.tasks.train.rank.benchmark import diagnostic_arms
from tests.support.evidence import SimulatedProbe
from tests.support.reports import make_probe, make_train

BATCH = 64


@dataclass(frozen=True)
class Machine:
    """What a step is made of, milliseconds; what grows with the batch is per sample."""

    arithmetic: float = 1.0
    input: float = 0.02
    launch: float = 1.0
    all_reduce: float = 1.0
    contention: float = 1.02
    """Slowness of arithmetic beside other devices that compute."""
    update: float = 0.0
    slowness: float = 0.0
    """Of each sample on the slow rank, and of each of its steps."""
    slow_step: float = 0.0
    slow_rank: int = 1

    def own(self, arm: Arm, rank: int) -> float:
        """Seconds of a rank that waits for no other."""
        size = arm.batch_size or BATCH
        together = self.contention if arm.num_devices > 1 else 1.0
        reading = 0.0 if arm.variant == "synthetic_input" else self.input * size
        updating = 0.0 if arm.variant == "no_update" else self.update
        waiting = self.slowness * size + self.slow_step if rank == self.slow_rank else 0.0
        return (self.arithmetic * size * together + self.launch + reading + updating + waiting) / 1000

    def step(self, arm: Arm) -> float:
        if arm.num_devices == 1 or arm.variant == "no_sync":
            return self.own(arm, 0)
        return max(self.own(arm, 0), self.own(arm, 1)) + self.all_reduce / 1000

    def probe(self, num_devices=2, noise=lambda: 0.0, **settings):
        candidate = BASELINE.model_copy(update={"num_devices": num_devices, "loading": "streaming"})
        arms = {
            "baseline": BASELINE,
            "candidate": candidate,
        } | diagnostic_arms(candidate, BATCH)
        if num_devices > 1:
            arms["single"] = arms.pop("alone")
        now = [0.0]

        def runner(arm):
            def run(num_steps):
                steps = [self.step(arm) * np.exp(noise()) for _ in range(num_steps)]
                now[0] += sum(steps)
                return steps

            def gather(own):
                return own, self.own(arm, 1) * np.exp(noise())

            apart = arm.variant == "no_sync"
            return ArmRunner(arm, run, (arm.batch_size or BATCH) * arm.num_devices, gather=gather if apart else None)

        runners = {role: runner(arm) for role, arm in arms.items()}
        return run_probe(runners, Speedup(**settings), clock=lambda: now[0])


def _noise(seed):
    """Heavy tails, drift, and bursts over neighbouring steps."""
    rng = np.random.default_rng(seed)
    slow = 0
    for number in itertools.count():
        slow = slow - 1 if slow else (rng.geometric(0.3) if rng.random() < 0.01 else 0)
        yield 0.02 * rng.standard_t(3) + 1e-5 * number + (0.4 if slow else 0.0)


PLANTED = [
    ("compute-bound", Machine(), 2),
    ("compute-bound", Machine(all_reduce=0.0, contention=1.0), 1),
    ("compute-bound", Machine(input=0.4, all_reduce=20.0, contention=1.3), 2),
    ("data-bound", Machine(input=1.6), 2),
    ("data-bound", Machine(input=1.2), 1),
    ("communication-bound", Machine(all_reduce=90.0), 2),
    ("contention", Machine(contention=2.5), 2),
    ("slow rank", Machine(slowness=2.0), 2),
    ("slow rank", Machine(slowness=2.0, slow_rank=0), 2),
    ("slow rank", Machine(slow_step=100.0), 2),
    ("update-bound", Machine(update=120.0), 1),
    ("update-bound", Machine(update=120.0), 2),
    ("launch-bound", Machine(arithmetic=0.02, launch=4.0, input=0.001, update=1.0), 1),
    ("launch-bound", Machine(arithmetic=0.02, launch=4.0, input=0.001, all_reduce=0.2), 2),
    ("launch-bound", Machine(arithmetic=0.02, launch=4.0, input=0.001), 1),
]


@pytest.mark.parametrize(("cause", "machine", "num_devices"), PLANTED)
def test_planted_bottleneck_is_named(cause, machine, num_devices):
    probe = machine.probe(num_devices, _noise(1).__next__)
    diagnosis = diagnose(probe)
    assert diagnosis.cause == cause
    assert len(diagnosis.sentences) == (7 if num_devices > 1 else 4)
    result = speedup_result(probe, make_train(None))
    # Without a bottleneck two devices pay, and one is the baseline with another loader.
    assert result.cause == (cause if cause != "compute-bound" or num_devices > 1 else "no measurable difference")
    assert "{" not in result.verdict


@pytest.mark.parametrize(("cause", "machine", "num_devices"), PLANTED)
def test_shares_are_those_planted(cause, machine, num_devices):
    shares = diagnose(machine.probe(num_devices)).shares
    step = machine.step(BASELINE.model_copy(update={"num_devices": num_devices})) * 1000
    truth = {"input": machine.input * BATCH / step, "overhead": machine.launch / step, "update": machine.update / step}
    if num_devices > 1:
        truth["imbalance"] = (machine.slowness * BATCH + machine.slow_step) / step
        truth["communication"] = machine.all_reduce / step
        truth["contention"] = machine.arithmetic * BATCH * (machine.contention - 1) / step
    truth["compute"] = machine.arithmetic * BATCH / step
    assert {name: share.value for name, share in shares.items()} == pytest.approx(truth, abs=1e-9)


def test_intervals_of_shares_cover():
    machine = Machine(input=0.3, all_reduce=20.0, contention=1.2, launch=5.0, update=10.0, slowness=0.3)
    truth = {name: share.value for name, share in diagnose(machine.probe()).shares.items()}
    missed = dict.fromkeys(truth, 0)
    for seed in range(200):
        for name, share in diagnose(machine.probe(noise=_noise(seed).__next__, steps_per_block=3)).shares.items():
            missed[name] += not share.low <= truth[name] <= share.high
    assert max(missed.values()) <= 0.07 * 200


def test_nothing_planted_is_rarely_called_a_bottleneck():
    machine = Machine(input=0.0, all_reduce=0.0, contention=1.0, launch=0.0)
    causes = [diagnose(machine.probe(noise=_noise(seed).__next__, steps_per_block=3)).cause for seed in range(200)]
    assert causes.count("compute-bound") >= 0.95 * 200


def test_small_shares_are_no_bottleneck():
    machine = Machine(launch=0.0, input=(MIN_SHARE - 0.03), all_reduce=0.0, contention=1.0)
    assert diagnose(machine.probe(1)).cause == "compute-bound"


def test_largest_bottleneck_is_named_and_said_first():
    diagnosis = diagnose(Machine(input=0.5, all_reduce=80.0).probe())
    assert diagnosis.cause == "communication-bound"
    assert diagnosis.lesser == ("data-bound",)
    assert diagnosis.sentences[0].startswith("Exchanging gradients takes 45% (45% to 45%) of a step")
    assert diagnosis.sentences[1].startswith("Waiting for input")
    assert diagnosis.sentences[-1].startswith("The rest")


def test_a_small_overhead_beside_much_arithmetic_is_no_launch_bound_step():
    """18 % do not shrink with the batch, 82 % are arithmetic: so it was with two layers of 2,048 units."""
    probe = Machine(arithmetic=0.82 / BATCH, launch=0.18, input=0.0).probe(1, _noise(1).__next__)
    diagnosis = diagnose(probe)
    assert (diagnosis.cause, diagnosis.lesser) == ("compute-bound", ("launch-bound",))
    verdict = speedup_result(probe.model_copy(update={"baseline": BASELINE, "rounds": _faster(probe)})).verdict
    assert "the step is compute-bound, the rest, 8" in verdict
    assert "what else does not shrink with the batch, takes 1" in verdict


def _faster(probe):
    """Rounds in which the baseline takes twice as long."""
    slow = {"baseline": 2.0}
    return tuple(
        tuple(
            block.model_copy(update={"seconds_per_sample": block.seconds_per_sample * slow.get(block.arm, 1.0)})
            for block in blocks
        )
        for blocks in probe.rounds
    )


def test_a_probe_without_such_arms_has_no_diagnosis():
    assert diagnose(make_probe()) is None
    assert diagnose(make_probe(candidate=BASELINE.model_copy(update={"num_devices": 2}), efficiency=0.9)) is None


def test_too_few_rounds_have_shares_and_no_cause():
    diagnosis = diagnose(Machine(input=0.8).probe(max_seconds=1e-3))
    assert diagnosis.cause is None
    assert diagnosis.shares["input"].low is None
    assert diagnosis.shares["input"].value == pytest.approx(0.43, abs=0.01)


def test_one_device_at_another_batch_shows_no_contention():
    probe = Machine(contention=1.5).probe()
    samples = probe.samples_per_step | {"single": 2 * BATCH}  # strong scaling: the whole batch on one device
    assert "contention" not in diagnose(probe.model_copy(update={"samples_per_step": samples})).shares


def test_measured_bottleneck_goes_before_presumed_ones_and_after_contamination():
    probe = Machine(input=1.6).probe()
    tiny = make_train(None, seconds=1.0, startup_seconds=5.0, data_wait_fraction=0.0)
    result = speedup_result(probe, tiny)
    assert result.cause == "data-bound"
    assert "waiting for input takes 60% (60% to 60%) of a step" in result.verdict
    assert speedup_result(Machine().probe(), tiny).cause == "too small"
    # What was measured replaces the threshold on waiting for data.
    assert speedup_result(Machine().probe(), make_train(None, data_wait_fraction=0.9)).cause == "compute-bound"
    contaminated = probe.validity.model_copy(update={"contaminated": True, "reasons": ("planted",)})
    marked = speedup_result(probe.model_copy(update={"validity": contaminated}))
    assert (marked.cause, marked.contaminated) == ("contaminated machine", True)


def test_result_carries_shares_sentences_and_validity():
    probe = Machine(input=0.8).probe()
    result = speedup_result(probe)
    names = {"input", "communication", "imbalance", "contention", "update", "overhead", "compute"}
    assert set(result.shares) == names
    assert result.shares["input"] == pytest.approx((0.43, 0.43, 0.43), abs=0.01)
    assert result.diagnosis == diagnose(probe).sentences
    assert result.validity == probe.validity
    assert type(result).model_validate_json(result.model_dump_json()) == result


def test_the_whole_batch_on_one_device_tells_the_efficiency_and_its_own_batch_the_contention():
    """Under strong scaling: what is measured of limits changes nothing of what efficiency is."""
    probe = Machine(contention=1.5).probe()
    whole = probe.samples_per_step | {"single": 2 * BATCH}
    rounds = tuple(
        (*blocks, *(block.model_copy(update={"arm": "alone"}) for block in blocks if block.arm == "single"))
        for blocks in probe.rounds
    )
    both = {"samples_per_step": whole | {"alone": BATCH}, "rounds": rounds}
    both["others"] = probe.others | {"alone": probe.others["single"]}
    found = diagnose(probe.model_copy(update=both)).shares["contention"]
    assert found.value == pytest.approx(diagnose(probe).shares["contention"].value)
    arms = diagnostic_arms(probe.candidate, BATCH)
    assert "single" not in arms
    assert (arms["alone"].num_devices, arms["alone"].batch_size) == (1, BATCH)


def test_two_layers_of_2048_units_at_256_samples_are_arithmetic_and_their_update_is_named():
    """Of the 18 % that did not shrink with the batch, most was the update; the verdict called it launch-bound."""
    machine = Machine(arithmetic=0.82 / BATCH, launch=0.03, update=0.15, input=0.0)
    probe = machine.probe(1, _noise(1).__next__)
    diagnosis = diagnose(probe)
    assert (diagnosis.cause, diagnosis.lesser) == ("compute-bound", ("update-bound",))
    verdict = speedup_result(probe.model_copy(update={"rounds": _faster(probe)})).verdict
    assert "the step is compute-bound, the rest, 8" in verdict
    assert "updating the weights takes 15% (" in verdict
    assert "launch" not in verdict


@pytest.mark.parametrize("rank", [0, 1])
def test_the_slow_rank_is_named(rank):
    probe = Machine(slowness=2.0, slow_rank=rank).probe()
    result = speedup_result(probe)
    assert f"a rank is slow, the others wait for rank {rank} for 6" in result.verdict
    assert f"The others wait for rank {rank} for 6" in result.diagnosis[0]
    assert Machine(slowness=2.0, slow_rank=rank).probe().rounds[0][0].rank_seconds == ()


def test_a_probe_from_before_the_ranks_times_were_recorded_shows_the_exchange_with_the_wait():
    probe = Machine(slowness=2.0).probe()
    rounds = tuple(tuple(b.model_copy(update={"rank_seconds": ()}) for b in blocks) for blocks in probe.rounds)
    others = {role: arm for role, arm in probe.others.items() if role != "half_batch"}
    old = probe.model_copy(update={"rounds": rounds, "others": others})
    assert diagnose(old).cause == "communication-bound"
    assert "imbalance" not in diagnose(old).shares


def test_a_largest_share_that_is_not_clear_is_not_replaced_by_another():
    """Half of the step was contention, by an interval from 0; the verdict called it compute-bound."""
    noise = np.random.default_rng(4)
    probe = Machine(contention=2.5).probe(noise=lambda: float(noise.normal(0, 1.0)), max_seconds=4.0, steps_per_block=1)
    found = diagnose(probe)
    largest = max(found.shares, key=lambda name: found.shares[name].value)
    assert largest != "compute"
    assert (found.cause, found.shares[largest].low) == ("undecided", 0.0)
    result = speedup_result(probe)
    assert result.bottleneck == "undecided"


def test_a_competent_loop_that_comes_back_after_the_warm_up_changes_no_share():
    """It left after ten rounds, and returned when these turned out to be warm-up: the last round has it, not all do."""
    arms = {"baseline": 0.1, "candidate": 0.06, "synthetic_input": 0.03, "competent": 0.05}
    probe, _ = SimulatedProbe(arms, slow_seconds=12.0, noise=0.005).measure(num_blocks=24)
    counts = ["competent" in {block.arm for block in blocks} for blocks in probe.rounds]
    assert counts[-1]
    assert not all(counts)
    assert diagnose(probe).shares["input"].value == pytest.approx(0.5, abs=0.02)
