"""Reads a configuration of LightningCLI, a file or settings of the command line, into a `Config`."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.execution import Precision
from paceline.conf.hints import HintedError, did_you_mean, suggest, typed
from paceline.conf.lightning import EXECUTION, FIXED, SECTIONS, Lightning
from paceline.conf.load import LIGHTNING, apply, field_paths, make_config, read_tree, validate
from paceline.conf.plugins import MISSING, code_of
from paceline.flows.checks.origin import check_code
from paceline.flows.checks.prestart import close_ahead, start_fork_server
from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of
from paceline.tasks.train.lightning import child
from paceline.tasks.train.lightning.code import FOLDER, check_directory, data_paths, package_names, require_named

CHECKPOINT = "ckpt_path"
"""Of LightningCLI too, for the subcommand `fit` as a whole."""
WHOLE = (f"{CHECKPOINT}=", "cli=")
"""Settings behind the command that are of no section; `cli` is the class path of the user's own LightningCLI."""
OWN = ("execution.", "cluster.", "speedup.", "track.", "limits.", "name=")
"""Settings of Paceline that go with them."""
WORDS = {
    "precision": {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"},
    "accelerator": {"cuda": "gpu"},
}
"""Values of the trainer that Paceline calls otherwise."""
HALF = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}
"""Precisions of Lightning with weights in 16 bits, and what Paceline has in their place."""
PREDICTION = ("model.", "data.", "data=", "seed_everything=", "trainer.limit_predict_batches=")
"""Settings of LightningCLI that a prediction may change."""
PREDICTION_KEPT = ("limit_predict_batches", "inference_mode", "deterministic", "benchmark")
"""Settings of the trainer that a prediction takes from the training."""
DDP = ("auto", "ddp", "ddp_find_unused_parameters_true")
EQUIVALENTS = {"recipe.num_epochs": "trainer.max_epochs", "seed": "seed_everything"}
"""Settings of presets, and of LightningCLI."""


def load_lightning(
    preset: str,
    overrides: Sequence[str],
    directory: str | None,
    meanwhile: Callable[[Config | None], None] | None = None,
) -> Config:
    """Read a file of LightningCLI, or settings alone, with code from a directory or from installed packages.

    `meanwhile` is called while another process imports this code, with what is known of the configuration: its cluster
    and its execution; None if these are wrong.

    Raises InputError: a class or one of its arguments does not exist, or a setting is Paceline's.
    """
    given: dict[str, Any] = dict(each.split("=", 1) for each in overrides if each.startswith(WHOLE))
    is_file = Path(preset).is_file()
    if preset != LIGHTNING and not is_file:
        raise InputError(f"no file is called {preset}", hint="give the path of a file of LightningCLI", setting="file")
    file = str(Path(preset).absolute()) if is_file else None
    of_file = read_tree(Path(file)) if file else {}
    has_own_sections = "cli" in given or "cli" in (of_file.get("fit") or of_file)
    for_paceline, of_cli = _split([override for override in overrides if not override.startswith(WHOLE)])
    for override in of_cli:
        key = override.partition("=")[0]
        if key.partition(".")[0].rstrip("+") not in SECTIONS and not has_own_sections:
            near = EQUIVALENTS.get(key) or suggest(
                key, [*SECTIONS, *(path for path in field_paths() if f"{path}=".startswith(OWN))]
            )
            hint = did_you_mean(near, f"settings start with {', '.join((*SECTIONS, *OWN))}")
            raise InputError(f"{key} is not a setting of your own Lightning code", hint=hint, setting=key)
    tree = apply({}, *for_paceline)
    code = None if directory is None else str(Path(directory).expanduser().absolute())
    if code is not None:
        check_directory(Path(code))
    request = child.Request(task="parse", code=code, file=file, variants=(of_cli,), **given)
    if meanwhile is None:
        answer = child.ask(request)
    else:
        known = _known(of_file, tree, of_cli)
        server = start_fork_server(known, Environment()) if known is not None else None
        try:
            answer = child.ask(request, partial(meanwhile, known), server)
        except BaseException:
            close_ahead()
            raise
    (parsed,), found = answer["variants"], answer[CHECKPOINT]
    settings = parsed["settings"]
    name = settings["model"]["class_path"].rpartition(".")[2] if file is None else Path(preset).stem
    seed = settings.get("seed_everything")
    tree = {"name": name, "seed": seed if type(seed) is int else Config().seed} | tree
    tree["execution"] = EXECUTION | _take_execution(parsed, tree.get("execution", {}))
    tree["speedup"] = FIXED["speedup"] | tree.get("speedup", {})
    start = {CHECKPOINT: str(Path(found).absolute()), "ckpt_sha256": sha256_of(Path(found))} if found else {}
    tree["lightning"] = parsed | {"code": code} | start
    return validate(tree)


def _known(of_file: dict[str, Any], tree: dict[str, Any], of_cli: Sequence[str]) -> Config | None:
    """The configuration but for what only LightningCLI reads; None where it is wrong, which that reports."""
    with suppress(HintedError, yaml.YAMLError, TypeError, ValueError, AttributeError):
        trainer = dict((of_file.get("fit") or of_file).get("trainer") or {})
        for key, _, value in (override.partition("=") for override in of_cli):
            if key.startswith("trainer."):
                trainer[key.removeprefix("trainer.")] = yaml.safe_load(value)
        execution = EXECUTION | execution_of(trainer, tree.get("execution", {}))
        lightning = {"settings": {"trainer": trainer}}
        return validate(tree | {"execution": execution, "speedup": FIXED["speedup"], "lightning": lightning})
    return None


def configure(config: Config, variants: Sequence[Sequence[str]], run: Path | None = None) -> list[Config]:
    """A configuration with each of several lists of overrides; LightningCLI reads those of own code, all in one go.

    A directory of code is that of the settings, or the copy in the directory of a run.

    Raises ConfigError or InputError as `load_lightning` does.
    """
    if not config.lightning.settings:
        return [make_config(config, list(overrides)) for overrides in variants]
    split = [_split(overrides) for overrides in variants]
    distinct = tuple(dict.fromkeys(of_cli for _, of_cli in split if of_cli))
    parsed = {}
    if distinct:
        own = config.lightning
        directory = str(run / FOLDER) if own.code and run else own.code
        paths = data_paths(own.settings)
        request = child.Request(task="parse", code=directory, settings=own.settings, variants=distinct, data=paths)
        parsed = dict(zip(distinct, child.ask(request)["variants"], strict=True))
    configs = []
    for for_paceline, of_cli in split:
        tree = config.model_dump(mode="json")
        if of_cli:
            tree["lightning"] |= copy.deepcopy(parsed[of_cli])
            tree["execution"] = _take_execution(tree["lightning"], tree["execution"])
        configs.append(validate(apply(tree, *for_paceline)))
    return configs


def _split(overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Overrides of Paceline's settings, and those that LightningCLI reads."""
    for_paceline = tuple(override for override in overrides if override.startswith(OWN))
    return for_paceline, tuple(override for override in overrides if override not in for_paceline)


def _take_execution(own: dict[str, Any], execution: dict[str, Any]) -> dict[str, Any]:
    trainer = own["settings"].get("trainer", {})
    execution = execution_of(trainer, execution)
    check_trainer(trainer)
    given = own.get("given", {}).get("trainer", {})
    for name in [name for name in given if name not in trainer]:
        del given[name]
    return execution


def read_again(config: Config, run: Path | None, environment: Environment) -> Config:
    """The configuration of a deployment with the code as it is now, or as a run that is resumed has copied it.

    Raises InputError: the code is gone, it does not fit the settings any more, or only Prefect's API names it.
    """
    own = config.lightning
    if own.code is not None and run is not None and (run / FOLDER).is_dir():
        own = own.model_copy(update={"code": str(run / FOLDER)})
    check_code(own, environment)
    if own.code is not None:
        check_directory(Path(own.code))
    (parsed,) = child.ask(child.Request(task="parse", code=own.code, settings=own.settings, variants=((),)))["variants"]
    tree = config.model_dump(mode="json")
    tree["lightning"] |= parsed | {"code": own.code, "given": copy.deepcopy(own.settings)}
    tree["execution"] = _take_execution(tree["lightning"], tree["execution"])
    return validate(tree)


def load_prediction(trained: Lightning, precision: Precision, overrides: Sequence[str]) -> Config:
    """The configuration of a prediction with trained code; raises InputError as `load_lightning`."""
    of_cli = [override for override in overrides if override.startswith(PREDICTION)]
    given: dict[str, Any] = dict(each.split("=", 1) for each in overrides if each.startswith(f"{CHECKPOINT}="))
    overrides = [override for override in overrides if override.partition("=")[0] not in given]
    for override in overrides:
        key = override.partition("=")[0]
        if override not in of_cli and not override.startswith(("execution.", "cluster.", "limits.", "track.")):
            near = suggest(key, ["trainer.limit_predict_batches", CHECKPOINT])
            hint = did_you_mean(near, "use settings of model, data, execution, cluster, limits or track")
            raise InputError(f"{key} is not a setting of a prediction with your own code", hint=hint, setting=key)
    directory = Path(trained.code) if trained.code else None
    names = package_names(trained.settings, directory)
    if absent := [name for name in names if code_of(name) == MISSING]:
        needed = [package.partition(" (")[0] for package in trained.packages[-len(names) :]]
        fault = f"the model needs the package {' and '.join(absent)}, which is not installed"
        raise InputError(fault, hint=f"install {' and '.join(needed)}", setting="MODEL")
    trainer = trained.settings.get("trainer", {})
    settings = trained.settings | {"trainer": {key: trainer[key] for key in PREDICTION_KEPT if key in trainer}}
    require_named(settings, trained.packages, directory)
    request = child.Request(task="predict", code=trained.code, settings=settings, variants=(tuple(of_cli),), **given)
    answer = child.ask(request)
    (parsed,), found = answer["variants"], answer[CHECKPOINT]
    tree = apply({}, *(override for override in overrides if override not in of_cli))
    execution = EXECUTION | {"precision": precision, "num_devices": 1} | tree.get("execution", {})
    for name, value in (("num_devices", 1), ("num_nodes", 1), ("compile", "off")):
        if execution.get(name, value) != value:
            fault = f"execution.{name}={execution[name]} cannot be used to predict with your own code so far"
            raise InputError(fault, hint=f"use execution.{name}={value}", setting=f"execution.{name}")
    return validate(
        tree
        | {
            "name": settings["model"]["class_path"].rpartition(".")[2],
            "execution": execution,
            "speedup": FIXED["speedup"],
            "lightning": parsed | {"code": trained.code} | ({CHECKPOINT: str(Path(found).absolute())} if found else {}),
        }
    )


def execution_of(trainer: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The execution with what a trainer's settings say of it, which are removed from them.

    Raises InputError: both say something else.
    """
    execution = {"precision": EXECUTION["precision"]} | given
    for key, name in (("devices", "num_devices"), ("num_nodes",) * 2, ("precision",) * 2, ("accelerator",) * 2):
        value = trainer.pop(key, None)
        if value in (None, "auto") or (value in (-1, "-1") and name in given):
            continue
        if value in (-1, "-1"):
            raise InputError(
                f"trainer.{key}={value} leaves the number to the host",
                hint=f"give the number: execution.{name}=2",
                setting=f"trainer.{key}",
            )
        if isinstance(value, list) and value != [*range(len(value))] and str(given.get(name)) != str(len(value)):
            raise InputError(
                f"trainer.{key}={value} chooses devices of the host, and Paceline takes the first that it sees",
                hint=f"use execution.{name}={len(value)} and set CUDA_VISIBLE_DEVICES={','.join(map(str, value))}",
                setting=f"trainer.{key}",
            )
        value = len(value) if isinstance(value, list) else WORDS.get(key, {}).get(str(value), value)
        if given.get(name, value) not in (value, str(value)):
            raise InputError(
                f"trainer.{key}={value} conflicts with execution.{name}={given[name]}",
                hint=f"remove trainer.{key}: Paceline takes execution.{name}",
                setting=f"trainer.{key}",
            )
        execution[name] = value
    if (half := execution["precision"]) in HALF:
        raise InputError(
            f"execution.precision={half} keeps the weights in 16 bits, which cannot be used with Paceline so far",
            hint=f"use execution.precision={HALF[half]}",
            setting="execution.precision",
        )
    return execution


def check_trainer(trainer: dict[str, Any]) -> None:
    """Raise InputError for settings of the trainer that Paceline decides, and for those that it does not support."""
    if trainer.get("strategy", "auto") not in DDP:
        _refuse("strategy", trainer["strategy"], "use trainer.strategy=ddp, or execution.strategy=fsdp")
    hints = {
        "logger": "remove it; Paceline logs to MLflow: see track.experiment",
        "plugins": "remove it; see execution.precision for precision plugins",
        "fast_dev_run": "use trainer.max_steps=1",
        "barebones": "remove it",
        "model_registry": "remove it; see track.register",
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
