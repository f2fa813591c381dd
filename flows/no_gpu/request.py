"""What is asked of the study "no GPU?", and its checks before any work: ways, data, weights, layer, hardware."""

from __future__ import annotations

import copy

from pydantic import BaseModel, ConfigDict, Field

from paceline.conf.config import Config
from paceline.conf.credentials import Text
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, apply, validate
from paceline.flows.checks import preflight
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.checks.pretrained import check_layer, check_weights
from paceline.tasks.data.key import describe
from paceline.tasks.errors import InputError
from paceline.tasks.records import Listing
from paceline.tasks.speedup.hardware_table import SHEETS
from paceline.tasks.speedup.study.no_gpu import FEATURES, SCRATCH, TUNED

BACKBONE_RATE = 0.1
"""Of the fine-tuned network, unless another is asked for."""
LAYER = "pool"
GPU = "L4"
TUNED_SECTION = "recipe."


class NoGpuRequest(BaseModel):
    """What is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """What all ways have in common."""
    pretrained: Text
    """Weights to begin with: a file, a run's id, `runs:/RUN_ID/model`, `models:/NAME@ALIAS` or a directory."""
    tuned: list[Text] = []
    """Settings of the recipe, as key=value, of the fine-tuned network alone."""
    layer: Text = LAYER
    """Whose output the classifier takes as features."""
    # The bounds are for the form, and refuse there; `check_no_gpu` says what is wrong in a sentence.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Of each way."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Accuracy on the validation split to which the time is taken; None for what training from scratch ends with in
    the same repeat."""
    gpu: Text = GPU
    """GPU whose data sheet bounds what nobody measured."""


def check_no_gpu(request: NoGpuRequest, site: Environment) -> dict[str, tuple[Config, PreflightResult]]:
    """Check everything before any work starts; the ways by their names, ready to be gone.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    _check_asked(request)
    listing = describe(request.config.data)
    _check_data(request.config, listing)
    ready = {}
    for name, config in _configs(request).items():
        try:
            if name == FEATURES:
                _check_features(request, config, listing, site)
            ready[name] = config, preflight.check(config, site)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return ready


def _check_asked(request: NoGpuRequest) -> None:
    config = request.config
    if request.repeats < 1:
        raise InputError(f"--repeats {request.repeats}; each way is gone at least once: use 3 or more for intervals")
    if request.target is not None and not 0 < request.target <= 1:
        raise InputError(f"--target {request.target:g} is no accuracy; give a share above 0, and at most 1")
    if request.gpu not in SHEETS:
        raise InputError(f"--gpu {request.gpu}: no data sheet is known; give one of {', '.join(SHEETS)}")
    wrong = [one for one in request.tuned if not one.startswith(TUNED_SECTION)]
    if wrong:
        raise InputError(f"--fine-tune {wrong[0]} is no setting of the recipe, and all else is the same for all ways")
    if config.model.pretrained is not None or config.model.freeze != "none":
        raise InputError(
            "model.pretrained and model.freeze are what the ways differ in; name the weights after --pretrained"
        )
    if config.execution.accelerator == "gpu":
        raise InputError(
            "execution.accelerator=gpu cannot be used with paceline no-gpu, which measures on CPUs",
            hint="remove execution.accelerator=gpu",
            setting="execution.accelerator",
        )
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes}: features are computed on one host, and all ways have "
            "the same; use 1"
        )


def _check_data(config: Config, listing: Listing) -> None:
    if config.model.task != "classify":
        raise InputError(
            f"model.name={config.model.name} tells something of each pixel, for which there is no classifier on "
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


def _check_features(request: NoGpuRequest, config: Config, listing: Listing, site: Environment) -> None:
    """Weights before layers: of a network without a backbone it is not the layer that is wrong."""
    check_weights(config, listing, site)
    shape = (config.data.image_size, config.data.image_size, listing.channels)
    check_layer(request.layer, config.model, shape, (len(listing.class_names), 0))


def _configs(request: NoGpuRequest) -> dict[str, Config]:
    """Of each way: the same but for how it begins and, fine-tuned, the recipe."""
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
    found = {}
    for name, one in trees.items():
        try:
            found[name] = validate(one)
        except ConfigError as error:
            raise InputError(f"{name}: {error}") from error
    return found
