"""Loaders of torchdata and networks of timm, installed for these tests: unit tests that skip themselves without them.

A module with a network of timm is also trained in a whole run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from tests.support.own_lightning import PACKAGE

UNIT = Path(__file__).parents[2] / "unit" / "tasks"
OPERATORS = """import torch as _torch

_library = _torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Torchvision's compiled library does not load next to a torch for CPUs, and it describes two operators of that library
as it is imported. timm uses none of them."""

pytestmark = pytest.mark.slow


def install(site, *requirements):
    """PYTHONPATH with packages in a directory of their own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "torchvision" not in done.stderr:
        pytest.skip(f"pip does not install {' and '.join(requirements)}: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def unit_tests(path, word, *files):
    """Run the unit tests that have a word in their name, and assert that none skips itself for want of a package."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", word, *(str(UNIT / file) for file in files)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "is not installed" not in done.stdout


def test_loaders_of_torchdata(tmp_path):
    unit_tests(install(tmp_path, "torchdata>=0.11,<1"), "torchdata", "train/test_lightning_feed.py")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """PYTHONPATH with timm and the torchvision of this torch."""
    site = tmp_path_factory.mktemp("timm")
    minor = int(torch.__version__.split(".")[1]) + 15  # torchvision 0.28 is for torch 2.13
    found = install(site, "timm>=1.0.15,<2", f"torchvision==0.{minor}.*")
    if torch.version.cuda is None:
        start = site / "torchvision" / "__init__.py"
        start.write_text(OPERATORS + start.read_text())
    return found


def test_networks_of_timm(path):
    unit_tests(path, "timm", "model/networks/test_timm.py", "train/test_own_modules.py")


def test_an_unchanged_module_with_a_network_of_timm_trains_on_two_ranks(program, path, tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    code = shutil.copytree(PACKAGE.parent / "shapes", tmp_path / "code")
    classes = ["model.class_path=of_timm.Classifier", "data.class_path=more_shapes.Pictures"]
    short = ["data.init_args.size=32", "data.init_args.num_samples=64", "trainer.max_epochs=2"]
    settings = [*classes, *short, "trainer.devices=2", "trainer.log_every_n_steps=1", "speedup.baseline=none", "--json"]
    process = program("run", "lightning", *settings, "--code", str(code), PYTHONPATH=path)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    summary = json.loads(output.splitlines()[-1])
    client = MlflowClient(Environment().tracking_uri)
    assert client.get_run(summary["run_id"]).data.params["execution.num_devices"] == "2"
    losses = [one.value for one in client.get_metric_history(summary["run_id"], "loss")]
    assert len(losses) > 1
    assert all(0 < loss < 10 for loss in losses)
