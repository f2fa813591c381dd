"""Fine-tuning against training from scratch: time to the accuracy that the latter ends with, whole fits, A B B A.

infra/bench T          about 15 minutes on two cores

The weights come from a long training on five classes of CIFAR-10; the other five are learned, once with all their
images, as many as the weights have seen, and once with a fifth of them, which is what fine-tuning is for.
"""

import os
from typing import NamedTuple

import numpy as np
import pytest

from paceline.conf.environment import Environment
from paceline.flows.checks.pretrained import check_weights
from paceline.tasks.data.key import describe
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio
from paceline.tasks.train.launch.coordinator import train_group
from tests.benchmarks.conftest import at_least, tell

pytestmark = pytest.mark.timeout(3600)

FIRST = "data.classes=[airplane,automobile,bird,cat,deer]"
OTHERS = "data.classes=[dog,frog,horse,ship,truck]"
NETWORK = [
    "model.width=16",
    "model.depth=2",
    "recipe.schedule=onecycle",
    "recipe.weight_decay=5.0e-4",
    "execution.precision=bf16-mixed",
    "execution.compile=off",
    "execution.loading=resident",
    "execution.memory_format=channels_last",
]
SOURCE = ["recipe.num_epochs=60", "recipe.warmup_epochs=3"]
FEW = 1_000
"""Images of each class."""
NUM_PAIRS = 6
"""When a score is reached is known by whole epochs only, so that few pairs tell little."""


class Case(NamedTuple):
    """How many images of each class there are, and the recipes: the better ones of a few that were tried (log)."""

    name: str
    common: tuple[str, ...]
    scratch: tuple[str, ...]
    tuned: tuple[str, ...]


ALL_IMAGES = Case(
    name="all images",
    common=(),
    scratch=("recipe.num_epochs=10", "recipe.warmup_epochs=2"),
    tuned=("recipe.num_epochs=6", "recipe.warmup_epochs=2", "recipe.learning_rate=0.2", "model.freeze=features.5"),
)
FEW_IMAGES = Case(
    name=f"{FEW:,} images of each class",
    common=("recipe.batch_size=64", "data.validation_fraction=0.2"),
    scratch=("recipe.num_epochs=20", "recipe.warmup_epochs=4"),
    tuned=("recipe.num_epochs=8", "recipe.warmup_epochs=1", "recipe.learning_rate=0.05"),
)


@pytest.fixture(scope="module")
def few_images(cifar10_jpeg_root, tmp_path_factory):
    """The first ones of each class, and all of the test split."""
    root = tmp_path_factory.mktemp("few")
    for folder in cifar10_jpeg_root.glob("*/*"):
        chosen = sorted(folder.iterdir())[:FEW]
        made = root / folder.relative_to(cifar10_jpeg_root)
        made.mkdir(parents=True)
        for path in chosen:
            os.link(path, made / path.name)
    return root


@pytest.fixture(scope="module")
def weights(make_job, cluster_address, cifar10_jpeg_root):
    """Of the first five classes, with all their images."""
    job = make_job("cifar10", f"data.root={cifar10_jpeg_root}", FIRST, *NETWORK, *SOURCE)
    found = train_group(job, cluster_address)
    print(f"\nweights: validation accuracy {found.validation_scores[-1]:.4f} in {found.seconds:.1f} s", flush=True)
    return found.weights


def seconds_to(result, target):
    """From the first step to the end of the first epoch that is as good; None if none is."""
    for end, score in zip(result.epoch_ends, result.validation_scores, strict=True):
        if score >= target:
            return end - result.startup_seconds
    return None


@pytest.mark.parametrize("case", [FEW_IMAGES, ALL_IMAGES], ids=["few", "all"])
def test_fine_tuning_reaches_the_accuracy_of_scratch_in_half_of_it(case, make_job, cluster_address, weights, request):
    """Each pair has its own seed; the weights to begin with are one training's, whose time is told beside it."""
    root = f"data.root={request.getfixturevalue('few_images' if case is FEW_IMAGES else 'cifar10_jpeg_root')}"

    def fit(seed, *overrides):
        job = make_job("cifar10", root, OTHERS, *NETWORK, *case.common, f"seed={seed}", *overrides)
        job = job.model_copy(update={"pretrained": check_weights(job.config, describe(job.config.data), Environment())})
        return train_group(job, cluster_address)

    logs, missed, contaminated = [], 0, 0
    for pair in range(NUM_PAIRS):
        arms = {"scratch": case.scratch, "tuned": [*case.tuned, f"model.pretrained={weights}"]}
        order = list(arms) if pair % 2 == 0 else list(arms)[::-1]
        found = {name: fit(pair + 2, *arms[name]) for name in order}
        contaminated += sum(bool(result.validity.contaminated) for result in found.values())
        target = found["scratch"].validation_scores[-1]
        slow, fast = (seconds_to(found[name], target) for name in arms)
        best = max(found["tuned"].validation_scores)
        print(f"pair {pair}: scratch {target:.4f} in {slow:.1f} s; tuned {best:.4f}, as good in {fast} s", flush=True)
        missed += fast is None
        logs.append(np.log(slow / fast) if fast is not None else np.nan)
    estimate = estimate_ratio(np.array([log for log in logs if np.isfinite(log)]), FIXED_CONFIDENCE)
    whole = estimate is not None and not missed
    tell(
        f"transfer, {case.name}: time of scratch to its accuracy / time of fine-tuning to the same >= 2",
        f"{f'{estimate.value:.2f}' if estimate else 'none'} ({NUM_PAIRS} pairs of whole fits, {missed} never as good, "
        f"{contaminated} trainings contaminated)",
        f"{estimate.low:.2f} to {estimate.high:.2f}" if whole else "none",
        at_least(estimate.low, estimate.high, 2.0) if whole else "NOT MET: not each fine-tuning was ever as good",
    )
