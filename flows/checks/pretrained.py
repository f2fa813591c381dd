"""Initial weights of a network: find them by name, compare them with the network, and copy them where ranks read."""

import os
from pathlib import Path

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.model import Model
from paceline.tasks.data.listing import Listing
from paceline.tasks.errors import InputError
from paceline.tasks.files import hold, sha256_of, write_durably
from paceline.tasks.model_bundle import WEIGHTS, check_package
from paceline.tasks.records.data import ModelFacts, Pretrained

SHAPE = {"name", "width", "depth"}


def check_weights(config: Config, listing: Listing, environment: Environment) -> Pretrained | None:
    """Find the initial weights of a network, or None for those of the seed; raise InputError if they do not fit."""
    reference = config.model.pretrained
    if reference is None and config.recipe.backbone_rate == 1:
        return None
    from paceline.tasks.model.pretrained import blank_network, check_fit, read_weights  # torch: a second
    from paceline.tasks.model.transfer import check_parts

    shape = (config.data.image_size, config.data.image_size, listing.channels)
    network = blank_network(config.model, shape, len(listing.class_names), len(listing.target_names))
    check_parts(config, network)
    if reference is None:
        return None
    where, (path, facts), same_classes = f"model.pretrained={reference}", _place(reference, environment), True
    if facts is not None:
        if facts.model.name != config.model.name:
            raise InputError(_other_network(facts.model, where))
        try:
            check_package(config.model, facts.package)  # a changed package is fine if the weights still fit
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        same_classes = (facts.class_names, facts.target_names) == (listing.class_names, listing.target_names)
    tensors, digest = read_weights(path)
    try:
        reinitialized = check_fit(tensors, network, same_classes=same_classes, where=where)
    except InputError as error:
        if facts is not None and facts.model.model_dump(include=SHAPE) != config.model.model_dump(include=SHAPE):
            raise InputError(_other_network(facts.model, where)) from error
        raise
    return Pretrained(
        reference=reference,
        path=_store(path, digest, environment.root),
        sha256=digest,
        num_tensors=len(network.state_dict()) - len(reinitialized),
        reinitialized=reinitialized,
    )


def check_layer(layer: str, model: Model, image_shape: tuple[int, int, int], heads: tuple[int, int]) -> int:
    """Count the values of a layer per image (height, width, channels); the heads are classes and regression targets."""
    from paceline.tasks.model.networks.registry import build_network
    from paceline.tasks.model.transfer import layer_sizes  # torch: a second

    sizes = layer_sizes(build_network(model, image_shape, *heads), image_shape)
    if layer not in sizes:
        raise InputError(f"--layer {layer}: {model.name} has no such layer; it has {', '.join(sizes)}")
    return sizes[layer]


def check_own_size(model: Model, image_shape: tuple[int, int, int], heads: tuple[int, int]) -> None:
    """Raise InputError if a model cannot predict images at their own sizes; for the arguments see `check_layer`."""
    from paceline.tasks.model.networks.registry import build_network
    from paceline.tasks.model.transfer import reach_and_stride
    from paceline.tasks.predict.tiles import MAX_SIDE, grid_for

    if model.task == "classify":
        fault = "--own-size applies to segmentation and denoising models, and this model classifies whole images"
        raise InputError(fault, hint="remove --own-size")
    looks = reach_and_stride(build_network(model, image_shape, *heads))
    if looks is None or looks[0] < 0 or looks[1] < 1:
        raise InputError(
            f"--own-size: the model {model.name} does not say how far from a pixel it looks; give its module the "
            "attributes `reach` (0 or more) and `stride` (1 or more), in pixels"
        )
    if grid_for(*looks).side > MAX_SIDE:
        raise InputError(
            f"--own-size: the model {model.name} looks {looks[0]} pixels far, which takes tiles of more than "
            f"{MAX_SIDE} pixels a side; train one of less depth"
        )


def _place(reference: str, environment: Environment) -> tuple[Path, ModelFacts | None]:
    """The file of weights, and the facts of its model if they are recorded."""
    from paceline.tasks.track.models import fetch_model, has_recorded_digest  # MLflow: a second

    if has_recorded_digest(reference) or os.path.isdir(reference):  # noqa: PTH112  which takes any text, however long
        try:
            directory, facts = fetch_model(environment.tracking_uri, reference, environment.root)
        except InputError as error:
            reason = str(error).removeprefix(f"{reference}: ")
            raise InputError(f"model.pretrained={reference}: {reason}") from error
        if not isinstance(facts, ModelFacts):
            fault = f"model.pretrained={reference}: is a model of own Lightning code"
            raise InputError(f"{fault}; name the file of weights: {directory / WEIGHTS}")
        return directory / WEIGHTS, facts
    path = Path(reference).expanduser().absolute()
    if not os.path.isfile(path):  # noqa: PTH113
        raise InputError(
            f"model.pretrained={reference}: no such file; give a file of weights (.safetensors, .pt, .ckpt), a run's "
            "id, runs:/RUN_ID/model, models:/NAME@ALIAS or a directory with a model"
        )
    return path, None


def _other_network(model: Model, where: str) -> str:
    settings = " ".join(f"model.{name}={value}" for name, value in model.model_dump(include=SHAPE).items())
    return f"{where}: was trained with {settings}, and the network here is another one; set the same"


def _store(path: Path, digest: str, home: Path) -> str:
    """Copy the weights into the state directory, which all hosts see, by the digest of their content; hold the copy."""
    if path.is_relative_to(home / "models"):  # by content already
        return str(path)
    stored = home / "pretrained" / f"{digest}{path.suffix}"
    if not (hold(stored) and sha256_of(stored) == digest):
        try:
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_durably(stored, path.read_bytes())
            hold(stored)
        except OSError as error:
            raise InputError(f"{stored}: cannot be written ({error.strerror}); free some space") from error
    return str(stored)
