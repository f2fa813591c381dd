"""Goal 11's other peer, in an environment of its own: python by_ray.py SETTINGS.json, Ray Train's TorchTrainer."""

import json
import os
import sys
from pathlib import Path

import ray
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def loop(settings):
    sys.path.insert(0, settings["folder"])
    from plain_training import train
    from torch.utils.data import DistributedSampler

    train(settings, prepare_model, DistributedSampler, ray_train.report)


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text()) | {"folder": str(Path(__file__).parent)}
    num_cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=num_cores, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": num_cores}),
        run_config=RunConfig(storage_path=settings["storage"]),
    ).fit()
