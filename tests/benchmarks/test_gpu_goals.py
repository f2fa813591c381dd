"""Goals A to D and F, on one GPU; prints goal, value, interval, verdict, and skips itself without one.

infra/bench A B C D F          about 10 minutes on one H200

Warm-up comes first and does not count. A training of one epoch in a process of its own fills the caches on disk. Then,
in the process that is timed, a short probe loads kernels and libraries and lets cuDNN choose its algorithms. The source
of a goal times neither checkpoints (A and B) nor validation (B): two figures are printed, with and without them.
"""

import json
from pathlib import Path

import pytest

from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.measure.paired_ratio import arm_ratio
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.speedup.limit_share import limit_share
from paceline.tasks.train.launch.coordinator import train_group
from tests.benchmarks.conftest import SECONDS, at_least, at_most, in_a_rank, measure, said_in_a_rank, tell
from tests.support.jobs import changed, planned_arm

pytestmark = [pytest.mark.timeout(1800), pytest.mark.gpu]

REPEATS = 3
MATHWORKS_ACCURACY = 0.8972
NINETY_FOUR = 0.94
ON_GPU = ("execution.accelerator=gpu", "speedup.baseline=none")
WARM_UP = ("speedup.baseline=probe", "speedup.max_seconds=5")


@pytest.fixture(scope="module")
def job(make_job, cluster_address, cifar10_jpeg_root):
    """Builds jobs whose steps `auto` may choose, after a training that has warmed up drivers and caches."""

    def build(preset, *overrides):
        root = [f"data.root={cifar10_jpeg_root}"] if preset.startswith("cifar10") else []
        built = make_job(preset, *ON_GPU, *root, *overrides)
        train_group(changed(built, recipe={"num_epochs": 1, "warmup_epochs": 0}), cluster_address)
        return built

    return build


def accuracy_of(job, result):
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    return evaluate_predictions(result.predictions, truth, result.prediction_samples_per_second).accuracy


def told_trainings(goal, job, address, seconds_bar, accuracy_bar, excluded):
    """Trainings: seconds from the first step to the end of the last epoch, and the accuracy on the test split."""
    results = [train_group(job, address) for _ in range(REPEATS)]
    accuracies = sorted(accuracy_of(job, result) for result in results)
    for words, items in ((f" without {' and '.join(excluded)}", excluded), ("", ())):
        times = [result.seconds - sum(result.time_budget.get(item, 0.0) for item in items) for result in results]
        told_seconds(f"{goal}: training{words}", times, seconds_bar, planned_arm(job).label)
    tell(
        f"{goal}: accuracy >= {accuracy_bar}",
        f"{accuracies[REPEATS // 2]:.4f}",
        f"{accuracies[0]:.4f} to {accuracies[-1]:.4f}, {REPEATS} trainings",
        at_least(accuracies[0], accuracies[-1], accuracy_bar),
    )


def told_seconds(goal, seconds, bar, how):
    seconds = sorted(seconds)
    tell(
        f"{goal} <= {bar} s",
        f"{seconds[len(seconds) // 2]:.3f} s ({how})",
        f"{seconds[0]:.3f} to {seconds[-1]:.3f}, {len(seconds)} trainings, warmed up",
        at_most(seconds[0], seconds[-1], bar),
    )


@pytest.mark.parametrize("mode", ["off", "graph", "step"])
def test_goal_a_the_recipe(job, cluster_address, mode):
    built = job("cifar10", f"execution.compile={mode}", *WARM_UP)
    goal = f"goal A, compile {mode}: 60 epochs of CIFAR-10"
    told_trainings(goal, built, cluster_address, 12, MATHWORKS_ACCURACY, ("checkpoint",))


@pytest.mark.parametrize(
    ("preset", "seconds_bar", "accuracy_bar"), [("cifar10_fast", 4, MATHWORKS_ACCURACY), ("cifar10_94", 3, NINETY_FOUR)]
)
@pytest.mark.parametrize("mode", ["off", "graph"])
def test_goal_b_the_fast_recipes(job, cluster_address, preset, seconds_bar, accuracy_bar, mode):
    built = job(preset, f"execution.compile={mode}", *WARM_UP)
    goal, excluded = f"goal B, {preset}, compile {mode}", ("checkpoint", "validation")
    told_trainings(goal, built, cluster_address, seconds_bar, accuracy_bar, excluded)


def test_goal_c_the_whole_step_as_a_graph(job, cluster_address):
    built = changed(job("twohead"), speedup={"max_seconds": SECONDS, "num_blocks": 1000, "target_half_width": 0.01})
    eager = planned_arm(built, compile="off")
    captured = planned_arm(built, compile="graph")
    probe = measure(built, cluster_address, {"baseline": eager, "candidate": captured}).probe
    told_ratio("goal C: step as a graph over the eager one", probe, 5)


def test_goal_c_3120_steps(job, cluster_address):
    """Ten thousand samples less the validation and test splits, in batches of 32: the steps are counted."""
    built = job("twohead", "execution.compile=graph", *WARM_UP)
    per_epoch = -(-built.prepared.num_train // built.config.recipe.batch_size)
    built = changed(built, recipe={"num_epochs": -(-3120 // per_epoch)})
    results = [train_group(built, cluster_address) for _ in range(REPEATS)]
    for words, first in ((" after the first window, which records the graph", 1), ("", 0)):
        windows = [result.windows[first:] for result in results]
        times = [3120 * sum(window[2] for window in each) / sum(window[1] for window in each) for each in windows]
        told_seconds(f"goal C: 3,120 training steps{words}", times, 0.6, planned_arm(built).label)


def test_goal_c_prediction(job, tmp_path):
    told_ratio("goal C: prediction over the plain fp32 loop", in_a_rank(job("twohead"), "prediction", tmp_path), 3)


@pytest.mark.parametrize(("preset", "mode"), [("cifar10", "off"), ("cifar10", "graph"), ("twohead", "graph")])
def test_goal_d_the_device_is_never_idle(job, tmp_path, preset, mode):
    built = job(preset, f"execution.compile={mode}", "recipe.num_epochs=2")
    found = json.loads(said_in_a_rank(built, "device", tmp_path))
    goal = f"goal D, {preset}, compile {mode}"
    idle, overall = found["idle"], f"with log points, validation and checkpoints {found['idle_overall']:.1%}"
    shown = f"{idle:.1%} ({overall})"
    tell(f"{goal}: idle share of the device in steps <= 5 %", shown, "two epochs", at_most(idle, idle, 0.05))
    waits = found["num_waits"]
    tell(f"{goal}: waits of the host between log points: 0", f"{waits} {found['waits']}", "counted", verdict_of(waits))


@pytest.mark.parametrize("preset", ["cifar10", "twohead"])
def test_goal_f_the_count_of_operations(job, cluster_address, tmp_path, preset):
    """`mfu` is the count over time and data sheet: its error is the count's, as long as the share is of that count."""
    built = job(preset, "execution.compile=off", "recipe.num_epochs=2")
    counts = json.loads(said_in_a_rank(built, "flops", tmp_path))
    error = counts["counted"] / counts["profiled"] - 1
    share = limit_share(train_group(built, cluster_address))
    tell(
        f"goal F, {preset}: `mfu` within 2 % of a profiler's count",
        f"{error:+.2%} (mfu {share.mfu}, of_limit {share.of_limit}, {share.why_no_share or share.precision})",
        "one step",
        at_most(abs(error), abs(error), 0.02),
    )


def verdict_of(number):
    return "met" if number == 0 else "NOT MET"


def told_ratio(goal, probe: ProbeResult, bar):
    found = arm_ratio(probe.rounds, "baseline", "candidate")
    tell(
        f"{goal} >= {bar} x",
        f"{found.value:.2f} ({len(probe.rounds)} rounds, contaminated: {probe.validity.contaminated})",
        f"{found.low:.2f} to {found.high:.2f}",
        at_least(found.low, found.high, bar),
    )
