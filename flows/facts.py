"""What a comparison of a training with others looks at, as this process knows it."""

from __future__ import annotations

from conf.config import Config
from tasks.fingerprint import code_fingerprint
from tasks.records import Plan, PreparedSet, Pretrained
from tasks.speedup.comparability import facts_of
from tasks.track.environment import package_versions


def run_facts(config: Config, prepared: PreparedSet, plan: Plan, pretrained: Pretrained | None) -> dict[str, str]:
    """Settings, data, weights, code, versions and devices, see `tasks.speedup.comparability.facts_of`."""
    return facts_of(config, prepared.fingerprint, code_fingerprint(), package_versions(), plan, pretrained)
