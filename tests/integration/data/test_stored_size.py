"""2,000 photographs of mixed sizes, stored larger than they are learned, against squares of the learned size."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from paceline.conf.load import load
from paceline.tasks.data.loading.loader import EvaluationLoader, make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.measure.paired_ratio import estimate_ratio
from paceline.tasks.model.networks.registry import build_network
from tests.support.photographs import photograph, prepare_here

NUM, SIZE, NUM_CLASSES = 2_000, 32, 4
SHAPES = ((96, 128), (128, 96), (110, 165), (100, 100), (150, 112))
SETTINGS = [
    f"data.image_size={SIZE}",
    "recipe.vary.crop_scale=[0.1,0.6]",
    "recipe.augment=none",
    "data.validation_fraction=0",
    "model.width=8",
]
CPU = torch.device("cpu")
logger = logging.getLogger(__name__)
NUM_EPOCHS, NUM_SEEDS, BATCH = 5, 5, 50


def scene(rng, label, height, width):
    """Waves across the picture, whose direction is the class, below detail of all scales down to single pixels."""
    rows, columns = np.mgrid[:height, :width] / min(height, width)
    angle = np.pi * label / NUM_CLASSES + rng.normal(0, 0.12)
    waves = np.sin(2 * np.pi * 5 * (rows * np.sin(angle) + columns * np.cos(angle)) + rng.uniform(0, 2 * np.pi))
    detail = photograph(rng, height, width, 0.7)
    return (0.75 * detail + 32 + 26 * waves[..., np.newaxis]).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The prepared sets by the side that is stored: as `auto` chooses, and squares."""
    root, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(11)
    for index in range(NUM):
        folder = root / f"class{index % NUM_CLASSES}"
        folder.mkdir(exist_ok=True)
        pixels = scene(rng, index % NUM_CLASSES, *SHAPES[index % len(SHAPES)])
        Image.fromarray(pixels).save(folder / f"{index:05}.jpg", quality=95)
    made = {}
    for name, more in {
        "photographs": [],
        "jpeg": ["data.storage=jpeg"],
        "squares": [f"data.stored_size={SIZE}"],
    }.items():
        config = load("folder", [f"data.root={root}", *SETTINGS, *more])
        made[name] = config, prepare_here(config.stored_data, tmp_path_factory.mktemp(name))
    return made


def loader_of(config, prepared, seed=1):
    split = open_split(prepared, "train")
    settings = {"augment": config.recipe.augment, "shift_pixels": 0, "shuffle_mib": 256, "channels_last": False}
    plan = BatchPlan(split.num_samples, BATCH)
    return make_loader(
        "streaming",
        LoaderConfig(
            split,
            prepared.mean,
            prepared.std,
            plan=plan,
            rank=0,
            seed=seed,
            device=CPU,
            vary=config.recipe.vary,
            **settings,
        ),
    )


def sharpness(images_NCHW):
    """Mean square of the differences of neighbours, over the variance."""
    return float(images_NCHW.diff(dim=3).square().mean() / images_NCHW.var(dim=(2, 3)).mean())


@pytest.mark.slow
def test_crops_have_detail_and_places_that_squares_have_lost(sets):
    found = {name: torch.cat([batch.images_NCHW for batch in loader_of(*made)]) for name, made in sets.items()}
    (config, photographs), (_, squares) = sets["photographs"], sets["squares"]
    assert (photographs.stored_size, squares.stored_size) == (config.stored_size[0], None)
    assert config.stored_size[0] == 42, "the largest crops have 32 pixels of a square"
    sharp = {name: sharpness(images) for name, images in found.items()}
    logger.info("sharpness: %s", {name: round(value, 3) for name, value in sharp.items()})
    assert sharp["photographs"] > 1.15 * sharp["squares"], "pixels are real, not enlarged"
    assert sharp["jpeg"] == pytest.approx(sharp["photographs"], rel=0.1)
    loader = loader_of(config, photographs)
    split = loader.feed.photographs
    requests = list(loader.requests(0, loader.feed.plan, 0))
    boxes_N4 = np.concatenate([request.boxes_N4 for request in requests])
    sizes_N2 = split.sizes_N2[np.concatenate([request.index_N for request in requests])]
    middle_N = (sizes_N2[:, 1] - sizes_N2[:, 0]) // 2
    is_wide = sizes_N2[:, 1] > sizes_N2[:, 0]
    outside = (boxes_N4[:, 1] < middle_N) | (boxes_N4[:, 1] + boxes_N4[:, 3] > middle_N + sizes_N2[:, 0])
    logger.info("%.0f %% of the crops of wide photographs leave the middle square", 100 * outside[is_wide].mean())
    assert outside[is_wide].mean() > 0.4
    area_N = boxes_N4[:, 2] * boxes_N4[:, 3] / sizes_N2.prod(axis=1)
    assert area_N.mean() == pytest.approx(0.35, abs=0.05)


def accuracy(config, prepared, seed):
    torch.manual_seed(seed)
    network = build_network(config.model, prepared.image_shape, NUM_CLASSES, 0)
    loader = loader_of(config, prepared, seed)
    optimizer = torch.optim.SGD(network.parameters(), momentum=0.9)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=NUM_EPOCHS * len(loader))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            loss = functional.cross_entropy(network(batch.images_NCHW)[0], batch.labels_N)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    network.eval()
    split = open_split(prepared, "test")
    with torch.no_grad():
        batches = EvaluationLoader(split, prepared.mean, prepared.std, CPU, False).batches(200)
        right = [(network(batch.images_NCHW)[0].argmax(1) == batch.labels_N).float() for _, batch in batches]
    return float(torch.cat(right).mean())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_accuracy_of_a_small_training_is_not_worse(sets):
    found = {name: [accuracy(*sets[name], seed) for seed in range(NUM_SEEDS)] for name in ("photographs", "squares")}
    better = np.array(found["photographs"]) - np.array(found["squares"])
    gain = estimate_ratio(better)  # of values that are no logarithms
    low, high = np.log(gain.low), np.log(gain.high)
    logger.info("%s; gain %+.3f [%+.3f, %+.3f], %d seeds", found, better.mean(), low, high, NUM_SEEDS)
    assert min(found["squares"]) > 1.5 / NUM_CLASSES, "something is learned"
    assert low > -0.02
