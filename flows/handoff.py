"""The hand-off of a model: through the gate into the registry, where it becomes the champion."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger

from flows.outcome import Outcome
from tasks.speedup.gate import Gate, gate
from tasks.speedup.regression import Judgement
from tasks.track import registry
from tasks.track import run as tracking
from tasks.track.run import RunHandle


def hand_over(outcome: Outcome, judgement: Judgement | None, handle: RunHandle) -> dict[str, Any] | None:
    """Make a run's logged model the newest version of its name, if it passes; None where it is not to be registered.

    It is no champion yet: `promote` comes once all else of the run is recorded.

    Returns:
        What the summary says of it.
    """
    track = outcome.config.track
    if track.register is None:
        return None
    present = registry.champion(handle.tracking_uri, track.register)
    is_another = present is not None and present.run_id != handle.run_id  # a run that goes on does not beat itself
    accuracy = present.accuracy if present is not None and is_another else None
    asked = gate(track, outcome.evaluated, outcome.trained, judgement, accuracy)
    version = registry.register(handle, track.register, _tags(outcome, asked)) if asked.passed else None
    alias = registry.CHAMPION if version else None
    return {"name": track.register, "version": version, "alias": alias, "gate": asked.text}


def _tags(outcome: Outcome, asked: Gate) -> dict[str, str]:
    speedup = outcome.speedup
    tags = {
        registry.ACCURACY_TAG: repr(outcome.evaluated.accuracy),
        "paceline.dataset": outcome.prepared.fingerprint,
        "paceline.workload": outcome.workload,
        "paceline.gate": asked.text,
        "paceline.verdict": speedup.verdict,
    }
    if speedup.ratio is not None and speedup.low is not None and speedup.high is not None:
        tags["paceline.speedup"] = f"{speedup.ratio:.3f} ({speedup.low:.3f} to {speedup.high:.3f})"
    return tags


def promote(registered: dict[str, Any] | None, handle: RunHandle) -> None:
    """Make what was registered the champion."""
    if not registered:
        return
    tracking.set_tags(handle, {"paceline.gate": registered["gate"]})
    if registered["version"] is None:
        get_run_logger().warning("Model %s is not registered: %s", registered["name"], registered["gate"])
        return
    registry.promote(handle, registered["name"], registered["version"])
    address = f"models:/{registered['name']}@{registry.CHAMPION}"
    tracking.set_tags(handle, {"paceline.registered": f"{registered['name']} version {registered['version']}"})
    get_run_logger().info("Version %s is %s", registered["version"], address)
