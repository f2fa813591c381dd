"""How far a training is, read from what its first rank writes while it goes on."""

from __future__ import annotations

import json
from pathlib import Path


def scores_so_far(directory: Path) -> tuple[float, ...]:
    """Validation scores after each epoch that is over, those of attempts before included."""
    attempts = sorted(directory.glob("attempt-*"), key=lambda path: int(path.name.partition("-")[2]))
    for attempt in reversed(attempts):
        try:
            facts = json.loads((attempt / "rank-0" / "progress.json").read_text(encoding="utf-8"))
        except FileNotFoundError:  # this attempt has not come so far
            continue
        return tuple(facts["validation_scores"])
    return ()
