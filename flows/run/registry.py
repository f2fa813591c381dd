"""The hand-off of a model: through the gate into the registry, where it becomes the champion."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger

from paceline.flows.run.outcome import Outcome
from paceline.tasks.names import Tag
from paceline.tasks.speedup.promotion_gate import Gate, gate
from paceline.tasks.speedup.regression import RegressionVerdict
from paceline.tasks.track import registry
from paceline.tasks.track import run as tracking
from paceline.tasks.track.registry import Champion
from paceline.tasks.track.run import RunHandle


def register_model(outcome: Outcome, judgement: RegressionVerdict | None, handle: RunHandle) -> dict[str, Any] | None:
    """Make a run's logged model the newest version of its name, if it passes; None where it is not to be registered.

    It is no champion yet: `promote` comes once all else of the run is recorded.

    Returns:
        What the summary says of it.
    """
    track = outcome.config.track
    if track.register is None:
        return None
    present = registry.champion(handle.tracking_uri, track.register)
    if present is not None and present.run_id == handle.run_id:  # a run that goes on does not beat itself
        present = None
    is_other = present is not None and present.score_name != outcome.evaluated.score_name
    other_score = present.score_name if present is not None and is_other else None
    asked = gate(track, outcome.evaluated, outcome.trained, judgement, _champion_score(present, outcome), other_score)
    tags = _tags(outcome, asked, present)
    version = registry.register(handle, track.register, tags) if asked.passed else None
    return {
        "name": track.register,
        "version": version,
        "alias": registry.CHAMPION if version else None,
        "gate": asked.text,
        "champion_before": present and present.version,
    }


def _champion_score(present: Champion | None, outcome: Outcome) -> tuple[float, str] | None:
    """The score that a champion sets, and of what it is.

    On the same data the best that any champion had, or each could be a little worse than the one before.
    """
    if present is None or present.score is None:
        return None
    if present.dataset != outcome.prepared.fingerprint:
        return present.score, "the champion's, on other data,"
    return max(present.score, present.best_score or 0.0), "the champions' best"


def _tags(outcome: Outcome, asked: Gate, present: Champion | None) -> dict[str, str]:
    speedup, score, name = outcome.speedup, outcome.evaluated.score, outcome.evaluated.score_name
    is_same = present is not None and present.dataset == outcome.prepared.fingerprint
    best = max(score, present.best_score or 0.0) if present is not None and is_same else score
    tags = {
        Tag.SCORE_NAME: name,
        Tag.SCORE: repr(score),
        Tag.BEST_SCORE: repr(best),
        Tag.DATASET: outcome.prepared.fingerprint,
        Tag.WORKLOAD: outcome.workload,
        Tag.GATE: asked.text,
        Tag.VERDICT: speedup.verdict,
    }
    if name == "accuracy":
        tags |= {Tag.ACCURACY: repr(score), Tag.BEST_ACCURACY: repr(best)}
    if speedup.ratio is not None and speedup.low is not None and speedup.high is not None:
        tags[Tag.SPEEDUP] = f"{speedup.ratio:.3f} ({speedup.low:.3f} to {speedup.high:.3f})"
    return tags


def promote(outcome: Outcome, registered: dict[str, Any] | None, handle: RunHandle) -> None:
    """Make what was registered the champion, unless a better one has become it meanwhile."""
    if not registered:
        return
    log, name, version = get_run_logger(), registered["name"], registered["version"]
    tracking.set_tags(handle, {Tag.GATE: registered["gate"]})
    if version is None:
        log.warning("Model %s is not registered: %s", name, registered["gate"])
        return
    tracking.set_tags(handle, {Tag.REGISTERED: f"{name} version {version}"})
    present = registry.champion(handle.tracking_uri, name)
    is_new = present is not None and present.version not in (version, registered["champion_before"])
    if present is not None and is_new and (present.score or 0.0) > outcome.evaluated.score:
        log.warning("Version %s of %s has become champion meanwhile and is better: it stays", present.version, name)
        return
    registry.promote(handle, name, version)
    log.info("Version %s is models:/%s@%s", version, name, registry.CHAMPION)
