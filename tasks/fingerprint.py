"""Fingerprints of what is learned and of the code that runs. Knows no engine."""

import copy
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.conf.config import Config, Workload
from paceline.conf.lightning import Lightning
from paceline.conf.plugins import code_digest

FIELDS_ADDED_LATER = {
    *("data.signal", "data.classes", "data.num_frames", "data.fit", "data.stored_size", "data.storage"),
    *("data.jpeg_quality", "data.trust_directory_times", "model.pretrained", "model.freeze"),
    *("recipe.backbone_rate", "recipe.vary", "recipe.ema", "recipe.progressive_size"),
    *("execution.activation_checkpointing", "execution.micro_batch"),
}
"""Settings that are newer than stored fingerprints; add each new one of these sections."""


def workload_fingerprint(workload: Workload, dataset_fingerprint: str, weights: str | None = None) -> str:
    """8 hex digits over data content, model, weights to begin with, recipe and seed.

    Data and weights enter by their content, not by their place: the same ones elsewhere are the same workload. A model
    of the user's enters with its package, by version and code.
    """
    facts = without_later(workload.model_dump(mode="json")) | {"data": dataset_fingerprint}
    if weights is not None:
        facts["model"]["pretrained"] = weights
    else:
        facts["model"].pop("pretrained", None)
    if workload.model.plugin is not None:
        facts["package"] = workload.model.plugin.identity
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def lightning_fingerprint(lightning: Lightning) -> str:
    """8 hex digits over settings, code and first checkpoint of the user's module; what the data hold is not known."""
    later = {name for name in ("ckpt_sha256", "has_partitions") if not getattr(lightning, name)}  # newer than some
    facts = lightning.model_dump(mode="json", exclude={"code", "ckpt_path", "given", "averages"} | later)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def configuration_fingerprint(config: Config) -> str:
    """8 hex digits over all settings and the code of Paceline, whatever the user's own code is by now."""
    facts = [config.model_dump_json(exclude={"name": True, "lightning": {"packages"}}), code_fingerprint()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


def series_fingerprint(config: Config, devices: str, class_names: Sequence[str]) -> str:
    """8 hex digits that runs have in common whose speed and accuracy should not change from one to the next.

    Their name, settings and classes, where their data lie, and their devices. The data there may grow from night to
    night, code and versions may be brought up to date: those are what a regression is looked for after. So own code
    enters with the settings that its author named, and without its defaults, which a change of the code may change.
    """
    own, sections = config.lightning, {"name", "data", "model", "recipe", "execution"}
    if own.settings:
        sections -= {"data", "model", "recipe"}
    settings = without_later(config.model_dump(mode="json", include=sections))
    if settings["execution"]["checkpoint_steps"] == "auto":  # the default was null when series began
        settings["execution"]["checkpoint_steps"] = None
    facts = settings | {"cluster": config.cluster.kind, "devices": devices, "classes": list(class_names)}
    if own.settings:
        given = own.given or own.settings
        facts["own"] = {name: value for name, value in given.items() if name != "seed_everything"}
        facts["checkpoint"] = own.ckpt_sha256
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def without_later(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that came later, where they are as if they were not there.

    Otherwise an upgrade would end every series of runs, and no older run could resume.
    """
    defaults, rest = Config().model_dump(mode="json"), copy.deepcopy(settings)
    for section, _, name in (field.partition(".") for field in FIELDS_ADDED_LATER):
        if name in rest.get(section, {}) and rest[section][name] == defaults[section][name]:
            del rest[section][name]
    return rest


@cache
def code_fingerprint() -> str:
    """12 hex digits over the source of `conf` and `tasks`, which is what ranks and workers run."""
    root = Path(__file__).parent.parent
    return code_digest((root / "conf", root / "tasks"))
