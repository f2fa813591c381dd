"""Jobs of the competent loop, on random images."""

import numpy as np
import torch

from paceline.conf.model import Model
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.train.competent.arm import portable

NUM_SAMPLES, SIZE, CLASSES = 96, 8, 3


def loop_job(directory, network=None, **changes):
    """A job for one rank; its images lie in two files in `directory`."""
    rng = np.random.default_rng(0)
    paths = [directory / f"images-{number}.npy" for number in range(2)]
    for path in paths:
        np.save(path, rng.integers(0, 256, (NUM_SAMPLES // 2, SIZE, SIZE, 3), dtype=np.uint8))
    network = network or build_network(Model(name="convblocks", width=4, depth=1), (SIZE, SIZE, 3), CLASSES, 0)
    return {
        "network": portable(network),
        "task": "classify",
        "images": list(map(str, paths)),
        "labels": torch.arange(NUM_SAMPLES) % CLASSES,
        "targets": torch.empty(NUM_SAMPLES, 0),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
        "num_channels": 3,
        "shift": 2,
        "flip": True,
        "batch_size": 32,
        "optimizer": "SGD",
        "optimizer_settings": {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9},
        "label_smoothing": 0.0,
        "target_weight": 0.1,
        "noise": 25.0,
        "dtype": "float32",
        "autocast": "bfloat16",
        "tf32": False,
        "channels_last": True,
        "compile": False,
        "device": "cpu",
        "num_threads": 1,
        "num_workers": 1,
        "seed": 1,
        "rank": 0,
        "world_size": 1,
        "address": ("127.0.0.1", 0),
        "directory": str(directory),
    } | changes
