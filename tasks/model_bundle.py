"""A trained model as two files: what it is (`model.json`) and its weights (`weights.pt`). Neither holds code.

Whatever comes from outside is checked: the description field by field, the weights by their digest. A model of own
Lightning code names classes, which a prediction imports from the packages that the description names, see
`paceline.tasks.train.lightning.code.require_named`; its digest is recorded, except for a directory.
"""

import hashlib
from pathlib import Path

from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.conf.hints import fault_and_hint
from paceline.conf.model import Model
from paceline.conf.plugins import EMBEDDED_MODELS, Plugin, model_facts
from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of, write_durably
from paceline.tasks.plugins import load_plugin
from paceline.tasks.records.data import ModelFacts, ModuleFacts, PreparedSet

FACTS, WEIGHTS = "model.json", "weights.pt"
TRAINING = {"pretrained", "freeze"}  # settings of a model without which its network is the same
Facts = ModelFacts | ModuleFacts


def digest_of(facts: Facts) -> str:
    """64 hex digits over the whole model: its description, of which the digest of the weights is a part.

    Without what only says how it was trained. Models that are older than a field keep their digests.
    """
    if isinstance(facts, ModuleFacts):
        return hashlib.sha256(facts.model_dump_json().encode()).hexdigest()
    absent = {name: True for name in ("package", "signal", "fit") if getattr(facts, name) is None}
    return hashlib.sha256(facts.model_dump_json(exclude={**absent, "model": TRAINING}).encode()).hexdigest()


def build_model_facts(config: Config, prepared: PreparedSet, weights_sha256: str) -> ModelFacts:
    """Describe the network that a configuration trained on a prepared set."""
    channels = prepared.picture_shape[2]
    prepared = prepared.normalised_for(model_facts(config.model.name))
    return ModelFacts(
        model=config.model.model_copy(update={"pretrained": None, "freeze": "none"}),  # what it is, not how
        image_shape=prepared.picture_shape,
        class_names=prepared.class_names,
        target_names=prepared.target_names,
        mean=prepared.mean[:channels],
        std=prepared.std[:channels],
        fingerprint=prepared.fingerprint,
        weights_sha256=weights_sha256,
        package=config.model.plugin,
        signal=config.data.used_signal,
        fit=None if config.data.fit == "scale" else config.data.fit,
    )


def write_model(directory: Path, config: Config, prepared: PreparedSet, weights: bytes) -> ModelFacts:
    """Write a model into a directory: its description and its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = build_model_facts(config, prepared, hashlib.sha256(weights).hexdigest())
    write_durably(directory / WEIGHTS, weights)
    write_durably(directory / FACTS, facts.model_dump_json(indent=2).encode())
    return facts


def read_facts(directory: Path) -> Facts:
    """Read the description of a model, after checking the digest of its weights.

    InputError if the model is missing, its description is invalid, or its weights have changed.
    """
    return _read(directory, load=False)[0]


def read_model(directory: Path, digest: str) -> tuple[Facts, bytes]:
    """Read the description and the weights of a model: exactly the bytes whose digest was checked.

    InputError as in `read_facts`, or if it is another model than the one with that digest.
    """
    facts, weights = _read(directory, load=True)
    if digest_of(facts) != digest:
        fault = f"the model's digest is {digest_of(facts)[:12]}..., expected is {digest[:12]}..."
        raise InputError(f"{directory}: {fault}; it was changed meanwhile: predict again")
    return facts, weights


def _read(directory: Path, *, load: bool) -> tuple[Facts, bytes]:
    try:
        text = (directory / FACTS).read_bytes()
        facts: Facts = (ModuleFacts if b'"settings":' in text else ModelFacts).model_validate_json(text)
        weights = (directory / WEIGHTS).read_bytes() if load else b""
        digest = hashlib.sha256(weights).hexdigest() if load else sha256_of(directory / WEIGHTS)
    except OSError as error:
        fault = f"no model there ({error.strerror}: {Path(str(error.filename)).name})"
        raise InputError(f"{directory}: {fault}; a model of paceline is {FACTS} and {WEIGHTS}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{directory / FACTS}: {'.'.join(map(str, first['loc']))}: {first['msg']}; it must be as this version of "
            "paceline writes it: train again, or fix it"
        ) from error
    if facts.weights_sha256 != digest:
        fault = f"sha256 is {digest[:12]}..., recorded is {facts.weights_sha256[:12]}..."
        fix = "the file is damaged or was changed: fetch the model again"
        raise InputError(f"{directory / WEIGHTS}: {fault}; {fix}")
    return facts, weights


def check_package(model: Model, recorded: Plugin | None) -> str | None:
    """What of a user's model is not as it was when it was trained, for people; None if nothing is, or it is ours.

    InputError if the package is not installed here, or another one offers that name.
    """
    if model.name in EMBEDDED_MODELS:
        return None
    try:
        plugin, _ = load_plugin("model", model.name)
    except InputError as error:
        if recorded is None:
            raise
        advice = f"install {recorded.package} {recorded.version}, which it was trained with"
        raise InputError(f"{fault_and_hint(error)[0]}; {advice}") from error
    if recorded is None:
        return f"nobody has recorded which package model {model.name} was trained with; here is {plugin.identity}"
    if plugin.package != recorded.package:
        raise InputError(
            f"{plugin}: the model was trained with package {recorded.package} {recorded.version}, which offers that "
            f"name; install it in place of {plugin.package}"
        )
    if plugin.identity == recorded.identity:
        return None
    return f"model {model.name} was trained with {recorded.identity}, and here is {plugin.identity}"
