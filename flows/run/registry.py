"""Registers a model that passes the gate; `lifecycle.promotion` makes it the champion."""

from typing import Any

from paceline.flows.run.outcome import ModuleOutcome, Outcome
from paceline.tasks.names import Tag
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.promotion_gate import Gate, gate
from paceline.tasks.track import registry
from paceline.tasks.track.run import RunHandle

NO_SCORE = "passed: own Lightning code has no score that Paceline knows, so the newest model is the champion"
NO_WEIGHTS = "not passed: the state dict of the module holds more than tensors"
WORSE = "not passed: against the runs before it: regression"
OTHER_KIND = "not passed: the champion is a preset's, which has a score: use another name"


def register_model(outcome: Outcome, judgement: RegressionVerdict | None, handle: RunHandle) -> dict[str, Any] | None:
    """Register a model that passes the gate, for `promote`; the `registered` part of the summary."""
    track = outcome.config.track
    if track.register is None:
        return None
    champion = registry.champion(handle.tracking_uri, track.register)
    if champion is not None and champion.run_id == handle.run_id:  # a resumed run does not compete with itself
        champion = None
    other_score = score_to_beat = None
    if champion is not None and champion.score_name != outcome.evaluated.score_name:
        other_score = champion.score_name
    if champion is not None and champion.score is not None:
        score_to_beat = champion.score, "the champion's, on other data,"
        if champion.dataset == outcome.prepared.fingerprint:  # the best of all, or each could be a little worse
            score_to_beat = max(champion.score, champion.best_score or 0.0), "the champions' best"
    verdict = gate(track, outcome.evaluated, outcome.trained, judgement, score_to_beat, other_score)
    tags = _tags(outcome, verdict, champion)
    version = registry.register(handle, track.register, tags) if verdict.passed else None
    return {
        "name": track.register,
        "version": version,
        "alias": registry.CHAMPION if version else None,
        "gate": verdict.text,
        "champion_before": champion and champion.version,
    }


def _tags(outcome: Outcome, verdict: Gate, champion: registry.Champion | None) -> dict[str, str]:
    speedup, score, name = outcome.speedup, outcome.evaluated.score, outcome.evaluated.score_name
    is_same = champion is not None and champion.dataset == outcome.prepared.fingerprint
    best = max(score, champion.best_score or 0.0) if champion is not None and is_same else score
    tags = {
        Tag.SCORE_NAME: name,
        Tag.SCORE: repr(score),
        Tag.BEST_SCORE: repr(best),
        Tag.DATASET: outcome.prepared.fingerprint,
        Tag.WORKLOAD: outcome.workload,
        Tag.GATE: verdict.text,
        Tag.VERDICT: speedup.verdict,
    }
    if name == "accuracy":
        tags |= {Tag.ACCURACY: repr(score), Tag.BEST_ACCURACY: repr(best)}
    if speedup.ratio is not None and speedup.low is not None and speedup.high is not None:
        tags[Tag.SPEEDUP] = f"{speedup.ratio:.3f} ({speedup.low:.3f} to {speedup.high:.3f})"
    return tags


def register_module(outcome: ModuleOutcome, handle: RunHandle) -> dict[str, Any] | None:
    """Register the model of own Lightning code, for `promote`; the `registered` part of the summary."""
    name, judgement = outcome.config.track.register, outcome.judgement
    if name is None:
        return None
    before = registry.champion(handle.tracking_uri, name)
    gate_text = OTHER_KIND if before and before.score else NO_SCORE
    if outcome.trained.weights is None:
        gate_text = NO_WEIGHTS
    elif judgement is not None and judgement.verdict == "regression":
        gate_text = WORSE
    tags = {Tag.WORKLOAD: outcome.workload, Tag.VERDICT: outcome.speedup.verdict, Tag.GATE: gate_text}
    version = registry.register(handle, name, tags) if gate_text == NO_SCORE else None
    return {
        "name": name,
        "version": version,
        "alias": registry.CHAMPION if version else None,
        "gate": gate_text,
        "champion_before": before and before.version,
    }
