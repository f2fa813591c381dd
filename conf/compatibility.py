"""Checks between sections of a configuration. Each raises ValueError with the value, the rule and the fix."""

from paceline.conf import plugins
from paceline.conf.data import SIGNAL_SOURCES, Data
from paceline.conf.execution import Execution
from paceline.conf.model import Model
from paceline.conf.recipe import FLIPPING, Recipe

WHITENED_MIN_SIZE = 9  # pixels of an image: whitening removes one, and the rest is halved three times
ANY_SIZE = ("convblocks", "resnet18", "resnet50", "sequence")  # networks for images of any size
MIN_DNCNN_DEPTH = 2  # convolutions: into the features, and out of them


def check_task(data: Data, model: Model, recipe: Recipe) -> None:
    """The data must have the labels that the network learns."""
    name, source = model.name, data.source
    network, samples = plugins.model_facts(name), plugins.source_facts(source)
    wrong = f"model.name={name} does not fit data.source={source}"
    if network.takes_targets != bool(samples.target_names):
        lack = "needs angles" if network.takes_targets else "does not learn angles"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=twohead with data.source=rotated_digits")
    if network.takes_clips != samples.has_clips:
        lack = "takes clips" if network.takes_clips else "takes images"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=sequence with data.source=clips or motions")
    if (network.task == "segment") != samples.has_masks:
        lack = "does not learn masks" if samples.has_masks else "needs masks"
        raise ValueError(f"{wrong}: the model {lack}; use model.name=unet with data.source=pairs or shapes")
    recipe.vary.check(network.task, has_targets=network.takes_targets, channels=samples.channels, source=source)
    views, side = model.test_views, data.image_size
    if network.task != "classify" and views > 1:
        raise ValueError(f"model.test_views={views} cannot be used with model.name={name}; use model.test_views=1")
    if network.takes_targets and views > 1:
        raise ValueError(
            f"model.test_views={views} cannot be used with model.name={name}: a mirror image has another angle; "
            "use model.test_views=1"
        )
    if name == "unet" and side % 2**model.depth:
        raise ValueError(
            f"data.image_size={side} cannot be halved model.depth={model.depth} times; "
            f"use a multiple of {2**model.depth}, or a smaller depth"
        )
    if name == "dncnn" and model.depth < MIN_DNCNN_DEPTH:
        raise ValueError(f"model.depth={model.depth} is too small for dncnn; use {MIN_DNCNN_DEPTH} or more")


def check_network(data: Data, model: Model, recipe: Recipe, execution: Execution) -> None:
    """Limits of networks and optimizers."""
    name, side = model.name, data.image_size
    if name == "whitened" and side < WHITENED_MIN_SIZE:
        raise ValueError(
            f"data.image_size={side} is too small for model.name=whitened, which halves images three times; "
            f"use at least {WHITENED_MIN_SIZE}, or convblocks"
        )
    if recipe.ema in (0, 1):
        outcome = "the weights of the last step, which null gives" if recipe.ema == 0 else "no weights at all"
        raise ValueError(f"recipe.ema={recipe.ema:g} would average {outcome}; use a decay such as 0.999, or null")
    start = recipe.progressive_size
    if start is not None and name not in ANY_SIZE:
        raise ValueError(
            f"recipe.progressive_size={start} cannot be used with model.name={name}: only {', '.join(ANY_SIZE)} take "
            "images of other sizes than data.image_size; use recipe.progressive_size=null"
        )
    if start is not None and start >= side:
        raise ValueError(
            f"recipe.progressive_size={start} is not below data.image_size={side}, up to which images grow; use a "
            "smaller recipe.progressive_size, or null"
        )
    if recipe.optimizer == "muon" and execution.strategy == "fsdp":
        raise ValueError(
            "recipe.optimizer=muon cannot be used with execution.strategy=fsdp: it takes whole filters, and each rank "
            "would have a part of them; use ddp, or another optimizer"
        )


def check_mirrors(data: Data, model: Model, recipe: Recipe) -> None:
    """Sounds and motions have a direction, which a mirror image reverses."""
    source = data.source
    if source in SIGNAL_SOURCES:
        mirrored = f"mirrors images, and those of data.source={source} have time from left to right"
    elif source == "motions":
        mirrored = "mirrors clips, and data.source=motions has their directions as classes"
    else:
        return
    if recipe.augment in FLIPPING:
        raise ValueError(f"recipe.augment={recipe.augment} {mirrored}; use shift or none")
    if model.test_views > 1:
        raise ValueError(f"model.test_views={model.test_views} {mirrored}; use model.test_views=1")


def check_transfer(model: Model, recipe: Recipe) -> None:
    """Settings that depend on pretrained weights."""
    if model.freeze != "none" and model.pretrained is None:
        raise ValueError(
            f"model.freeze={model.freeze} without model.pretrained would freeze random weights; "
            "give weights, for example model.pretrained=RUN_ID"
        )
    rate = recipe.backbone_rate
    if rate == 1:
        return
    if model.freeze == "backbone":
        raise ValueError(
            f"recipe.backbone_rate={rate:g} cannot be used with model.freeze=backbone, which trains the head alone; "
            "use model.freeze=none or recipe.backbone_rate=1"
        )
    if recipe.optimizer == "muon":
        raise ValueError(
            f"recipe.backbone_rate={rate:g} cannot be used with recipe.optimizer=muon, whose rates are for filters, "
            "biases and dense layers; use another optimizer"
        )
