"""The ways that only a GPU takes, on one that is not there (tests/support/pretended): what it says of them is not
how fast they are, but that they go to their end, with the CPU's numbers.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PRETENDED = Path(__file__).parents[2] / "support" / "pretended"
ON_DEVICE = "batches or captured"
"""Of tests/gpu, what needs nothing of a GPU but its memory and its graphs."""
FIXED = [
    "execution.memory_format=channels_last",
    "execution.loading=resident",
    "execution.precision=32-true",
    "execution.compile=off",
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
        "PYTHONPATH": os.pathsep.join((str(PRETENDED), str(ROOT))),
        "PRETENDED_GUARD": str(guard),
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",  # what Dask itself asks a driver
    }


def test_tests_of_the_gpu_pass(with_gpu):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", ON_DEVICE]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | with_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout, done.stdout


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


def test_it_refuses_what_a_gpu_refuses_and_a_graph_is_one(with_gpu):
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, env=os.environ | with_gpu, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run(call, with_gpu):
    def to_the_end(accelerator, *overrides):
        given = with_gpu if accelerator == "gpu" else {}
        return call("run", "digits", *FIXED, f"execution.accelerator={accelerator}", *overrides, **given)

    return to_the_end


@pytest.fixture(scope="module")
def on_cpu(run):
    return run("cpu", "speedup.baseline=none")


@pytest.mark.parametrize(
    "execution",
    [
        ["compile=graph"],
        pytest.param(["loading=streaming"], marks=pytest.mark.slow),
        pytest.param(["precision=bf16-mixed", "compile=graph"], marks=pytest.mark.slow),
        pytest.param(["precision=16-mixed"], marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_a_run_has_the_loss_of_the_cpu(run, on_cpu, execution):
    found = run("gpu", *(f"execution.{setting}" for setting in execution))
    is_exact = not any(setting.startswith("precision") for setting in execution)
    assert found["train"]["final_loss"] == pytest.approx(on_cpu["train"]["final_loss"], rel=1e-3 if is_exact else 0.05)
    assert found["train"]["num_steps"] == on_cpu["train"]["num_steps"]
    assert abs(found["evaluate"]["accuracy"] - on_cpu["evaluate"]["accuracy"]) <= (0.02 if is_exact else 0.05)
    if "compile=graph" in execution:
        compiled = found["train"]["compile"]
        assert compiled["num_graphs"] == 1
        assert compiled["hit_rate"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("goal", "abcd")
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
