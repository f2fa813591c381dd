"""The ways that only a GPU takes, on one that is not there (tests/support/pretended): what it says of them is not
how fast they are, but that they go to their end, with the CPU's numbers.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.tasks.records.training import STEP_ITEMS
from tests.conftest import ROOT

PRETENDED = Path(__file__).parents[2] / "support" / "pretended"
ON_DEVICE = "batches or captured"
"""Of tests/gpu, what needs nothing of a GPU but its memory and its graphs."""
FIXED = [
    "execution.memory_format=channels_last",
    "execution.loading=resident",
    "execution.precision=32-true",
    "execution.compile=off",
    "execution.num_threads=1",  # the threads that `auto` measures to be faster decide on the last digits
    "data.image_size=16",
    "model.width=4",
    "model.depth=1",
    "recipe.batch_size=64",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "speedup.max_seconds=3",
]


@pytest.fixture(scope="module")
def with_gpu(tmp_path_factory):
    """What a process needs in its environment to have such a GPU."""
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    guard = tmp_path_factory.mktemp("pretended") / "guard.so"
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include"]
    subprocess.run([*compiler, "-o", guard, PRETENDED / "guard.cpp", *libraries], check=True)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PRETENDED), str(ROOT), os.environ.get("PYTHONPATH")))),
        "PRETENDED_GUARD": str(guard),
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",  # what Dask itself asks a driver
    }


def test_tests_of_the_gpu_pass(with_gpu):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", ON_DEVICE]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | with_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout, done.stdout


REFUSED = """
import torch
there, here = torch.ones(3, device="cuda"), torch.ones(3)
rate, graph = 1.0, torch.cuda.CUDAGraph()
for wrong in (lambda: there + here, lambda: torch.nn.functional.linear(there, here[None])):
    try:
        wrong()
    except RuntimeError as error:
        assert "on one device" in str(error), error
    else:
        raise SystemExit("tensors of two devices were taken")
for wrong in (lambda: there.sum().item(), lambda: here.to("cuda"), there.cpu, torch.cuda.synchronize):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrong()
    except RuntimeError:
        continue
    raise SystemExit("a graph took what the host does")
with torch.cuda.graph(graph):
    made = there * 2
    there += rate
assert there.tolist() == [1, 1, 1], "captured, not computed"
rate = 5.0
graph.replay(), graph.replay()
assert (made.tolist(), there.tolist()) == ([4, 4, 4], [3, 3, 3]), "with the rate of the capture"
"""


QUEUED = """
import time, warnings
import torch, pretended_gpu
from pretended_gpu import KERNEL_SECONDS, waits

def launched(number, tensor):
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(number):
        tensor += 1
    last.record()
    return first, last

numbers = torch.zeros(4, device="cuda")
first, last = launched(50, numbers)
assert not last.query(), "the host runs ahead of 50 kernels of 10 ms"
try:
    first.elapsed_time(last)
except RuntimeError:
    pass
else:
    raise SystemExit("the time of what has not happened")
assert not waits
last.synchronize()
assert last.query() and first.elapsed_time(last) > 49 * KERNEL_SECONDS * 1e3, first.elapsed_time(last)

waiting = {
    "item": lambda: numbers[0].item(), "tolist": lambda: numbers.tolist(), "cpu": lambda: numbers.cpu(),
    "mask": lambda: numbers[numbers > 0], "synchronize": torch.cuda.synchronize,
    "pageable": lambda: torch.ones(4).to("cuda", non_blocking=True),
    "blocking": lambda: torch.ones(4).pin_memory().to("cuda"),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
}
for name, wait in waiting.items():
    waits.clear()
    _, last = launched(3, numbers)
    wait()
    assert last.query() and sum(waits.values()) == 1, (name, waits)

# Streams: only what one waits for comes before it.
side = torch.cuda.Stream()
_, last = launched(20, numbers)
with torch.cuda.stream(side):
    started, ended = launched(1, torch.zeros(1, device="cuda"))
ended.synchronize()
assert not last.query(), "a stream of its own does not wait for the other"
side.wait_event(last)
side.synchronize()
assert last.query()

# A captured step takes as long as its kernels, and one call.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(20):
        numbers += 1
first, last = launched(0, numbers)
graph.replay()
last.record()
assert not last.query()
last.synchronize()
assert first.elapsed_time(last) > 19 * KERNEL_SECONDS * 1e3

# Pinned memory may be written once the host has seen the end of its copy, and no sooner.
def copied(stream):
    pinned = torch.zeros(4, pin_memory=True)
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.zeros(4).is_pinned()
    waits.clear()
    with torch.cuda.stream(stream):
        pinned.to("cuda", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert not waits
    return pinned, event

pinned, event = copied(side)
event.synchronize()
pinned += 1
torch.cuda.synchronize()
for see in (torch.cuda.synchronize, lambda: event.synchronize(), lambda: numbers[0].item()):
    pinned, event = copied(side)
    torch.cuda.current_stream().wait_event(event)
    pinned += 1
    try:
        see()
    except RuntimeError as error:
        assert "pinned memory was written" in str(error)
    else:
        raise SystemExit("a race was not seen")
    pinned -= 1
    torch.cuda.synchronize()

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    numbers[0].item()
    torch.ones(4).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    numbers[0].item()
notice, *found = [str(one.message) for one in told]
assert notice.endswith("does not yet detect all synchronizing operations")
assert len(found) == 2 and all(one.startswith("called a synchronizing CUDA operation") for one in found), found
"""


@pytest.mark.parametrize(("program", "microseconds"), [(REFUSED, 1), (QUEUED, 10_000)], ids=["refused", "queued"])
def test_it_refuses_and_waits_as_a_gpu_does(with_gpu, program, microseconds):
    environment = os.environ | with_gpu | {"PRETENDED_KERNEL_MICROSECONDS": str(microseconds)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LOADED = """
import tempfile
import numpy as np, torch, pretended_gpu
from itertools import islice
from pathlib import Path
from paceline.conf.recipe import Vary
from paceline.conf.data import Data
from paceline.tasks.data.loading import resident
from paceline.tasks.data.loading.loader import make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.split import Split
from tests.support.photographs import prepare_here, save_photographs

varied = Vary(crop_scale=(0.3, 1.0), brightness=0.3, contrast=0.3, saturation=0.3, mixup=0.2, cutmix=1.0)
pixels = np.random.default_rng(0).integers(0, 256, (200, 16, 16, 3), dtype=np.uint8)

def batches(loading, device, vary, targets, split=None):
    split = split or Split("train", [pixels], np.arange(200) % 10, targets, (16, 16, 3))
    config = LoaderConfig(
        split, (0.5,) * 3, (0.2,) * 3, plan=BatchPlan(split.num_samples, 16, 1), rank=0, seed=1, augment="flip_shift",
        shift_pixels=2, shuffle_mib=1, device=torch.device(device), channels_last=True, draws=True, vary=vary,
    )
    loader = make_loader(loading, config)
    iterator = iter(loader)
    found = [next(iterator)]
    pretended_gpu.waits.clear()
    found += islice(iterator, 11)
    waits = dict(pretended_gpu.waits)
    loader.close()
    return found, waits

def compare(loading, *arguments):
    there, waits = batches(loading, "cuda", *arguments)
    waits.pop("Event.synchronize", None)  # for the images' copies of a step ago, not for kernels
    assert not waits, (loading, waits)
    here, _ = batches(loading, "cpu", *arguments)
    for one, other in zip(there, here, strict=True):
        for name, value in one._asdict().items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value.cpu(), getattr(other, name), msg=f"{loading} {name}")

with tempfile.TemporaryDirectory() as directory:  # crops are decoded on the host, in the thread that gathers
    data = Data(source="folder", root=str(save_photographs(Path(directory, "images"), 300)), image_size=16)
    for storage in ("raw", "jpeg"):
        stored = data.model_copy(update={"stored_size": 20, "storage": storage})
        split = open_split(prepare_here(stored, Path(directory)), "train")
        for loading in ("resident", "streaming"):
            compare(loading, varied, None, split)

for mirror_share in (0.25, 0.0):
    resident._MIRROR_SHARE = mirror_share
    for vary, targets in ((varied, None), (Vary(), np.random.default_rng(1).random((200, 2), dtype=np.float32))):
        for loading in ("resident", "streaming"):
            compare(loading, vary, targets)
"""


def test_batches_and_what_varies_in_them_do_not_wait_for_the_device(with_gpu):
    environment = os.environ | with_gpu | {"PRETENDED_KERNEL_MICROSECONDS": "50"}
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LIMIT = """
import warnings
import torch
from pretended_gpu import waits
from paceline.tasks.measure import device_limit
device_limit.COPY_BYTES = 4096
torch.cuda.set_sync_debug_mode("warn")
warnings.simplefilter("error")
limit = device_limit.measure_limit(torch.device("cuda", 0), seconds=0.0)
assert limit.flops_per_second.keys() == {"32-true", "tf32", "bf16-mixed", "16-mixed"}, limit
assert (limit.device_name, limit.driver, limit.num_threads) == ("Pretended GPU", "0.0", None), limit
print(sum(waits.values()))
"""


def test_the_limit_of_a_gpu_is_measured_with_one_wait_a_repeat(with_gpu):
    command = [sys.executable, "-c", LIMIT]
    done = subprocess.run(command, env=os.environ | with_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Warm-up and one repeat: of the smallest and of the chosen matrices in four precisions, and of the copy.
    assert int(done.stdout.split()[-1]) == 2 * (2 * 4 + 1)


@pytest.fixture(scope="module")
def run(call, with_gpu):
    def to_the_end(accelerator, *overrides, **planted):
        given = with_gpu | planted if accelerator == "gpu" else planted
        return call("run", "digits", *FIXED, f"execution.accelerator={accelerator}", *overrides, **given)

    return to_the_end


@pytest.fixture(scope="module")
def on_cpu(run):
    return run("cpu", "speedup.baseline=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution",
    [
        ["compile=graph"],
        ["loading=streaming"],
        ["precision=bf16-mixed", "compile=graph"],
        ["precision=16-mixed"],
    ],
    ids="+".join,
)
def test_a_run_has_the_loss_of_the_cpu(run, on_cpu, execution):
    found = run("gpu", *(f"execution.{setting}" for setting in execution))
    is_exact = not any(setting.startswith("precision") for setting in execution)
    assert found["train"]["final_loss"] == pytest.approx(on_cpu["train"]["final_loss"], rel=1e-3 if is_exact else 0.05)
    assert found["train"]["num_steps"] == on_cpu["train"]["num_steps"]
    assert abs(found["evaluate"]["accuracy"] - on_cpu["evaluate"]["accuracy"]) <= (0.02 if is_exact else 0.05)
    assert on_cpu["train"]["data_wait_fraction"] is not None
    assert found["train"]["data_wait_fraction"] is None, "the host's waits are not the device's"
    assert "device" in found["time_budget"]
    assert "device" not in on_cpu["time_budget"]
    energy = found["train"]["energy"]
    assert energy["source"].startswith("GPUs")
    assert energy["joules"] >= 99 * energy["seconds"], "the counter of this GPU says 100 W"
    assert energy["idle_watts"] >= 99
    assert energy["joules_per_sample"] == {}
    assert "a second" in energy["why_no_samples"]
    assert abs(found["train"]["clock_difference"]) < 0.1
    if "compile=graph" in execution:
        compiled = found["train"]["compile"]
        assert compiled["num_graphs"] == 1
        assert compiled["hit_rate"] > 0.5


WAITING = {
    "PLANTED": str(PRETENDED.with_name("planted") / "sitecustomize.py"),
    "WAITING": "each loss",
    "PRETENDED_CAPTURE_BREAKS": "true",
}


@pytest.mark.slow
def test_a_graph_that_was_asked_for_and_cannot_be_recorded_is_an_error_with_its_remedy(paceline, with_gpu):
    demanded = ["execution.accelerator=gpu", "execution.compile=graph", "speedup.baseline=none"]
    process = paceline("run", "digits", *FIXED, *demanded, **with_gpu, **WAITING)
    _, said = process.communicate(timeout=280)
    assert process.returncode == 1, said
    assert "the step cannot be recorded as a CUDA graph" in said, said
    assert "use execution.compile=auto, step or off" in said, said
    assert "restarting" not in said


@pytest.mark.slow
def test_a_graph_that_auto_cannot_record_costs_a_restart_and_no_run(run, with_gpu):
    """The process that tried is of no use afterwards."""
    long = [
        "recipe.batch_size=8",
        "recipe.num_epochs=12",
        "data.image_size=8",
        "model.width=2",
        "speedup.baseline=none",
    ]
    found = run("gpu", *long, "execution.compile=auto", **WAITING)
    (restart,) = found["train"]["restarts"]
    assert "CaptureError: the step cannot be recorded as a CUDA graph" in restart["cause"]
    assert "the host waits for the device while a graph is captured" in restart["cause"]
    assert found["execution"]["compile"] == "off"
    assert "no CUDA graph, because the step cannot be recorded" in found["execution"]["reasons"]["compile"]["reason"]
    again = run("gpu", *long, "execution.compile=auto", **WAITING)
    assert again["train"]["restarts"] == [], "it is known"
    assert again["execution"]["compile"] == "off"


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "precision"), [("bf16+fp32=0.004", "tf32"), ("tf32+fp32=0.004", "bf16-mixed")])
def test_auto_computes_in_what_is_faster_on_this_gpu(run, tmp_path, slow, precision):
    planted = {"PLANTED": WAITING["PLANTED"], "SLOW_ARITHMETIC": slow, "LAYER_SECONDS": "20"}  # this device is slow
    planted["PACELINE_HOME"] = str(tmp_path)  # without the figures of the other device
    found = run("gpu", "execution.precision=auto", "speedup.baseline=none", "recipe.num_epochs=1", **planted)
    assert found["execution"]["precision"] == precision
    assert found["execution"]["arithmetic"].endswith("cudnn benchmark")
    reason = found["execution"]["reasons"]["precision"]["reason"]
    assert "32-true" in reason, reason
    assert "tf32" in reason, reason


@pytest.mark.slow
def test_a_graph_averages_weights_and_is_captured_again_as_images_grow(run):
    """Sizes 8 to 16 in four epochs; what warms a graph up and captures it is no part of the throughput."""
    growing = ("recipe.ema=0.9", "recipe.progressive_size=8", "recipe.num_epochs=4", "speedup.baseline=none")
    on_cpu = run("cpu", *growing)
    found = run("gpu", "execution.compile=graph", *growing)
    assert found["train"]["final_loss"] == pytest.approx(on_cpu["train"]["final_loss"], rel=1e-3)
    assert abs(found["evaluate"]["accuracy"] - on_cpu["evaluate"]["accuracy"]) <= 0.02
    assert found["train"]["compile"]["num_graphs"] == 3
    assert found["time_budget"]["capture"] > 0


PREDICTED = """
import sys
from pathlib import Path
import numpy as np
from paceline.conf.model import Model
from paceline.tasks.predict import predictor
from tests.support.saved_models import save_model
settings = save_model(Path(sys.argv[1]) / "model", Model(width=2, depth=1), ("a", "b"), (16, 16, 3))
pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
(expected,) = predictor.Predictor(settings)(pixels)
model = predictor.Predictor(settings.model_copy(update={"gpu": True, "num_threads": 3}))
np.testing.assert_allclose(model(pixels)[0], expected, atol=1e-5)
assert model.num_readers == 3
assert model.batch_size(pixels.shape[1:]) == predictor.GPU_BATCH_BYTES // pixels[0].nbytes, "as much as is of use"
predictor.torch.cuda.max_memory_allocated = lambda *_: (1 << 20) + 8 * 2**26
model = predictor.Predictor(settings.model_copy(update={"gpu": True}))
free = predictor.torch.cuda.mem_get_info()[0]
assert model.batch_size(pixels.shape[1:]) == predictor.MEMORY_SHARE * free // 2**26, "64 MiB for each of 8 images"
"""


def test_the_free_memory_of_a_gpu_is_the_batch_of_a_prediction(with_gpu, tmp_path):
    command = [sys.executable, "-c", PREDICTED, tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | with_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SLICES = """
import torch
from paceline.conf.load import load
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.errors import InputError
from paceline.tasks.predict.predictor import device_kind
from paceline.tasks.train.plan import resolve
found = describe()
first, second = found.gpus
assert first.uuid != second.uuid and first.uuid.startswith("MIG-"), found
assert (first.memory_bytes, first.name, first.board[:4]) == (4 << 30, "Pretended GPU MIG 1g.4gb", "GPU-"), first
plan = resolve(load("digits", ["execution.accelerator=gpu"]), found, 1000)
assert plan.device_name == first.name
try:
    resolve(load("digits", ["execution.accelerator=gpu", "execution.num_devices=2"]), found, 1000)
except InputError as error:
    assert "MIG" in str(error), error
else:
    raise SystemExit("NCCL cannot connect slices")
assert device_kind(torch.device("cuda")).endswith("-Pretended-GPU-9-0")
assert device_kind(torch.device("cpu")) in device_kind(torch.device("cuda"))
"""


def test_slices_of_a_gpu_have_their_own_name_and_memory(with_gpu):
    environment = os.environ | with_gpu | {"PRETENDED_SLICES": "2"}
    done = subprocess.run([sys.executable, "-c", SLICES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def exclusive(with_gpu, tmp_path):
    """The same, with one process on the GPU at a time."""
    (tmp_path / "contexts").mkdir()
    return with_gpu | {"PRETENDED_CONTEXTS": str(tmp_path / "contexts"), "PRETENDED_COMPUTE_MODE": "3"}


@pytest.mark.slow
def test_a_rank_is_alone_on_its_gpu(call, exclusive):
    found = call("run", "digits", *FIXED, "execution.accelerator=gpu", "cluster.kind=local_cuda", **exclusive)
    assert found["speedup"]["validity"]["foreign_device_processes"] == 0
    assert len(list(Path(exclusive["PRETENDED_CONTEXTS"]).iterdir())) >= 1


@pytest.mark.slow
def test_a_slow_device_sets_the_throughput_and_not_the_rate_of_launches(call, with_gpu):
    """A step is one launch, and its kernels take longer than the host does."""
    given = with_gpu | {"PRETENDED_KERNEL_MICROSECONDS": "3000"}
    execution = ("execution.accelerator=gpu", "execution.compile=graph", "speedup.diagnose=true")
    found = call("run", "digits", *FIXED, *execution, **given)
    train, budget = found["train"], found["time_budget"]
    seconds = 2 * found["dataset"]["num_train"] / train["samples_per_second"]
    steps = sum(budget.get(item, 0.0) for item in (*STEP_ITEMS, "data_wait"))
    assert seconds == pytest.approx(steps, rel=0.1), budget
    assert budget["device"] > 0.3 * steps, budget
    assert train["data_wait_fraction"] == pytest.approx(found["speedup"]["shares"]["input"][0], abs=0.1)
    assert found["speedup"]["cause"] != "data-bound"


TIMED = """
import torch, pretended_gpu
from tests.benchmarks import in_a_rank

def predictions():
    numbers = torch.zeros(4, device="cuda")
    while True:
        numbers += 1
        yield numbers

times = in_a_rank.timed(predictions())(20)
assert min(times) > 0.9 * pretended_gpu.KERNEL_SECONDS, times
"""


@pytest.mark.slow
def test_goals_time_the_device_and_not_the_launches(with_gpu):
    environment = os.environ | with_gpu | {"PRETENDED_KERNEL_MICROSECONDS": "10000"}
    command = [sys.executable, "-c", TIMED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_idle_in_steps_is_neither_in_tiny_gaps_nor_at_log_points():
    from tests.benchmarks.in_a_rank import MARK, idle_shares

    def kernels(start, number, gap):
        return [("step", start + index * (100 + gap), start + index * (100 + gap) + 100) for index in range(number)]

    def mark(start):
        return [(f"at::cuda::(anonymous namespace)::{MARK}(long)", start, start + 1)]

    warm_up, validation = [*kernels(0, 5, 5000), *mark(25_000)], kernels(26_000, 3, 3000)
    steps = [*mark(40_000), *kernels(40_001, 100, 5), *mark(50_501), *mark(90_000)]
    in_steps, overall = idle_shares([*warm_up, *validation, *steps])
    assert in_steps == 0.0
    assert overall > 0.8
    slow = [*mark(40_000), *kernels(40_001, 100, 100), *mark(60_001), *mark(90_000)]
    assert idle_shares([*warm_up, *validation, *slow])[0] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("goal", "abcdf")
def test_a_goal_is_measured_to_its_end(with_gpu, goal, test_data):
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "small_goals"]
    chosen = f"goal_{goal} and not step]"  # no compiler makes code for it
    command += ["-m", "benchmark", "tests/benchmarks/test_gpu_goals.py", "-k", chosen]
    environment = os.environ | with_gpu | {"PACELINE_TEST_DATA": str(test_data)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"goal {goal.upper()}" in done.stdout
    assert "skipped" not in done.stdout
    if goal == "d":
        assert done.stdout.count("waits of the host between log points: 0 | 0 [] |") == 3, done.stdout
