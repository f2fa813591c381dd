"""A trained network, from its files. Weights are read as tensors only: no code in them is executed."""

import io
import pickle
from pathlib import Path

import torch
from torch import nn

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model_bundle import WEIGHTS, read_model
from paceline.tasks.records.data import ModelFacts


def load_trained_model(directory: Path, digest: str) -> tuple[nn.Module, ModelFacts]:
    """Load the network with its weights, on the CPU in float32 and in evaluation mode, and its description.

    The digest is that of `paceline.tasks.model_bundle.digest_of`.

    Raises:
        InputError: As `paceline.tasks.model_bundle.read_model`, or the weights do not fit the description.
    """
    facts, weights = read_model(directory, digest)
    network = build_network(facts.model, facts.image_shape, len(facts.class_names), len(facts.target_names))
    try:
        network.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:  # whose words advise to load it all the same
        raise InputError(f"{directory / WEIGHTS}: holds more than tensors; nothing of it was executed") from None
    except (RuntimeError, AttributeError, TypeError, EOFError, KeyError, ValueError) as error:
        reason = one_line(error)[:200]
        raise InputError(f"{directory / WEIGHTS}: not the weights of the model next to it ({reason})") from error
    return network.eval(), facts
