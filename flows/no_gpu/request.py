"""The request of the study "no GPU?", and its checks before any work."""

from __future__ import annotations

import copy
from functools import cache

from pydantic import BaseModel, ConfigDict, Field

from paceline.conf.config import Config
from paceline.conf.credentials import Text
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, apply, validate
from paceline.flows.checks import preflight
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.checks.pretrained import check_layer, check_weights
from paceline.flows.checks.results import reusable
from paceline.tasks.data.key import describe
from paceline.tasks.data.listing import Listing
from paceline.tasks.errors import InputError
from paceline.tasks.speedup.hardware_table import SHEETS
from paceline.tasks.speedup.study.no_gpu import FEATURES, SCRATCH, TUNED

BACKBONE_RATE = 0.1
"""Default of the fine-tuned network."""
LAYER = "pool"
GPU = "L4"
TUNED_SECTION = "recipe."


class NoGpuRequest(BaseModel):
    """Parameters of the study."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """Settings that all ways share."""
    pretrained: Text
    """Weights to begin with: a file, a run's id, `runs:/RUN_ID/model`, `models:/NAME@ALIAS` or a directory."""
    tuned: list[Text] = []
    """Settings of the recipe, as key=value, of the fine-tuned network alone."""
    layer: Text = LAYER
    """Layer whose output is the features."""
    # The bounds are for Prefect's form; `check_no_gpu` gives better messages.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Of each way."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Accuracy on the validation split to which the time is measured; None for the final accuracy of training from
    scratch in the same repeat."""
    gpu: Text = GPU
    """GPU whose data sheet bounds unmeasured values."""


@reusable
def check_no_gpu(request: NoGpuRequest, environment: Environment) -> dict[str, tuple[Config, PreflightResult]]:
    """Check everything before any work starts; return configuration and result by way.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    _check_request(request)
    list_data = cache(describe)
    listing = list_data(request.config.data)
    _check_data(request.config, listing)
    checked = {}
    for name, config in _configs(request).items():
        try:
            if name == FEATURES:
                check_weights(config, listing, environment)  # first: a network without a backbone has no such layer
                shape = (config.data.image_size, config.data.image_size, listing.channels)
                check_layer(request.layer, config.model, shape, (len(listing.class_names), 0))
            checked[name] = config, preflight.check(config, environment, list_data=list_data)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return checked


def _check_request(request: NoGpuRequest) -> None:
    config = request.config
    if request.repeats < 1:
        raise InputError(f"--repeats {request.repeats}; each way runs at least once: use 3 or more for intervals")
    if request.target is not None and not 0 < request.target <= 1:
        raise InputError(f"--target {request.target:g} is not an accuracy; give a share above 0, and at most 1")
    if request.gpu not in SHEETS:
        raise InputError(f"--gpu {request.gpu}: has no data sheet here; give one of {', '.join(SHEETS)}")
    wrong = [override for override in request.tuned if not override.startswith(TUNED_SECTION)]
    if wrong:
        raise InputError(
            f"--fine-tune {wrong[0]} is not a setting of the recipe, and the ways share all other settings"
        )
    if config.model.pretrained is not None or config.model.freeze != "none":
        raise InputError(
            "the ways differ in model.pretrained and model.freeze; name the weights after --pretrained",
            setting="model.pretrained" if config.model.pretrained is not None else "model.freeze",
        )
    if config.execution.accelerator == "gpu":
        raise InputError(
            "execution.accelerator=gpu cannot be used with paceline no-gpu, which measures on CPUs",
            hint="remove execution.accelerator=gpu",
            setting="execution.accelerator",
        )
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes}: all ways run on one host, which computes the features; "
            "use 1"
        )


def _check_data(config: Config, listing: Listing) -> None:
    if config.model.task != "classify":
        raise InputError(
            f"model.name={config.model.name} predicts pixels, which have no classifier on "
            "features; choose a network that classifies images"
        )
    if listing.target_names:
        raise InputError(
            f"data.source={config.data.source} has regression targets ({', '.join(listing.target_names)}), for which "
            "there is no classifier on features; choose a source with classes alone"
        )
    if not listing.num_validation:
        raise InputError(
            f"data.validation_fraction={config.data.validation_fraction} leaves no validation samples, on which the "
            "target is reached; raise it"
        )


def _configs(request: NoGpuRequest) -> dict[str, Config]:
    """The configurations, which differ in initial weights and, for fine-tuning, in the recipe."""
    tree = request.config.model_dump(mode="json")
    tree["execution"]["accelerator"] = "cpu"
    tree["speedup"] |= {"baseline": "none", "diagnose": False}
    weights = {"pretrained": request.pretrained}
    rate = tree["recipe"]["backbone_rate"]
    plain = tree["recipe"] | {"backbone_rate": 1.0}
    tuned = tree | {
        "model": tree["model"] | weights,
        "recipe": copy.deepcopy(plain) | {"backbone_rate": BACKBONE_RATE if rate == 1 else rate},
    }
    trees = {
        SCRATCH: tree | {"recipe": plain},
        TUNED: tuned,
        FEATURES: tree | {"recipe": plain, "model": tree["model"] | weights | {"freeze": "backbone"}},
    }
    for override in request.tuned:
        apply(trees[TUNED], override)
    configs = {}
    for name, settings in trees.items():
        try:
            configs[name] = validate(settings)
        except ConfigError as error:
            raise InputError(f"{name}: {error}") from error
    return configs
