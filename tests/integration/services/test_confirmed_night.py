"""An own model becomes slower with its new version: the night after it alarms, and confirms that against the old one.

Every night is a real run with a probe of its own, the packages are wheels, and the message goes to a real web hook.
"""

import json
import os
import shutil
import subprocess
import sys

import httpx
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.measure.validity import MAX_FOREIGN_CORES
from paceline.tasks.names import Metric, Tag, is_contaminated
from tests.support.nights import set_alarm, web_hook
from tests.support.patience import until
from tests.support.wheels import write_wheel

NUM_BEFORE, MOST_BEFORE = 10, 15
"""Undisturbed nights before the change, and nights that are tried for them. After fewer, the limit of ordinary noise
is so wide that a step of a third of the speed may lie within it."""
NIGHT = ["digits", "name=confirmed", "model.name=tiny", "data.image_size=16", "recipe.batch_size=64"]
NIGHT += ["recipe.num_epochs=8", "recipe.warmup_epochs=0.5", "execution.precision=bf16-mixed"]
NIGHT += ["execution.compile=off", "execution.memory_format=contiguous", "execution.loading=resident"]
NIGHT += ["speedup.max_seconds=10", "speedup.competent_loop=false", "speedup.starts=0", "track.experiment=confirmed"]
MODEL = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, image_shape, num_classes, width, depth):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(image_shape[2], 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.classify = nn.Linear(16, num_classes)

    def forward(self, images):
        is_mixed = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        for _ in range({repeats} if is_mixed else 1):
            features = self.layers(images)
        return self.classify(features.mean((2, 3)))
"""
REPEATS = {"1.0": 1, "2.0": 16}
"""Forward passes of a step in mixed precision, by version. The baseline computes in 32-true, so it has one in both."""


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, repeats in REPEATS.items():
        module = MODEL.replace("{repeats}", str(repeats))
        write_wheel(folder, "acme", version, module, "[paceline.models]\ntiny = acme:Tiny\n")
    return folder


@pytest.fixture
def site(tmp_path):
    """The folder of installed packages."""
    return tmp_path / "site"


@pytest.fixture
def install(wheels, site):
    """Installs a version of the package."""

    def call(version):
        shutil.rmtree(site, ignore_errors=True)  # pip leaves the facts of the version before
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", site]
        subprocess.run([*command, "--no-index", "--find-links", wheels, f"acme=={version}"], check=True)

    return call


@pytest.fixture
def night(paceline, wheels, site):
    """Runs one night to its end; its summary."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}

    def run(*overrides):
        process = paceline("run", *NIGHT, *overrides, "--json", PYTHONPATH=path, **pip)
        out, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return json.loads(out.splitlines()[-1])

    return run


def is_undisturbed(client, summary):
    data = client.get_run(summary["run_id"]).data
    is_quiet = data.metrics.get(Metric.FOREIGN_CORES, 0.0) < MAX_FOREIGN_CORES
    return is_quiet and not is_contaminated(data.tags)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_slower_version_of_a_package_is_confirmed_and_named(install, night, prefect_url):
    client = MlflowClient(Environment().tracking_uri)
    install("1.0")
    good = []
    for _ in range(MOST_BEFORE):
        good += [one for one in [night()] if is_undisturbed(client, one)]
        if len(good) == NUM_BEFORE:
            break
    else:
        pytest.skip(f"the machine is busy: {len(good)} of {MOST_BEFORE} nights were undisturbed")
    with web_hook() as (address, received):
        set_alarm(address, PREFECT_API_URL=prefect_url)
        install("2.0")
        summary = night("track.on_regression=bisect")
        if not is_undisturbed(client, summary):
            pytest.skip("the machine is busy: the night after the change was disturbed")
        judged = summary["regression"]
        assert judged["verdict"] == "regression", judged
        assert [change["measure"] for change in judged["changes"]] == ["throughput"]
        until(lambda: received, "message of the alarm", seconds=60)
    found = judged["confirmation"]
    print(f"{judged['text']}\n{found}")  # noqa: T201
    assert found["verdict"] == "confirmed"
    assert found["ratio"]["high"] < 1
    assert found["earlier_run_id"] == good[-1]["run_id"]
    assert len(found["causes"]) == 1
    assert found["causes"][0].startswith("acme 1.0")
    tags = client.get_run(summary["run_id"]).data.tags
    assert tags[Tag.CONFIRMATION] == found["text"]
    assert len(received) == 1
    assert "confirmed: the new run reaches" in received[0]["text"]
    flow = httpx.get(f"{prefect_url}/flow_runs/{tags['prefect.flow_run_id']}").json()
    assert flow["state"]["type"] == "COMPLETED"
