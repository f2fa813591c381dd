"""Forecasts for own Lightning code: a profile on two ranks, a comparison with a run on two, and refusals."""

import shutil

import pytest

from tests.support.outputs import told_by
from tests.support.own_lightning import PACKAGE, SMALL

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

BATCH_SIZE = 32  # of the package's loader


@pytest.fixture
def start(paceline, tmp_path):
    """Runs a command of the program on a copy of the package."""
    code = tmp_path / "prose"
    shutil.copytree(PACKAGE, code)

    def run(command, *overrides, status=0):
        data = f"data.init_args.directory={tmp_path / 'data'}"
        words = (str(code / "config.yaml"), "--code", str(code), "--json", *SMALL, data, "speedup.max_seconds=10")
        process = paceline(command, *words, *overrides)
        out, said = process.communicate(timeout=300)
        assert process.returncode == status, said
        return told_by(command, out) if status == 0 else said + out

    return run


@pytest.mark.slow
def test_a_run_on_two_devices_is_held_against_its_forecast(start):
    advice = start("advise", "--devices", "2,8", "trainer.max_epochs=2")
    forecasts = {(one["num_devices"], one["scaling"]): one for one in advice["predictions"]}
    assert forecasts.keys() == {(number, scaling) for number in (2, 8) for scaling in ("strong", "weak")}
    assert all(0 < one["low"] < one["ratio"] < one["high"] for one in forecasts.values())
    profile = advice["profile"]
    assert profile["batch_size"] == BATCH_SIZE
    assert [point["batch_size"] for point in profile["points"]] == [BATCH_SIZE // 2, BATCH_SIZE]
    assert [each["batch_size"] for each in profile["company"]] == [BATCH_SIZE // 2, BATCH_SIZE]
    assert profile["num_epochs"] == 2
    assert profile["gradient_bytes"] > 0
    assert {"execution.precision=bf16-mixed", "faster input"} <= {one["setting"] for one in advice["advice"]}
    measured = start("run", "execution.num_devices=2", "speedup.baseline=probe")["prediction"]
    assert measured["prediction_run_id"] == advice["run_id"]
    assert (measured["num_devices"], measured["predicted"]) == (2, forecasts[2, "weak"]["ratio"])


@pytest.mark.slow
def test_a_training_without_an_end_and_batches_of_one_sample_are_refused(start):
    assert "the length of the training is not known" in start("advise", "trainer.max_time=00:01:00:00", status=2)
    assert "a batch of the training loader has 1 sample" in start("advise", "data.init_args.batch_size=1", status=2)
