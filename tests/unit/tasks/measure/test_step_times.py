import hashlib

import numpy as np
import pytest

from paceline.tasks.measure import step_times
from paceline.tasks.measure.step_times import StepTimes


def filled():
    steps = StepTimes()
    for attempt in range(2):
        steps.start_attempt()
        for number, arm in enumerate("bccbbc"):
            if number % 2 == 0:
                steps.start_round()
            steps.add(arm, 100.0 * attempt + 10 * number, [0.5, 0.25, 0.125])
    return steps


def test_each_step_has_its_place_and_its_time():
    columns = filled().columns()
    assert columns["arms"].tolist() == ["b", "c"]
    blocks = columns["step"] == 0
    assert columns["arms"][columns["arm"]][blocks].tolist() == list("bccbbc" * 2)
    assert columns["attempt"][blocks].tolist() == [0] * 6 + [1] * 6
    assert columns["round"][blocks].tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert columns["position"][blocks].tolist() == [0, 1] * 6
    assert columns["step"].tolist() == [0, 1, 2] * 12
    assert columns["started"][:4].tolist() == [0.0, 0.5, 0.75, 10.0]
    assert columns["started"][-3:].tolist() == [150.0, 150.5, 150.75]
    assert columns["seconds"].sum() == pytest.approx(12 * 0.875)


def test_steps_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(step_times, "MAX_STEPS", 8)
    steps = StepTimes()
    steps.start_attempt()
    for arm, number in (("b", 3), ("c", 3), ("c", 4), ("b", 1)):
        steps.add(arm, 0.0, [1.0] * number)
    columns = steps.columns()
    assert columns["seconds"].size == 6
    assert int(columns["num_left_out"]) == 5, "none behind a gap, whose place would be unknown"


def test_the_file_is_there_at_once_and_has_its_digest(tmp_path):
    path = tmp_path / "steps.npz"
    digest = filled().write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["steps.npz"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert np.load(path)["seconds"].size == 36


def test_nothing_measured_is_an_empty_table(tmp_path):
    assert StepTimes().columns()["seconds"].size == 0
