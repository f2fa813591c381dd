"""Fingerprints of what is learned and of the code that runs. Pure; knows no engine."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from conf.schema import Workload


def workload_fingerprint(workload: Workload, dataset_fingerprint: str) -> str:
    """8 hex digits over data content, model, recipe and seed.

    The data enter by their content, not by their root: the same images elsewhere are the same workload.
    """
    facts = workload.model_dump(mode="json") | {"data": dataset_fingerprint}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


@cache
def code_fingerprint() -> str:
    """12 hex digits over the source of `conf` and `tasks`, which is what ranks and workers run."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("conf", "tasks"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
