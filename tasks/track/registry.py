"""MLflow's model registry: versions of a model, and which of them is the champion.

A model of Paceline holds no code; its signature, which the registry needs, is written next to it.
"""

from pathlib import Path

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, Schema, TensorSpec

from paceline.conf.plugins import Task
from paceline.tasks.model_bundle import FACTS, WEIGHTS, Facts, digest_of
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.data import ModelFacts
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ScoreName
from paceline.tasks.redact import redact
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.track.run import RunHandle, log_document, set_tags

CHAMPION = "champion"
SCORE_TAGS = ((Tag.SCORE, Tag.ACCURACY), (Tag.BEST_SCORE, Tag.BEST_ACCURACY))  # each with its older name
# Error codes for a missing model and alias, and for a missing model where users log in and are not administrators.
ABSENT, DENIED = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"), "PERMISSION_DENIED"


class Champion(Record):
    """The version that has the alias."""

    version: str
    run_id: str
    score_name: ScoreName
    score: float | None
    best_score: float | None  # of it and the champions before it, as far as they were tested on the same data
    dataset: str | None  # fingerprint of the prepared set that it was trained and tested on


def champion(tracking_uri: str, name: str) -> Champion | None:
    """The champion of a registered model; None without such a model or alias."""
    client = _client(tracking_uri)
    try:
        version = client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        if error.error_code in ABSENT:
            return None
        if error.error_code == DENIED and not client.search_registered_models(f"name = '{name}'"):
            return None
        raise  # a registry that cannot be asked is none without a champion
    texts = (version.tags.get(tag, version.tags.get(old)) for tag, old in SCORE_TAGS)
    score, best = (float(text) if text else None for text in texts)
    return Champion(
        version=str(version.version),
        run_id=version.run_id or "",
        score_name=next((name for name in SCORE_WORDS if name == version.tags.get(Tag.SCORE_NAME)), "accuracy"),
        score=score,
        best_score=best,
        dataset=version.tags.get(Tag.DATASET),
    )


def log_model(handle: RunHandle, facts: Facts, weights: Path) -> None:
    """Log a trained model: what it is, its weights, and MLflow's own description (`MLmodel`, YAML)."""
    signature = _signature(facts) if isinstance(facts, ModelFacts) else None  # what own Lightning code takes is unknown
    model = Model(artifact_path=Artifact.MODEL, run_id=handle.run_id, signature=signature)
    model.add_flavor("paceline", model=FACTS, weights=WEIGHTS)
    log_document(handle, f"{Artifact.MODEL}/{FACTS}", facts.model_dump_json(indent=2).encode())
    log_document(handle, f"{Artifact.MODEL}/{WEIGHTS}", weights)
    log_document(handle, f"{Artifact.MODEL}/MLmodel", str(model.to_yaml()))
    set_tags(handle, {Tag.MODEL_DIGEST: digest_of(facts)})


def _signature(facts: ModelFacts) -> ModelSignature:
    images = Schema([TensorSpec(np.dtype(np.uint8), (-1, *facts.image_shape), "images")])
    height, width, channels = facts.image_shape
    outputs_by_task: dict[Task, tuple[str, tuple[int, ...]]] = {
        "classify": ("probabilities", (len(facts.class_names),)),
        "segment": ("probabilities", (height, width, len(facts.class_names))),
        "denoise": ("images", (height, width, channels)),
    }
    name, shape = outputs_by_task[facts.model.task]
    outputs: list[ColSpec | TensorSpec] = [TensorSpec(np.dtype(np.float32), (-1, *shape), name)]
    outputs += [TensorSpec(np.dtype(np.float32), (-1, 1), name) for name in facts.target_names]
    return ModelSignature(inputs=images, outputs=Schema(outputs))


def register(handle: RunHandle, name: str, tags: dict[str, str]) -> str:
    """Make a run's model the newest version of a registered model; the version. A run's model has one version only."""
    client = _client(handle.tracking_uri)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{handle.run_id}'")
    version = next(iter(versions), None) or client.create_model_version(  # a resumed run registers once
        name, source=f"runs:/{handle.run_id}/{Artifact.MODEL}", run_id=handle.run_id
    )
    for key, value in tags.items():
        client.set_model_version_tag(name, version.version, key, redact(value)[:5000])
    return str(version.version)


def promote(handle: RunHandle, name: str, version: str, champion_before: str | None) -> str | None:
    """Give a version the alias; return another one that is better and became champion since `champion_before`."""
    client, current = _client(handle.tracking_uri), champion(handle.tracking_uri, name)
    if current is not None and current.version not in (version, champion_before):
        score = client.get_model_version(name, version).tags.get(Tag.SCORE)  # own Lightning code has none
        if (current.score or 0.0) > float(score or 0.0):
            return current.version
    client.set_registered_model_alias(name, CHAMPION, version)
    return None


def is_permanent(error: Exception) -> bool:
    """Whether an error of `promote` would come again: the version or the model is deleted, or the user may not."""
    return isinstance(error, MlflowException) and error.error_code in (*ABSENT, DENIED)


def _client(tracking_uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri, tracking_uri)  # or MLflow takes the environment's registry
