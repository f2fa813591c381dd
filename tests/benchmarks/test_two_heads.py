"""Goal 3: the two-head network by `paceline run`, its prediction, and both by a plain loop in a process of its own.

infra/bench 3          of which this is about 15 minutes on two quiet cores

The plain loop runs as torch is installed. Goal 3's probes (`test_speed.py`) are stricter: both sides run in one process
that has a rank's settings, so that they compare executions and nothing else.
"""

import json
import sys

import numpy as np
import pytest

from paceline.tasks.cluster.dask_config import ENVIRON, low_overhead_config
from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio
from paceline.tasks.model_bundle import digest_of
from paceline.tasks.predict.job import Settings, batch_size_for
from paceline.tasks.track.models import fetch_model
from tests.benchmarks.conftest import HERE, ROOT, as_installed, at_least, last_line, paceline, tell

pytestmark = pytest.mark.timeout(3600)

NUM_BLOCKS = 4
PREDICT_SECONDS = 4.0
PRESET = "twohead"
CPU = ["execution.accelerator=cpu"]
"""The plain loop knows no other device."""
WORKER = {
    name.removeprefix(ENVIRON): str(value) for name, value in low_overhead_config().items() if name.startswith(ENVIRON)
}
"""Variables of a worker's process."""


@pytest.fixture(scope="module")
def job(make_job):
    return make_job(PRESET)


@pytest.fixture(scope="module")
def data(job, tmp_path_factory):
    """The prepared images as one .npz, for those who know nothing of paceline."""
    arrays = {"mean": job.prepared.mean, "std": job.prepared.std}
    for name in ("train", "validation", "test"):
        split = open_split(job.prepared, name)
        arrays |= {f"{name}_images": np.concatenate(split.images), f"{name}_labels": split.labels_N}
        arrays[f"{name}_targets"] = split.targets_NT
    path = tmp_path_factory.mktemp("data") / "rotated_digits.npz"
    np.savez(path, **arrays)
    return path


class Sides:
    """Trains and predicts on either side; keeps what was found.

    Args:
        config: of the run.
        data: the same images for the plain loop.
        directory: for what they leave.
    """

    def __init__(self, config, data, directory):
        self._config = config
        self._data = data
        self._directory = directory
        self.accuracies = {"plain": [], "ours": []}
        self.num_steps = set()

    def plain(self):
        recipe = self._config.recipe
        settings = {
            name: getattr(recipe, name) for name in ("batch_size", "learning_rate", "num_epochs", "angle_weight")
        }
        settings |= {"data": str(self._data), "width": self._config.model.width, "seed": self._config.seed}
        settings |= {"predict_batch_size": batch_size_for((28, 28, 1)), "predict_seconds": PREDICT_SECONDS}
        path = self._directory / "plain.json"
        path.write_text(json.dumps(settings))
        found = said(HERE / "peers/plain_two_heads.py", path)
        self._note("plain", found["num_steps"], found["accuracy"])
        return found["seconds"], found["samples_per_second"]

    def ours(self):
        home = self._directory / f"home-{len(self.accuracies['ours'])}"
        summary, _, _ = paceline(home, "run", PRESET, *CPU, "speedup.baseline=none", PREFECT_API_URL="")
        directory, facts = fetch_model(summary["tracking_uri"], summary["run_id"], home)
        settings = Settings(
            model_directory=str(directory),
            model_digest=digest_of(facts),
            precision=summary["execution"]["precision"],
            gpu=False,
            num_threads=usable_cores(),
            batch_size=batch_size_for(facts.image_shape),
            compiled=str(home / "compiled"),
        )
        path = self._directory / "settings.json"
        path.write_text(settings.model_dump_json())
        found = said(HERE / "predicting.py", path, self._data, PREDICT_SECONDS, **WORKER, PYTHONPATH=str(ROOT))
        train = summary["train"]
        self._note("ours", train["num_steps"], found["accuracy"])
        return train["seconds"], found["samples_per_second"]

    def _note(self, side, num_steps, accuracy):
        self.num_steps.add(num_steps)
        self.accuracies[side].append(round(accuracy, 4))


def said(script, *arguments, **environment):
    """What a script of its own says, in JSON."""
    return json.loads(last_line([sys.executable, script, *arguments], as_installed() | environment))


def test_goal_3_end_to_end(job, data, tmp_path):
    sides = Sides(job.config, data, tmp_path)
    seconds, rates = [], []
    for _ in range(NUM_BLOCKS):
        times, speeds = zip(*(side() for side in (sides.plain, sides.ours, sides.ours, sides.plain)), strict=True)
        seconds.append((times[0] + times[3]) / (times[1] + times[2]))
        rates.append((speeds[1] + speeds[2]) / (speeds[0] + speeds[3]))
        print(f"seconds {times}; images/s {speeds}; {sides.accuracies}")
    assert len(sides.num_steps) == 1, "not the same work"
    accuracies = {side: float(np.mean(found)) for side, found in sides.accuracies.items()}
    prediction = "prediction of images in memory, compiled ahead"
    for what, ratios, bar in (("training, end to end", seconds, 1.6), (prediction, rates, 3.5)):
        found = estimate_ratio(np.log(ratios), FIXED_CONFIDENCE)
        tell(
            f"goal 3, {PRESET}, {what}, over a plain fp32 loop in its own process >= {bar}",
            f"{found.value:.3f} ({NUM_BLOCKS} blocks of A B B A, accuracies {accuracies})",
            f"{found.low:.3f} to {found.high:.3f}",
            at_least(found.low, found.high, bar),
        )
