"""Goals 10 and 11: what a run costs beside its work, and cold start to logged metrics against other launchers.

infra/bench 10 11          about 70 minutes on two quiet cores; the first time also makes an environment for Ray

Whole processes, from their start on, A B B A, at least three blocks. For goal 11 the databases of Prefect and MLflow
are there and the data are not prepared. Its peers run as torch is installed, and once more with the allocator's
settings that a rank has, which is the stricter comparison: A B C C B A.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.host import keep_memory
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio, location_interval
from paceline.tasks.train.launch.layout import rank_environment
from tests.benchmarks.conftest import HERE, ROOT, as_installed, at_least, at_most, last_line, paceline, tell
from tests.support.prefect_server import prefect_server

pytestmark = pytest.mark.timeout(7200)

RAY = ROOT / ".paceline" / "bench" / "ray"
RAY_PACKAGES = ("ray[train]", "torch==2.13.0", "numpy", "pillow")
NUM_BLOCKS = 6
NUM_PEER_BLOCKS = 3
DIGITS = ["digits", "speedup.baseline=none"]
JOB = {
    "batch_size": 128,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-10,
    "width": 32,
    "depth": 4,
    "seed": 0,
}
NUM_EPOCHS = {"bf16-mixed": 9, "32-true": 4}
"""Of 2,000 images: about 30 s on two cores, start and end included."""


# Goal 10


def bare_seconds(home):
    """The same work in one process, in the environment of a rank."""
    home.mkdir(exist_ok=True)
    environment = rank_environment(os.environ, usable_cores(), None, ()) | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    last_line([sys.executable, HERE / "bare_script.py", home, *DIGITS], environment)
    seconds = time.monotonic() - started
    return json.loads((home / "bare.json").read_text()), seconds


class Added:
    """Measures what a run takes longer than the bare script.

    Args:
        directory: for the homes of both.
        keep: the homes, with the prepared sets in them.
        environment: of the run.
    """

    def __init__(self, directory, *, keep=False, **environment):
        self._directory = directory
        self._keep = keep
        self._environment = environment

    def seconds(self, which):
        home = self._directory / which
        if not self._keep:
            shutil.rmtree(home, ignore_errors=True)
        if which == "bare":
            found, seconds = bare_seconds(home)
            self.loss = found["train"]["final_loss"]
        else:
            summary, _, seconds = paceline(home, "run", *DIGITS, **self._environment)
            assert summary["train"]["final_loss"] == self.loss, "not the same work"
        return seconds

    def measure(self, num_blocks):
        differences = []
        for which in ("bare", "run"):
            self.seconds(which)  # files in the page cache
        for _ in range(num_blocks):
            first, second, third, fourth = map(self.seconds, ("run", "bare", "bare", "run"))
            differences.append((first + fourth - second - third) / 2)
            print(f"run {first:.2f}, {fourth:.2f} s; bare script {second:.2f}, {third:.2f} s")
        return location_interval(np.asarray(differences), FIXED_CONFIDENCE)


def tell_added(what, found, num_blocks, bar=None):
    value, low, high = map(float, found)
    tell(
        f"goal 10, {what}: seconds added to a bare script" + (f" <= {bar}" if bar else ""),
        f"{value:.2f} ({num_blocks} blocks of A B B A)",
        f"{low:.2f} to {high:.2f}",
        at_most(low, high, bar) if bar else "for comparison",
    )


def test_goal_10_with_a_server(tmp_path):
    with prefect_server(tmp_path) as url:
        added = Added(tmp_path, PREFECT_API_URL=url)
        tell_added("Prefect server running", added.measure(NUM_BLOCKS), NUM_BLOCKS, 3)
        kept = Added(tmp_path, keep=True, PREFECT_API_URL=url)
        tell_added("Prefect server running, prepared sets reused by both", kept.measure(3), 3)


def test_goal_10_on_the_temporary_api(tmp_path):
    home = {"PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path / "prefect")}
    tell_added("temporary Prefect API", Added(tmp_path, **home).measure(NUM_BLOCKS), NUM_BLOCKS, 8)


def test_goal_10_on_the_first_day(tmp_path):
    """The temporary API's database is new too; it is made once for a user."""

    class FirstDay(Added):
        def seconds(self, which):
            shutil.rmtree(tmp_path / "prefect", ignore_errors=True)
            return super().seconds(which)

    home = {"PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path / "prefect")}
    tell_added("temporary Prefect API, its database new", FirstDay(tmp_path, **home).measure(3), 3)


# Goal 11


@pytest.fixture(scope="module")
def ray_python():
    """The interpreter of an environment with Ray, made once."""
    python = RAY / "bin" / "python"
    if not (RAY / "complete").exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(RAY)], check=True, capture_output=True)
            install = [str(python), "-m", "pip", "install", "--quiet", *RAY_PACKAGES]
            subprocess.run(install, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no environment for Ray: {getattr(error, 'stderr', None) or error}")
        (RAY / "complete").touch()
    return str(python)


class Launchers:
    """One job by several launchers, each in a fresh process; seconds from its start to its logged metrics.

    Args:
        root: images.
        directory: for what they leave.
        precision: of all.
    """

    def __init__(self, root, directory, precision):
        self._root = root
        self._directory = directory
        self._precision = precision
        self._home = directory / "paceline"
        self.accuracy = {}

    def paceline(self):
        shutil.rmtree(self._home / "prepared", ignore_errors=True)
        recipe = [f"recipe.{name}={JOB[name]}" for name in ("batch_size", "learning_rate", "momentum", "weight_decay")]
        model = [f"model.{name}={JOB[name]}" for name in ("width", "depth")]
        summary, began, _ = paceline(
            self._home,
            "run",
            "cifar10",
            f"data.root={self._root}",
            "data.validation_fraction=0",
            *recipe,
            *model,
            f"recipe.num_epochs={NUM_EPOCHS[self._precision]}",
            f"execution.precision={self._precision}",
            "speedup.baseline=none",
            PREFECT_API_URL="",
            PREFECT_HOME=str(self._directory / "prefect"),
        )
        self._note("paceline", summary["train"]["num_steps"], summary["evaluate"]["accuracy"])
        run = MlflowClient(summary["tracking_uri"]).get_run(summary["run_id"])
        return run.info.end_time / 1000 - began

    def torchrun(self, **environment):
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=1",
            str(HERE / "peers/by_torchrun.py"),
        ]
        return self._peer("torchrun", [sys.executable, *command], **environment)

    def ray(self, python, **environment):
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        return self._peer("Ray Train", [python, HERE / "peers/by_ray.py"], **environment)

    def _peer(self, name, command, **environment):
        out, settings, storage = (self._directory / part for part in ("out.json", "settings.json", "storage"))
        out.unlink(missing_ok=True)
        shutil.rmtree(storage, ignore_errors=True)
        job = JOB | {"root": str(self._root), "out": str(out), "storage": str(storage)}
        job |= {"num_epochs": NUM_EPOCHS[self._precision], "bf16": self._precision == "bf16-mixed"}
        settings.write_text(json.dumps(job))
        began = time.time()
        last_line([*command, settings], as_installed() | environment)
        found = json.loads(out.read_text())
        self._note(name, found["num_steps"], found["accuracy"])
        return found["logged_at"] - began

    def _note(self, name, num_steps, accuracy):
        assert num_steps == NUM_EPOCHS[self._precision] * -(-2000 // JOB["batch_size"])
        self.accuracy.setdefault(name, []).append(accuracy)


@pytest.mark.parametrize("precision", NUM_EPOCHS)
def test_goal_11_against_torchrun(cifar10_subset, tmp_path, precision):
    jobs = Launchers(cifar10_subset, tmp_path, precision)
    for how, found in in_turn(jobs, "torchrun", jobs.torchrun).items():
        tell(
            f"goal 11, {precision}: cold start to logged metrics / that of torchrun with plain PyTorch{how} <= 1.10",
            f"{1 / found.value:.3f} ({NUM_PEER_BLOCKS} blocks of A B C C B A)",
            f"{1 / found.high:.3f} to {1 / found.low:.3f}",
            at_most(1 / found.high, 1 / found.low, 1.10),
        )


@pytest.mark.parametrize("precision", NUM_EPOCHS)
def test_goal_11_against_ray(cifar10_subset, tmp_path, precision, ray_python):
    jobs = Launchers(cifar10_subset, tmp_path, precision)
    for how, found in in_turn(jobs, "Ray Train", partial(jobs.ray, ray_python)).items():
        tell(
            f"goal 11, {precision}: cold start to logged metrics of Ray Train{how} / ours >= 1.5",
            f"{found.value:.3f} ({NUM_PEER_BLOCKS} blocks of A B C C B A)",
            f"{found.low:.3f} to {found.high:.3f}",
            at_least(found.low, found.high, 1.5),
        )


def in_turn(jobs, name, peer):
    """Time of a peer over ours, for the peer as torch is installed and with a rank's allocator."""
    ways = {"": peer, ", with a rank's allocator": partial(peer, **keep_memory())}
    sides = [jobs.paceline, *ways.values()]
    for side in (jobs.paceline, peer):
        side()  # files in the page cache, the databases of Prefect and MLflow made
    ratios = {how: [] for how in ways}
    for _ in range(NUM_PEER_BLOCKS):
        times = [side() for side in (*sides, *reversed(sides))]
        ours, *peers = (times[place] + times[-1 - place] for place in range(len(sides)))
        for how, seconds in zip(ways, peers, strict=True):
            ratios[how].append(seconds / ours)
        print(f"paceline, {name}, with a rank's allocator, and back: {[round(each, 1) for each in times]} s")
    print(f"accuracies {jobs.accuracy}")
    return {how: estimate_ratio(np.log(found), FIXED_CONFIDENCE) for how, found in ratios.items()}
