"""What a model must pass before it is handed on. Pure; which model is the champion is found out elsewhere."""

from __future__ import annotations

from paceline.conf.config import Track
from paceline.tasks.records import EvaluateResult, Record, ScoreName, TrainResult
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.speedup.regression import RegressionVerdict


class Gate(Record):
    """The verdict, with each question that was asked."""

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
    """Ask of a model its score, its parity, and whether its run was worse than those before it.

    Args:
        track: the bars.
        evaluated: its quality as it is delivered: folded, in the precision of the plan.
        trained: has its score as it was trained.
        judgement: of its run; None where nobody looked.
        champion: the test score that the present champion sets as a bar, and of what it is; None when there is no
            champion, or it is not known.
        other_score: what that champion is judged by, where it is not what this model is.
    """
    score, margin, plain = evaluated.score, track.max_accuracy_loss, trained.plain_score
    name = SCORE_WORDS[evaluated.score_name]
    asked = []
    if track.min_accuracy is not None:
        asked.append((score >= track.min_accuracy, f"{name} {score:.4f}, at least {track.min_accuracy:g}"))
    if other_score is not None:
        asked.append((False, f"judged by its {name}, the champion by its {SCORE_WORDS[other_score]}: use another name"))
    elif champion is not None:
        bar, whose = champion
        asked.append((score >= bar - margin, f"{name} {score:.4f}, {whose} {bar:.4f}"))
    if plain is not None:
        asked.append((score >= plain - margin, f"{name} {score:.4f}, in 32-true unfolded {plain:.4f}"))
    if judgement is not None:
        asked.append((judgement.verdict != "regression", f"against the runs before it: {judgement.verdict}"))
    return Gate(
        passed=all(met for met, _ in asked),
        met=tuple(text for met, text in asked if met),
        missed=tuple(text for met, text in asked if not met),
    )
