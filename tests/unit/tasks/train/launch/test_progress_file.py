"""What is read of a training that goes on."""

import json

from paceline.tasks.train.launch.progress_file import scores_so_far


def write(directory, attempt, scores):
    place = directory / f"attempt-{attempt}" / "rank-0"
    place.mkdir(parents=True)
    if scores is not None:
        (place / "progress.json").write_text(json.dumps({"validation_scores": scores}))


def test_scores_are_those_of_the_newest_attempt_that_has_any(tmp_path):
    assert scores_so_far(tmp_path) == ()
    write(tmp_path, 2, [0.1, 0.2])
    write(tmp_path, 10, [0.1, 0.2, 0.3])
    write(tmp_path, 11, None)
    assert scores_so_far(tmp_path) == (0.1, 0.2, 0.3)
