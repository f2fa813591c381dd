"""Models as runs record them, of networks that nobody trained."""

import torch

from paceline.tasks.files import sha256_of
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model_bundle import FACTS, WEIGHTS, digest_of
from paceline.tasks.predict.job import Settings
from paceline.tasks.records.data import ModelFacts

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.0)


def save_model(place, model, class_names, image_shape, change=lambda weights: weights):
    """How it is to be executed. Its weights are those of the start, changed where they are to say something known."""
    torch.manual_seed(0)
    network = build_network(model, image_shape, len(class_names), 0)
    place.mkdir()
    torch.save(change(network.state_dict()), place / WEIGHTS)
    facts = ModelFacts(
        model=model,
        image_shape=image_shape,
        class_names=class_names,
        mean=MEAN[: image_shape[2]],
        std=STD[: image_shape[2]],
        fingerprint="0" * 8,
        weights_sha256=sha256_of(place / WEIGHTS),
    )
    (place / FACTS).write_text(facts.model_dump_json())
    return Settings(
        model_directory=str(place),
        model_digest=digest_of(facts),
        precision="32-true",
        gpu=False,
        num_threads=1,
        batch_size=8,
    )
