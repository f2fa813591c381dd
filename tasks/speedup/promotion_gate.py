"""Criteria for the promotion of a model to champion."""

from paceline.conf.config import Track
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import EvaluateResult, ScoreName, TrainResult
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.speedup.nights.regression import RegressionVerdict


class Gate(Record):
    """The verdict, with the criteria that the model met and missed."""

    passed: bool
    met: tuple[str, ...]
    missed: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line."""
        return f"passed: {'; '.join(self.met)}" if self.passed else f"not passed: {'; '.join(self.missed)}"


def gate(
    track: Track,
    evaluated: EvaluateResult,
    trained: TrainResult,
    judgement: RegressionVerdict | None,
    champion: tuple[float, str] | None,
    other_score: ScoreName | None = None,
) -> Gate:
    """Check a model's score, its parity, and whether its run was worse than earlier runs.

    `evaluated` is its quality as it is delivered: folded, in the precision of the plan. `champion` is the test score
    that the present champion sets as a bar, and of what it is; None without a champion, or it is not known.
    `judgement` is None where nobody has looked, `trained` has the model's score as it was trained. `other_score` is
    what that champion is judged by, where it is not what this model is.
    """
    score, margin, plain = evaluated.score, track.max_accuracy_loss, trained.plain_score
    name = SCORE_WORDS[evaluated.score_name]
    checks = []
    if track.min_accuracy is not None:
        checks.append((score >= track.min_accuracy, f"{name} {score:.4f}, at least {track.min_accuracy:g}"))
    if other_score is not None:
        other = f"judged by its {name}, the champion by its {SCORE_WORDS[other_score]}: use another name"
        checks.append((False, other))
    elif champion is not None:
        bar, whose = champion
        checks.append((score >= bar - margin, f"{name} {score:.4f}, {whose} {bar:.4f}"))
    if plain is not None:
        checks.append((score >= plain - margin, f"{name} {score:.4f}, in 32-true unfolded {plain:.4f}"))
    if judgement is not None:
        checks.append((judgement.verdict != "regression", f"against the runs before it: {judgement.verdict}"))
    met, missed = (tuple(text for holds, text in checks if holds == wanted) for wanted in (True, False))
    return Gate(passed=not missed, met=met, missed=missed)
