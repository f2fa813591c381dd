"""Goal 7 and unequal ranks: two gloo ranks of one thread against one; prints goal, value, interval, verdict.

infra/test -m benchmark tests/benchmarks/test_scaling.py -s          about 16 minutes on two quiet cores
"""

import json
import os
import sys
from pathlib import Path

import pytest

from paceline.tasks.host import keep_memory
from paceline.tasks.measure.paired_ratio import arm_ratio
from paceline.tasks.records.measurement import Block
from paceline.tasks.train.launch.coordinator import train_group
from tests.benchmarks.conftest import at_least, last_line, measure, tell
from tests.support.jobs import changed, planned_arm, planted

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
PRECISIONS = ("32-true", "bf16-mixed")
CELLS = (("weak", 256), ("weak", 128), ("strong", 256))
BAR = 0.93


@pytest.fixture(scope="module")
def job(make_job, cifar10_subset):
    """The CIFAR network on two ranks of one thread, with a minute and a half for each measurement."""
    settings = ["speedup.max_seconds=90", "speedup.num_blocks=1000", "speedup.target_half_width=0.01"]
    return make_job(
        "cifar10",
        f"data.root={cifar10_subset}",
        "execution.num_devices=2",
        "execution.num_threads=1",
        *settings,
    )


def pair(job, precision, scaling, batch_size):
    """One device at a batch, and two with as much each or as much together."""
    one = planned_arm(job, num_devices=1, precision=precision, batch_size=batch_size)
    each = batch_size if scaling == "weak" else batch_size // 2
    return one, one.model_copy(update={"num_devices": 2, "batch_size": each})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("scaling", "batch_size"), CELLS)
def test_two_ranks_against_one(job, cluster_address, precision, scaling, batch_size):
    one, two = pair(job, precision, scaling, batch_size)
    probe = measure(job, cluster_address, {"baseline": one, "candidate": two}).probe
    found = arm_ratio(probe.rounds, "baseline", "candidate")  # seconds per sample of one over those of two
    tell(
        f"goal 7, {precision}, {scaling}, batch {batch_size}: parallel efficiency of two ranks of one thread >= {BAR}",
        f"{found.value / 2:.3f} ({len(probe.rounds)} rounds, contaminated: {probe.validity.contaminated})",
        f"{found.low / 2:.3f} to {found.high / 2:.3f}",
        at_least(found.low / 2, found.high / 2, BAR),
    )


@pytest.mark.parametrize("batch_size", [256, 128])
def test_a_loop_by_hand(batch_size):
    """The peer: torchrun, the same network in fp32, random images, nothing else on the machine. No verdict."""
    program = [str(Path(__file__).with_name("bare_ddp.py")), str(batch_size), "90"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    environment = os.environ | keep_memory() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    printed = json.loads(last_line(command, environment))
    rounds = [[Block(**block) for block in blocks] for blocks in printed]
    found = arm_ratio(rounds, "baseline", "candidate")
    tell(
        f"goal 7, peer: torchrun and a loop by hand, 32-true, weak, batch {batch_size}",
        f"{found.value / 2:.3f} ({len(rounds)} rounds)",
        f"{found.low / 2:.3f} to {found.high / 2:.3f}",
        "for comparison",
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_where_it_goes(job, cluster_address, precision):
    """Two that compute side by side, that also wait for each other, that also exchange; and with fewer bits."""
    one, two = pair(job, precision, "weak", 128)
    arms = {"baseline": one, "candidate": two}
    arms |= {variant: two.model_copy(update={"variant": variant}) for variant in ("no_sync", "token_sync")}
    arms["compressed"] = two.model_copy(update={"gradient_compression": "bf16"})
    rounds = measure(job, cluster_address, arms).probe.rounds
    for role in ("no_sync", "token_sync", "candidate", "compressed"):
        found = arm_ratio(rounds, "baseline", role)
        value, low, high = (end / 2 for end in (found.value, found.low, found.high))
        print(f"{precision}, {role}: parallel efficiency {value:.3f}, {low:.3f} to {high:.3f}")


def test_a_slow_rank_with_measured_shares_against_even_ones(job, cluster_address):
    """A rank that sleeps 3 ms for each sample."""
    short = changed(
        job,
        recipe={"num_epochs": 1, "warmup_epochs": 0, "batch_size": 64},
        execution={"worker_load": "measured"},
    )
    with planted(cluster_address, "rank-1=0.003"):
        loads = train_group(short, cluster_address).worker_load
        even = planned_arm(short, batch_size=64)
        arms = {"baseline": even, "candidate": even.model_copy(update={"loads": loads})}
        probe = measure(short, cluster_address, arms).probe
    found = arm_ratio(probe.rounds, "baseline", "candidate")
    fast, slow = loads
    alone = fast / (fast + slow)
    tell(
        f"unequal ranks: throughput with measured shares ({alone:.2f}:{1 - alone:.2f}) / even ones > 1",
        f"{found.value:.2f}",
        f"{found.low:.2f} to {found.high:.2f}",
        at_least(found.low, found.high, 1.0),
    )
