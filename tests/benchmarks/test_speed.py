"""Goals 1 to 4 and 6: loading, the step, prediction, Lightning's own cost, hit rate; goal, value, interval, verdict.

infra/bench 1 2 3 4 6          about 30 minutes on two quiet cores, half of them in `test_two_heads.py`
"""

import pytest

from paceline.tasks.measure.paired_ratio import arm_ratio
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.train.launch.coordinator import train_group
from tests.benchmarks.conftest import SECONDS, at_least, at_most, in_a_rank, measure, tell
from tests.support.jobs import changed, planned_arm

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def jobs(make_job, cluster_address, cifar10_subset):
    """Jobs by preset, each trained for a moment, so that it has left the description of its rank."""
    made = {}

    def job(preset, *overrides):
        if (preset, overrides) not in made:
            root = [f"data.root={cifar10_subset}"] if preset == "cifar10" else []
            made[preset, overrides] = make_job(preset, "recipe.warmup_epochs=0", *root, *overrides)
            train_group(made[preset, overrides], cluster_address)
        return made[preset, overrides]

    return job


def told(goal, probe, bar, role="candidate"):
    found = arm_ratio(probe.rounds, "baseline", role)
    tell(
        f"{goal} >= {bar}",
        f"{found.value:.3f} ({len(probe.rounds)} rounds, contaminated: {probe.validity.contaminated})",
        f"{found.low:.3f} to {found.high:.3f}",
        at_least(found.low, found.high, bar),
    )


def measured(job, address, baseline):
    patient = changed(job, speedup={"max_seconds": SECONDS, "num_blocks": 1000, "target_half_width": 0.01})
    return measure(patient, address, {"baseline": baseline, "candidate": planned_arm(job)}).probe


def test_goal_1_loading(jobs, tmp_path):
    probe = in_a_rank(jobs("cifar10", "recipe.num_epochs=1"), "loading", tmp_path)
    told("goal 1, resident: augmented batches per second over a per-sample DataLoader's", probe, 10)
    told("goal 1, streaming: augmented batches per second over a per-sample DataLoader's", probe, 10, "streaming")


def test_goal_2_the_step(jobs, cluster_address):
    job = jobs("cifar10", "recipe.num_epochs=1")
    plain = planned_arm(job, precision="32-true", memory_format="contiguous", compile="off")
    told("goal 2: CIFAR training step over fp32, contiguous, eager", measured(job, cluster_address, plain), 1.7)


def test_goal_3_training(jobs, cluster_address):
    job = jobs("twohead", "recipe.num_epochs=2")
    told("goal 3: two-head training step over the plain fp32 loop", measured(job, cluster_address, BASELINE), 1.6)


@pytest.mark.parametrize("preset", ["twohead", "digits", "cifar10"])
def test_goal_3_prediction(jobs, tmp_path, preset):
    probe = in_a_rank(jobs(preset, f"recipe.num_epochs={1 if preset == 'cifar10' else 2}"), "prediction", tmp_path)
    told(f"goal 3, {preset}: prediction over the plain fp32 loop", probe, 3.5)


@pytest.mark.parametrize(("preset", "epochs"), [("twohead", 2), ("digits", 4), ("cifar10", 1)])
def test_goal_4_lightning(jobs, tmp_path, preset, epochs):
    probe = in_a_rank(jobs(preset, f"recipe.num_epochs={epochs}"), "loop", tmp_path)
    found = arm_ratio(probe.rounds, "baseline", "candidate")  # the loop by hand is as much faster
    tell(
        f"goal 4, {preset}: time of a step in our Lightning loop / in a loop by hand <= 1.03",
        f"{found.value:.3f} ({len(probe.rounds)} rounds, contaminated: {probe.validity.contaminated})",
        f"{found.low:.3f} to {found.high:.3f}",
        at_most(found.low, found.high, 1.03),
    )


def test_goal_6_hit_rate(make_job, cluster_address):
    """78 epochs of 41 steps, of which the last is ragged."""
    job = make_job("twohead", "recipe.num_epochs=78", "execution.compile=step")
    found = train_group(job, cluster_address).compile
    tell(
        "goal 6: hit rate of the compiled step on a ragged set >= 99.96 %, one graph",
        f"{100 * found.hit_rate:.3f} % of {found.num_calls} calls, {found.num_graphs} graphs, {found.seconds:.1f} s",
        "counted",
        "met" if found.hit_rate >= 0.9996 and found.num_graphs == 1 else "NOT MET",
    )
