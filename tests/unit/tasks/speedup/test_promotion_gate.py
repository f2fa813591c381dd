"""What a model is asked before it is registered."""

import pytest

from paceline.conf.config import Track
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.promotion_gate import gate


def asked(accuracy=0.95, plain=0.95, champion=None, verdict="normal", **bars):
    return gate(
        Track(register="digits", **bars),
        EvaluateResult.model_construct(accuracy=accuracy),
        TrainResult.model_construct(plain_score=plain),
        RegressionVerdict(verdict=verdict, text=""),
        champion and (champion, "the champions' best"),
    )


@pytest.mark.parametrize(
    ("facts", "missed"),
    [
        ({}, None),
        ({"min_accuracy": 0.95}, None),
        ({"min_accuracy": 0.96}, "at least 0.96"),
        ({"champion": 0.958}, None),
        ({"champion": 0.97}, "the champions' best 0.9700"),
        ({"plain": 0.97}, "in 32-true unfolded 0.9700"),
        ({"verdict": "regression"}, "regression"),
        ({"verdict": "too few runs"}, None),
    ],
)
def test_each_question_can_stop_a_model(facts, missed):
    found = asked(**facts)
    assert found.passed == (missed is None)
    assert (missed or "passed") in found.text
    assert len(found.missed) == (missed is not None)


def test_a_champion_of_another_task_is_not_replaced():
    found = gate(
        Track(register="digits"),
        EvaluateResult.model_construct(score_name="mean_iou", mean_iou=0.99),
        TrainResult.model_construct(plain_score=None),
        None,
        (0.5, "the champions' best"),
        "accuracy",
    )
    assert not found.passed
    assert found.missed == ("judged by its mean IoU, the champion by its accuracy: use another name",)


def test_what_is_not_known_is_not_asked():
    found = gate(
        Track(register="digits", on_regression="off"),
        EvaluateResult.model_construct(accuracy=0.5),
        TrainResult.model_construct(plain_score=None),
        None,
        None,
    )
    assert found.passed
    assert found.met == ()
