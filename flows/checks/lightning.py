"""Reads a configuration of LightningCLI, a file or settings of the command line, into a `Config`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.conf.config import Config
from paceline.conf.hints import did_you_mean, suggest, typed
from paceline.conf.lightning import FIXED
from paceline.conf.load import PRESETS, apply, field_paths, find_yaml, preset_names, validate
from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning import child
from paceline.tasks.train.lightning.code import check_size

WORD = "lightning"
"""In place of a preset: all settings are on the command line."""
SECTIONS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything")
"""Of LightningCLI."""
CHECKPOINT = "ckpt_path"
"""Of LightningCLI too, for the subcommand `fit` as a whole."""
OWN = ("execution.", "cluster.", "speedup.", "track.", "limits.", "name=")
"""Settings of Paceline that go with them."""
WORDS = {
    "precision": {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"},
    "accelerator": {"cuda": "gpu"},
}
"""Values of the trainer that Paceline calls otherwise."""
DDP = ("auto", "ddp", "ddp_find_unused_parameters_true")
EQUIVALENTS = {"recipe.num_epochs": "trainer.max_epochs", "seed": "seed_everything"}
"""Settings of presets, and of LightningCLI."""


def is_lightning(preset: str) -> bool:
    """Whether this is a file of LightningCLI, or the word for settings on the command line."""
    path = None if preset in preset_names() else find_yaml(PRESETS, preset)
    if path is None:
        return preset == WORD
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return False  # the reader of presets reports it
    if not isinstance(tree, dict):
        return False
    model = tree.get("model")
    return bool({"fit", "trainer"} & {*tree}) or (isinstance(model, dict) and "class_path" in model)


def load_lightning(preset: str, overrides: Sequence[str], directory: str | None) -> Config:
    """Read a file of LightningCLI, or settings alone, with code from a directory or from installed packages.

    Raises InputError: a class or one of its arguments does not exist, or a setting is Paceline's.
    """
    for_paceline = [override for override in overrides if override.startswith(OWN)]
    given = dict(override.split("=", 1) for override in overrides if override.startswith(f"{CHECKPOINT}="))
    overrides = [override for override in overrides if not override.startswith(f"{CHECKPOINT}=")]
    for override in overrides:
        key = override.partition("=")[0]
        if override not in for_paceline and key.partition(".")[0].rstrip("+") not in SECTIONS:
            near = EQUIVALENTS.get(key) or suggest(
                key, [*SECTIONS, *(path for path in field_paths() if f"{path}=".startswith(OWN))]
            )
            hint = did_you_mean(near, f"settings start with {', '.join((*SECTIONS, *OWN))}")
            raise InputError(f"{key} is not a setting of your own Lightning code", hint=hint, setting=key)
    tree = apply({}, *for_paceline)
    code = Path(directory).expanduser().absolute() if directory is not None else None
    if code is not None:
        check_size(code)
    request = child.Request(
        task="parse",
        code=str(code) if code else None,
        file=None if preset == WORD and not Path(preset).is_file() else str(Path(preset).absolute()),
        ckpt_path=given.get(CHECKPOINT),
        overrides=tuple(override for override in overrides if override not in for_paceline),
    )
    answer = child.ask(request)
    settings = answer["settings"]
    trainer = settings.get("trainer", {})
    tree["execution"] = FIXED["execution"] | execution_of(trainer, tree.get("execution", {}))
    check_trainer(trainer)
    tree.setdefault(
        "name", settings["model"]["class_path"].rpartition(".")[2] if request.file is None else Path(preset).stem
    )
    tree["speedup"] = FIXED["speedup"] | tree.get("speedup", {})
    tree["lightning"] = {
        "settings": settings,
        "code": request.code,
        **{key: answer[key] for key in ("packages", "prepares_data")},
        CHECKPOINT: str(Path(answer[CHECKPOINT]).absolute()) if answer[CHECKPOINT] else None,
    }
    return validate(tree)


def execution_of(trainer: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The execution with what a trainer's settings say of it, which are removed from them.

    Raises InputError: both say something else.
    """
    execution = {"precision": "32-true"} | given
    for key, name in (("devices", "num_devices"), ("num_nodes",) * 2, ("precision",) * 2, ("accelerator",) * 2):
        value = trainer.pop(key, None)
        if value in (None, "auto", -1, "-1"):
            continue
        value = len(value) if isinstance(value, list) else WORDS.get(key, {}).get(str(value), value)
        if given.get(name, value) not in (value, str(value)):
            raise InputError(
                f"trainer.{key}={value} conflicts with execution.{name}={given[name]}",
                hint=f"remove trainer.{key}: Paceline takes execution.{name}",
                setting=f"trainer.{key}",
            )
        execution[name] = value
    return execution


def check_trainer(trainer: dict[str, Any]) -> None:
    """Raise InputError for settings of the trainer that Paceline decides, and for those that it does not support."""
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = callback.get("class_path", "") if isinstance(callback, dict) else str(callback)
        if path.rpartition(".")[2] in ("ModelCheckpoint", "OnExceptionCheckpoint"):
            _refuse("callbacks", path, "remove it; Paceline saves checkpoints: see execution.checkpoint_steps")
    if trainer.get("strategy", "auto") not in DDP:
        _refuse("strategy", trainer["strategy"], "use trainer.strategy=ddp, or remove it: see execution.strategy")
    hints = {
        "logger": "remove it; Paceline logs to MLflow: see track.experiment",
        "plugins": "remove it; see execution.precision for precision plugins",
        "fast_dev_run": "use trainer.max_steps=1",
        "barebones": "remove it",
    }
    for key, hint in hints.items():
        value = trainer.pop(key, None)
        if value and not (key == "logger" and value is True):
            _refuse(key, value, hint)
    trainer.pop("enable_checkpointing", None)
    trainer.pop("enable_progress_bar", None)


def _refuse(key: str, value: object, hint: str) -> None:
    shown = value.get("class_path", typed(value)) if isinstance(value, dict) else typed(value)
    raise InputError(f"trainer.{key}={shown} cannot be used with Paceline", hint=hint, setting=f"trainer.{key}")
