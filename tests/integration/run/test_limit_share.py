"""The share of the device's limit, as a run, a study and their records show it."""

import os
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.measure.device_limit import limit_cache
from paceline.tasks.records.hardware import DeviceLimit
from tests.support.own_package import install

QUICK = [
    "data.image_size=16",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "execution.precision=32-true",
    "execution.compile=off",
    "execution.num_threads=1",
]
SMALL = [*QUICK, "model.width=4", "model.depth=1"]
PLANTED = 1e15  # operations per second
OPERATOR = """
import torch
from torch import nn


@torch.library.custom_op("unknown::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return 2 * values


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)


class Hidden(nn.Module):
    def __init__(self, image_shape, num_classes, width, depth):
        super().__init__()
        height, columns, channels = image_shape
        self.classify = nn.Linear(height * columns * channels, num_classes)

    def forward(self, images):
        return self.classify(twice(images.flatten(1)))


class Given(Hidden):
    flops_per_sample = (1e6, 3e6)
"""


@pytest.mark.slow
def test_a_run_shows_how_near_it_came_to_the_limit_of_its_device(call):
    summary = call("run", "digits", *SMALL, "speedup.max_seconds=2")
    train, speedup = summary["train"], summary["speedup"]
    assert 0 < speedup["of_limit"] <= 1.1
    limit = train["limit"]
    assert speedup["of_limit"] == pytest.approx(train["flops_per_second"] / limit["flops_per_second"]["32-true"])
    samples = speedup["candidate_samples_per_second"]
    assert train["flops_per_second"] == pytest.approx(train["cost"]["training_flops"] * samples)
    assert (train["mfu"], train["why_no_share"]) == (None, ""), "a CPU has no data sheet"
    assert (train["bytes_per_second"], speedup["of_bandwidth"], speedup["bound"]) == (None, None, None), "a small step"
    assert 0 < summary["time_budget"]["limit"] < 60
    metrics = MlflowClient(Environment().tracking_uri).get_run(summary["run_id"]).data.metrics
    assert metrics["speedup/of_limit"] == pytest.approx(speedup["of_limit"])
    assert metrics["throughput/flops_per_second"] == pytest.approx(train["flops_per_second"])
    assert "throughput/mfu" not in metrics
    report = MlflowClient(Environment().tracking_uri).download_artifacts(summary["run_id"], "report.html")
    assert "of what this device does" in Path(report).read_text()


@pytest.fixture
def planted(tmp_path):
    """A home whose cache knows the limit of one thread of this CPU."""
    limit = DeviceLimit(
        device_name="planted",
        driver=None,
        torch=torch.__version__,
        num_threads=1,
        flops_per_second={"32-true": PLANTED},
        bytes_per_second=1e9,
        seconds=2.0,
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limit_cache(tmp_path, torch.device("cpu")).keep(limit)
    finally:
        torch.set_num_threads(num_threads)
    return tmp_path


@pytest.mark.slow
def test_a_limit_that_is_known_is_not_measured_again_and_needs_no_probe(call, planted):
    summary = call("run", "digits", *SMALL, "speedup.baseline=none", PACELINE_HOME=str(planted))
    assert summary["train"]["limit"]["device_name"] == "planted"
    assert summary["speedup"]["of_limit"] == pytest.approx(summary["train"]["flops_per_second"] / PLANTED)
    assert summary["speedup"]["ratio"] is None


@pytest.mark.parametrize("name", ["hidden", "given"])
@pytest.mark.slow
def test_a_network_with_operators_of_its_own_has_no_share_unless_it_gives_its_operations(call, planted, name):
    site = planted / "site"
    install(site, "hidden", {"net": OPERATOR}, models={"hidden": "net:Hidden", "given": "net:Given"})
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        "PACELINE_HOME": str(planted),
    }
    settings = [*QUICK, "speedup.baseline=none", f"model.name={name}", "execution.memory_format=contiguous"]
    summary = call("run", "digits", *settings, **environment)
    train = summary["train"]
    if name == "given":
        assert train["cost"]["training_flops"] == 3e6
        assert 0 < summary["speedup"]["of_limit"] < 1
        return
    assert "unknown::twice" in train["why_no_share"]
    assert (train["flops_per_second"], train["mfu"], train["cost"], train["limit"]) == (None, None, None, None)
    assert summary["speedup"]["of_limit"] is None


@pytest.mark.slow
def test_the_arms_of_a_study_show_it(call):
    summary = call("study", "digits", "--axis", "execution.memory_format=contiguous,channels_last", *SMALL)
    assert all(0 < arm["of_limit"] <= 1.1 and arm["mfu"] is None for arm in summary["arms"])
    assert all(arm["flops_per_second"] > 0 for arm in summary["arms"])
