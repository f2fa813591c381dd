"""What a training inside a study or a sweep has of its parent."""

import pytest

from paceline.conf.lightning import Lightning, Objective
from paceline.flows.study.own_code import own_quality
from paceline.tasks.errors import RankError
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.train.lightning import code


def test_a_training_starts_from_the_code_and_the_checkpoint_of_its_parent(tmp_path):
    parent = tmp_path / "parent"
    (parent / code.FOLDER).mkdir(parents=True)
    (parent / code.FOLDER / "tagger.py").write_text("width = 8")
    (parent / code.START_CHECKPOINT).write_bytes(b"first")
    own = Lightning(code="/edited", ckpt_path="/gone.ckpt")
    for number, own_code in enumerate((own, own.model_copy(update={"code": None}))):
        directory = tmp_path / f"trial-{number}"
        code.copy_own(own_code, directory, parent)
        assert (directory / code.START_CHECKPOINT).read_bytes() == b"first"
    assert (tmp_path / "trial-0" / code.FOLDER / "tagger.py").exists()


def test_a_training_that_logged_no_number_at_the_end_has_failed():
    trained = ModuleResult.model_construct(metrics={"train_loss": 1.0}, not_finite=("val_loss",))
    with pytest.raises(RankError):
        own_quality(trained, None)
    assert own_quality(trained, Objective(name="train_loss", goal="minimize"))["score"] == 1.0
