"""Scores of presets and metrics of own Lightning code, in words and by name."""

import pytest

from paceline.conf.lightning import Objective
from paceline.tasks.errors import RankError
from paceline.tasks.scores import logged_score, own_name, score_text, score_word
from tests.support.refusals import refused


def test_a_metric_of_own_code_has_its_own_word_and_is_no_share():
    assert (score_word(["val_loss", None]), score_text("val_loss", 2.34567)) == ("val_loss", "2.346")
    assert (score_word(["accuracy"]), score_text("accuracy", 0.5), score_text(None, 0.5)) == (
        "accuracy",
        "50.00%",
        "50.00%",
    )
    logged = own_name(Objective(name="accuracy", goal="maximize"))
    assert (score_word([logged]), score_text(logged, 75.25)) == ("logged accuracy", "75.25")


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"train_loss": 1.0, "val_loss": 2.0}, "val_loss"),
        ({"valid/Loss": 2.0}, "valid/Loss"),
        ({"val_loss_step": 1.0, "val_loss_epoch": 2.0}, None),
        ({"val_acc": 0.5}, None),
    ],
)
def test_the_only_validation_loss_is_found(metrics, name):
    found = logged_score(metrics, None)
    assert found == (None if name is None else (Objective(name=name, goal="minimize"), 2.0))


def test_a_named_metric_must_have_been_logged():
    named = Objective(name="val_acc", goal="maximize")
    assert logged_score({"val_acc": 0.5}, named) == (named, 0.5)
    with refused("--maximize", "val_acc", "val_loss"):
        logged_score({"val_loss": 2.0}, named)


@pytest.mark.parametrize("named", [None, Objective(name="val_loss", goal="minimize")])
def test_a_metric_that_is_not_finite_was_logged(named):
    with pytest.raises(RankError, match=r"val_loss, .* is not finite") as failure:
        logged_score({"train_loss": 1.0, "val_loss": float("nan")}, named)
    assert failure.value.final
