"""The competent loop in its process: no Paceline in it, and what becomes of one that fails."""

import pickle
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from paceline.conf.config import Speedup
from paceline.tasks.train.competent import loop
from paceline.tasks.train.competent.process import LoopError, LoopProcess, is_wanted, start_early, take_process
from tests.support.loop_jobs import NUM_SAMPLES, loop_job

SECONDS = 60


@pytest.fixture
def process():
    process = LoopProcess()
    yield process
    process.close()


def test_it_trains_without_paceline_and_its_process_ends_with_all_workers(process, tmp_path):
    with pytest.raises(LoopError, match="nothing"):
        process.ask(loop_job(tmp_path, optimizer="nothing"), SECONDS)
    built = process.ask(loop_job(tmp_path), SECONDS)
    assert built["modules"] == []
    assert built["start_seconds"] > 0.1, "torch was imported"
    times = process.ask(5, SECONDS)
    assert len(times) == 5
    assert min(times) > 0
    assert len(built["evaluation_seconds"]) == loop.NUM_EVALUATIONS
    assert min(built["evaluation_seconds"]) > 0
    assert built["record_seconds"] > 0
    own = psutil.Process(process._process.pid)
    family = [own, *own.children(recursive=True)]
    assert len(family) == 2, "one worker loads"
    process.close()
    assert [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_one_that_was_killed_or_is_late_is_an_error(process, tmp_path):
    with pytest.raises(LoopError, match="did not answer within 0 s"):
        process.ask(loop_job(tmp_path), 0.0)
    process._process.kill()
    with pytest.raises(LoopError, match="its process ended"):
        process.ask(1, SECONDS)


@pytest.mark.slow
def test_two_gloo_ranks_train_together(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"world_size": 2, "address": ("127.0.0.1", port)}
    jobs = [loop_job(tmp_path, rank=rank, **place) for rank in range(2)]
    processes = [LoopProcess() for _ in jobs]
    try:
        with ThreadPoolExecutor(2) as threads:
            for requests in (jobs, [2, 2]):
                pairs = zip(processes, requests, strict=True)
                calls = [threads.submit(process.ask, request, SECONDS) for process, request in pairs]
                answers = [call.result() for call in calls]
    finally:
        for process in processes:
            process.close()
    assert [len(times) for times in answers] == [2, 2]


def test_the_process_that_was_started_early_is_taken_once():
    start_early()
    early = take_process()
    other = take_process()
    assert early is not other
    early.close()
    other.close()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"competent_loop": False}, False),
        ({"baseline": "none"}, False),
        ({"max_seconds": 9.0}, False),
    ],
)
def test_short_probes_and_runs_without_one_have_no_loop(settings, wanted):
    assert is_wanted(Speedup(**settings)) is wanted


def test_batches_are_shuffled_and_are_as_many_as_are_asked_for(tmp_path):
    samples = loop.Samples(loop_job(tmp_path, flip=False, shift=0))
    stored = np.concatenate([np.load(tmp_path / f"images-{number}.npy") for number in range(2)])
    images, labels, _ = samples[[70, 3, 50]]
    assert np.array_equal(images.numpy(), stored[[70, 3, 50]])
    assert labels.tolist() == [70 % 3, 0, 50 % 3]
    batches = loop.Batches(NUM_SAMPLES, 32)
    batches.number = 3
    assert sorted(index for batch in batches for index in batch) == list(range(NUM_SAMPLES))
    batches.number = 0
    assert list(batches) == []


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, images):
        return self.layer(images), None


@pytest.mark.parametrize(
    ("task", "channels", "layer"),
    [("denoise", 3, nn.Conv2d(3, 3, 1)), ("segment", 4, nn.Conv2d(3, 2, 1))],
)
def test_losses_of_pixels_are_finite(tmp_path, task, channels, layer):
    network = Pair()
    network.layer = layer
    images = np.random.default_rng(0).integers(0, 3, (8, 8, 8, channels), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    changes = {"images": [str(tmp_path / "images.npy")], "labels": torch.zeros(8, dtype=torch.int64)}
    scale = {"mean": (0.0,) * channels, "std": (1 / 255,) * channels, "targets": torch.empty(8, 0)}
    job = loop_job(tmp_path, task=task, shift=0, autocast=None, **changes | scale) | {"network": pickle.dumps(network)}
    training = loop.Training(job | {"batch_size": 4})
    assert len(training.run(1)) == 1
    images_NHWC = torch.from_numpy(images[:4])
    parts = training._on_device((images_NHWC, torch.zeros(4, dtype=torch.int64), torch.empty(4, 0)))
    assert torch.isfinite(training._loss(*parts))
