"""The competent loop next to a real training: measured, killed, on two ranks; the losses stay those of git."""

import json
from pathlib import Path

import psutil
import pytest

from paceline.tasks.train.competent.process import LOOP
from paceline.tasks.train.launch.coordinator import train_group
from tests.support.jobs import planted

GOLDEN = Path(__file__).parents[2] / "golden" / "digits.json"
PROBED = ("speedup.baseline=probe", "speedup.max_seconds=30", "speedup.num_blocks=6", "speedup.steps_per_block=2")
TRAINED = (  # settings that the probe cannot change
    "execution.checkpoint_steps=15",
    "recipe.augment=shift",
    "execution.memory_format=channels_last",
    "execution.loading=resident",
)
TWO = ("execution.num_devices=2", "execution.num_threads=1")


def running_loops():
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [
        command for command in commands if any(Path(word).name == LOOP.name and "competent" in word for word in command)
    ]


def arms_of(probe):
    return [{block.arm for block in blocks} for blocks in probe.rounds]


def test_the_loop_is_measured_and_changes_no_loss(make_job, cluster_address):
    result = train_group(make_job(*PROBED, *TRAINED), cluster_address)
    assert result.losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-3)
    probe = result.probe
    assert probe.left_out == {}
    assert arms_of(probe) == [{"baseline", "candidate", "competent"}] * 6
    assert probe.others["competent"].variant == "competent"
    assert probe.samples_per_step["competent"] == probe.samples_per_step["candidate"]
    costs = probe.competent
    assert min(costs.start_seconds, costs.build_seconds, *costs.evaluation_seconds, costs.record_seconds) > 0
    assert running_loops() == []


@pytest.mark.slow
def test_a_killed_loop_costs_its_ratio_and_nothing_else(make_job, cluster_address):
    with planted(cluster_address, "rank-0=0", LOOP_KILLED="6"):  # a job, two steps of warm-up, three blocks
        result = train_group(make_job(*PROBED, *TRAINED), cluster_address)
    assert result.losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-3)
    assert result.restarts == ()
    assert result.probe.left_out == {"competent": "its process ended"}
    assert len(result.probe.rounds) == 6
    assert arms_of(result.probe)[-1] == {"baseline", "candidate"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, "rank-1=5"])
def test_two_ranks_have_loops_of_one_group_and_lose_them_together(make_job, cluster_address, killed):
    with planted(cluster_address, killed and "rank-0=0", **{"LOOP_KILLED": killed} if killed else {}):
        result = train_group(make_job(*PROBED, *TWO), cluster_address)
    probe = result.probe
    arms = {"baseline", "candidate", "single", "all_cores"}
    assert arms_of(probe)[-1] == (arms if killed else arms | {"competent"})
    assert probe.left_out == ({"competent": "it failed on another rank"} if killed else {})
    assert probe.others["all_cores"].num_threads == 2
    assert running_loops() == []


def test_a_short_probe_has_no_loop(make_job, cluster_address):
    result = train_group(make_job("speedup.baseline=probe", "speedup.max_seconds=1"), cluster_address)
    assert arms_of(result.probe)[0] == {"baseline", "candidate"}
    assert result.probe.left_out == {}
