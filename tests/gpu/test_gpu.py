"""What only a GPU can show: the resident path on the device, mixed precisions, a whole run. Skipped without one."""

import math
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

from paceline.conf.model import Model
from paceline.conf.recipe import Recipe, Vary
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.objectives import Classification
from paceline.tasks.model.optimization import WeightAverage, batch_loss, build_optimizer, prepare_optimizer_state
from paceline.tasks.records.execution import Arm
from paceline.tasks.train.step.cuda_graph import NUM_EAGER, make_step
from paceline.tasks.train.step.precision import make_scaler, prepare_network, set_arithmetic
from paceline.tasks.train.step.train_step import TrainStep


@pytest.mark.parametrize("precision", ["32-true", "tf32", "bf16-mixed", "16-mixed"])
def test_a_rank_trains_on_the_gpu_in_every_precision(tmp_path, precision):
    from distributed import LocalCluster

    from paceline.conf.environment import Environment
    from paceline.conf.load import load
    from paceline.tasks.cluster import hardware
    from paceline.tasks.data.prepare import dask_graph as graph
    from paceline.tasks.data.sources import registry as source
    from paceline.tasks.track import run as tracking
    from paceline.tasks.track import store
    from paceline.tasks.train.launch.coordinator import TrainJob, train_group
    from paceline.tasks.train.plan import resolve

    site = Environment()
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


@pytest.mark.parametrize("operation", ["convolution", "product"])
def test_fp32_is_ieee_and_tf32_is_another_precision(operation):
    torch.manual_seed(0)
    if operation == "product":
        inputs, weights, compute = torch.randn(512, 512), torch.randn(512, 512), torch.matmul
    else:
        inputs, weights, compute = torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3), torch.nn.functional.conv2d
    exact = compute(inputs.double(), weights.double())
    errors = {}
    for precision in ("32-true", "tf32", "bf16-mixed"):
        set_arithmetic(precision, torch.device("cuda"))
        found = compute(inputs.cuda(), weights.cuda()).cpu().double()
        errors[precision] = float((found - exact).norm() / exact.norm())
    assert errors["32-true"] < 1e-5
    assert errors["bf16-mixed"] < 1e-5, "outside of autocast"
    if torch.cuda.get_device_capability() >= (8, 0):
        assert 1e-5 < errors["tf32"] < 1e-2


def test_a_cluster_of_gpu_workers_trains_alone_on_its_gpu():
    from paceline.conf.load import load
    from paceline.tasks.cluster.client import demand_of
    from paceline.tasks.cluster.kinds import open_cluster
    from paceline.tasks.train.launch.coordinator import train_group
    from tests.support.jobs import new_job

    overrides = ["cluster.kind=local_cuda", "recipe.num_epochs=1", "speedup.baseline=none"]
    config = load("digits", overrides)
    with open_cluster(config.cluster, demand_of([config.execution], "gpu")) as address:
        result = train_group(new_job(address, "digits", overrides), address)
    assert math.isfinite(result.final_loss)
    assert "GPU-" in result.devices[0]
    assert not result.validity.foreign_device_processes  # None in a container that hides process numbers


ALL = Vary(crop_scale=(0.3, 1.0), brightness=0.3, contrast=0.3, saturation=0.3, mixup=0.2, cutmix=1.0)


@contextmanager
def no_waits():
    """The host must not wait for the device."""
    with warnings.catch_warnings(action="ignore"):  # the mode's own notice
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("loading", ["resident", "streaming"])
@pytest.mark.parametrize("vary", [Vary(), ALL], ids=["plain", "varied"])
def test_batches_on_the_gpu_equal_those_on_the_cpu(loading, vary):
    import numpy as np
    import torch

    from paceline.tasks.data.loading.loader import make_loader
    from paceline.tasks.data.loading.sampling import BatchPlan
    from paceline.tasks.data.loading.train_loader import LoaderConfig
    from paceline.tasks.data.split import Split

    images = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3), dtype=np.uint8)
    split = Split("train", [images], np.arange(100) % 10, None, (16, 16, 3))
    batches = []
    for device in ("cpu", "cuda"):
        loader = make_loader(
            loading,
            LoaderConfig(
                split,
                (0.5,) * 3,
                (0.2,) * 3,
                plan=BatchPlan(100, 32, 1),
                rank=0,
                seed=1,
                augment="flip_shift",
                shift_pixels=2,
                shuffle_mib=1,
                device=torch.device(device),
                channels_last=True,
                vary=vary,
            ),
        )
        steps = iter(loader)
        made = [next(steps)]
        with no_waits() if device == "cuda" else nullcontext():
            made += steps
        batches.append([batch.images_NCHW.cpu() for batch in made])
        loader.close()
    for on_cpu, on_gpu in zip(*batches, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5 if vary is not ALL else 1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_captured_step_trains_like_the_eager_one(optimizer, precision):
    """Two full batches and a ragged one for each of eight epochs, the rate another in each step."""
    device = torch.device("cuda")
    recipe = Recipe(optimizer=optimizer, learning_rate=0.01)
    torch.manual_seed(0)
    batches = [
        Batch(torch.randn(n, 3, 16, 16, device=device), torch.randint(0, 10, (n,), device=device), None, None, 1.0)
        for n in (64, 64, 24) * 8
    ]
    losses = {}
    for compile_ in ("off", "graph"):
        torch.manual_seed(1)
        network = build_network(Model(width=8, depth=2), (16, 16, 3), 10, 0)
        network = prepare_network(network, "32-true", channels_last=True, device=device)
        built = build_optimizer(network, recipe, 0.01)
        prepare_optimizer_state(built, network, is_captured=compile_ == "graph")
        arm = Arm(
            num_devices=1, precision=precision, compile=compile_, memory_format="channels_last", loading="resident"
        )
        eager = TrainStep(
            lambda batch, network=network: batch_loss(network, batch, recipe, Classification(10)),
            built,
            make_scaler(precision, device),
            arm,
            device,
        )
        step = make_step(eager, arm, device)
        losses[compile_] = []
        for number, batch in enumerate(batches):
            for group in built.param_groups:
                rate = 0.01 / (1 + number)
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
            losses[compile_].append(float(step(batch)))
    torch.testing.assert_close(torch.tensor(losses["graph"]), torch.tensor(losses["off"]), rtol=1e-2, atol=1e-3)
    stats = step.stats()
    assert (stats.num_calls, stats.num_graphs) == (24, 1)
    assert stats.hit_rate == (16 - NUM_EAGER) / 24


def test_captured_steps_average_weights_and_are_recorded_again_for_larger_images():
    """Images of 8 pixels, then of 16; each with a ragged batch, which is eager."""
    device, decay = torch.device("cuda"), 0.5
    recipe = Recipe(learning_rate=0.01)
    torch.manual_seed(0)
    batches = [
        Batch(torch.randn(n, 3, size, size, device=device), torch.randint(0, 10, (n,), device=device), None, None, 1.0)
        for size in (8, 16)
        for n in (32, 32, 32, 32, 12, 32)
    ]
    averages = {}
    for compile_ in ("off", "graph"):
        torch.manual_seed(1)
        network = build_network(Model(width=4, depth=1), (16, 16, 3), 10, 0)
        network = prepare_network(network, "32-true", channels_last=True, device=device)
        built = build_optimizer(network, recipe, 0.01)
        prepare_optimizer_state(built, network, is_captured=compile_ == "graph")
        arm = Arm(
            num_devices=1, precision="32-true", compile=compile_, memory_format="channels_last", loading="resident"
        )
        average = WeightAverage(network, decay)
        eager = TrainStep(
            lambda batch, network=network: batch_loss(network, batch, recipe, Classification(10)),
            built,
            make_scaler("32-true", device),
            arm,
            device,
            average=average,
        )
        step = make_step(eager, arm, device)
        for batch in batches:
            step(batch)
        average.load_into(network, len(batches))
        averages[compile_] = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
    stats = step.stats()
    assert (stats.num_calls, stats.num_graphs, step.num_warm_up_steps) == (12, 2, 2 * (NUM_EAGER + 1))
    assert stats.hit_rate == 4 / 12, "two replays of each graph"
    for name, tensor in averages["off"].items():
        if "running_" in name:  # a simulated device counts the captured batch twice
            continue
        torch.testing.assert_close(averages["graph"][name], tensor, rtol=1e-2, atol=1e-3)
