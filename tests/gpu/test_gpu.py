"""What only a GPU can show: the resident path on the device, mixed precisions, a whole run. Skipped without one."""

import math

import pytest


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_rank_trains_on_the_gpu_in_every_precision(tmp_path, precision):
    from distributed import LocalCluster

    from conf.load import load
    from conf.site import Site
    from tasks.cluster import hardware
    from tasks.data import graph, source
    from tasks.track import run as tracking
    from tasks.track import store
    from tasks.train.coordinate import TrainJob, train_group
    from tasks.train.plan import resolve

    site = Site()
    config = load("digits", [f"execution.precision={precision}", "recipe.num_epochs=2", "execution.accelerator=gpu"])
    here = hardware.describe()
    with LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0") as cluster:
        prepared = graph.prepare(source.list_samples(config.data), config.data, site.root, cluster.scheduler_address)
        experiment = store.check_store(site.tracking_uri, "gpu", site.artifact_root)
        job = TrainJob(
            config=config,
            plan=resolve(config, here, prepared.num_train),
            prepared=prepared,
            run_id=tracking.begin(site.tracking_uri, experiment, config, {}).run_id,
            tracking_uri=site.tracking_uri,
            home=str(site.root),
        )
        result = train_group(job, cluster.scheduler_address)
    assert result.devices == (f"{here.gpus[0].name} {here.gpus[0].uuid}",)
    assert math.isfinite(result.final_loss)
    assert result.probe is not None


def test_a_cluster_of_dask_cuda_trains():
    from conf.load import load
    from tasks.cluster.demand import demand_of
    from tasks.cluster.open import open_cluster
    from tasks.train.coordinate import train_group
    from tests.jobs import new_job

    pytest.importorskip("dask_cuda")
    overrides = ["cluster.kind=local_cuda", "recipe.num_epochs=1", "speedup.baseline=none"]
    config = load("digits", overrides)
    with open_cluster(config.cluster, demand_of([config.execution], "gpu")) as address:
        result = train_group(new_job(address, "digits", overrides), address)
    assert math.isfinite(result.final_loss)
    assert "GPU-" in result.devices[0]


def test_batches_on_the_gpu_equal_those_on_the_cpu():
    import numpy as np
    import torch

    from tasks.data.loading.loader import make_loader
    from tasks.data.loading.order import BatchPlan
    from tasks.data.split import Split

    images = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3), dtype=np.uint8)
    split = Split("train", [images], np.arange(100) % 10, None, (16, 16, 3))
    batches = []
    for device in ("cpu", "cuda"):
        loader = make_loader(
            split,
            (0.5,) * 3,
            (0.2,) * 3,
            loading="resident",
            plan=BatchPlan(100, 32, 1),
            rank=0,
            seed=1,
            augment="flip_shift",
            shift_pixels=2,
            device=torch.device(device),
            channels_last=True,
        )
        batches.append([batch.images_NCHW.cpu() for batch in loader])
        loader.close()
    for on_cpu, on_gpu in zip(*batches, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)
