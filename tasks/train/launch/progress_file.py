"""Reads the progress file that rank 0 writes during a training."""

import json
from pathlib import Path


def scores_so_far(directory: Path) -> tuple[float, ...]:
    """Validation scores of all finished epochs of a run, earlier attempts included."""
    attempts = sorted(directory.glob("attempt-*"), key=lambda path: int(path.name.partition("-")[2]))
    for attempt in reversed(attempts):
        try:
            facts = json.loads((attempt / "rank-0" / "progress.json").read_text(encoding="utf-8"))
        except FileNotFoundError:  # this attempt has not written one yet
            continue
        return tuple(facts["validation_scores"])
    return ()
