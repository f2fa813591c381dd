"""Bottlenecks and disturbances planted into real ranks, and what the measurement says of them."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from paceline.tasks.measure.records import Measurement
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.speedup.diagnosis import diagnose
from paceline.tasks.speedup.verdict import speedup_result
from paceline.tasks.train.launch.coordinator import measure_group
from paceline.tasks.train.rank.benchmark import diagnostic_arms
from tests.support.jobs import planned_arm, planted

LARGE = ["data.image_size=28", "model.width=12", "model.depth=2"]
HOG = "while True: pass"
TRIES = 2


@pytest.fixture
def measured(make_job, cluster_address):
    """Measures the diagnostic arms of a configuration with something planted."""

    def measure(*overrides, plant=None):
        job = make_job("speedup.max_seconds=8", *overrides)
        candidate = planned_arm(job)
        arms = {"baseline": BASELINE, "candidate": candidate}
        arms |= diagnostic_arms(candidate, job.config.recipe.batch_size // candidate.num_devices)
        with planted(cluster_address, plant):
            return measure_group(job.model_copy(update={"measurement": Measurement(arms=arms)}), cluster_address).probe

    return measure


@contextmanager
def hog(number):
    """Processes of somebody else, and no children of ours, that want all they can get."""
    start = f"for _ in $(seq {number}); do '{sys.executable}' -c '{HOG}' >/dev/null 2>&1 & echo $!; done"
    found = subprocess.run(["sh", "-c", start], capture_output=True, text=True, check=True, start_new_session=True)
    try:
        yield
    finally:
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def limited(measured):
    """Asserts what limits a step; skips where others use the machine: what is measured then says little."""

    def check(cause, share, *overrides, plant=None):
        for _ in range(TRIES):
            probe = measured(*overrides, plant=plant)
            result = speedup_result(probe)
            if diagnose(probe).cause == cause and result.shares[share][1] > 0.4:
                assert result.cause == ("contaminated machine" if probe.validity.contaminated else cause)
                return result
            if not probe.validity.contaminated:
                pytest.fail(f"{result.cause}: {' '.join(result.diagnosis)}")
        pytest.skip(f"others use this machine: {'; '.join(probe.validity.reasons)}")

    return check


@pytest.mark.slow
def test_a_slowed_source_is_data_bound(limited):
    result = limited("data-bound", "input", *LARGE, "execution.loading=foreground", plant="input=0.0005")
    assert result.diagnosis[0].startswith("Waiting for input takes")


@pytest.mark.slow
def test_a_slowed_all_reduce_is_communication_bound(limited):
    limited("communication-bound", "communication", *LARGE, "execution.num_devices=2", plant="exchange=0.04")


@pytest.mark.slow
def test_a_tiny_model_is_launch_bound(limited):
    tiny = ["data.image_size=8", "model.width=1", "recipe.batch_size=8", "execution.loading=resident"]
    limited("launch-bound", "overhead", *tiny)


@pytest.mark.slow
def test_a_large_step_without_anything_planted_is_compute_bound(measured):
    probe = measured(*LARGE, "recipe.batch_size=256", "execution.loading=resident")
    result = speedup_result(probe)
    assert result.cause in ("compute-bound", "slower", "contaminated machine"), result.diagnosis
    assert result.shares["compute"][0] > 0.7


@pytest.mark.slow
def test_a_hog_is_seen_and_the_measurement_repeated_and_marked(measured):
    with hog(1):
        probe = measured("speedup.max_seconds=6")
    result = speedup_result(probe)
    assert probe.validity.contaminated
    assert probe.validity.foreign_load > 0.25
    assert any("busy with other processes" in reason for reason in probe.validity.reasons)
    assert probe.num_repeats >= 1 or probe.seconds > 9, "begun again where time allowed"
    assert result.cause == "contaminated machine"
    assert result.contaminated
