"""A rank of a group without Dask: python -m tests.support.by_hand DIRECTORY RANK ARM_AS_JSON.

Trains a network without batch norm, in which samples do not meet, for two epochs of bare steps in double precision, and
saves its weights. The ranks meet in a file of DIRECTORY.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.loader import make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.split import Split
from paceline.tasks.model.objectives import Classification
from paceline.tasks.records.execution import Arm
from paceline.tasks.train.step.benchmark_step import BareStep, StepInputs

NUM_SAMPLES = 150  # at a batch of 64 the last one is ragged


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))

    def forward(self, images_NCHW):
        return self.layers(images_NCHW), None


def make_split():
    rng = np.random.default_rng(1)
    return Split(
        name="train",
        images=[rng.integers(0, 256, (NUM_SAMPLES, 8, 8, 1), dtype=np.uint8)],
        labels_N=rng.integers(0, 10, NUM_SAMPLES),
        targets_NT=None,
        image_shape=(8, 8, 1),
    )


def main(directory, rank, arm_json):
    arm = Arm.model_validate_json(arm_json)
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)  # the first rank's weights are everybody's
    if arm.num_devices > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=arm.num_devices
        )
    split = make_split()
    plan = BatchPlan(split.num_samples, 64, arm.num_devices, arm.loads)
    loader = make_loader(
        arm.loading,
        LoaderConfig(
            split,
            (0.5,),
            (0.3,),
            plan=plan,
            rank=rank,
            seed=3,
            augment="shift",
            shift_pixels=1,
            shuffle_mib=1,
            device=torch.device("cpu"),
            channels_last=False,
        ),
    )
    network = Classifier()
    step = BareStep(
        StepInputs(network, Classification(10), Recipe(), 0.1, torch.device("cpu")), arm, loader, len(loader)
    )
    step.run(2 * len(loader))
    trained = getattr(step._network, "module", step._network)
    torch.save(
        {name: tensor.clone() for name, tensor in trained.state_dict().items()}, directory / f"weights-{rank}.pt"
    )
    step.close()
    loader.close()
    if arm.num_devices > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
