"""What a search chooses on devices whose speeds are planted, and what it makes of arms that cannot be begun."""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from paceline.conf.load import load
from paceline.tasks.errors import CaptureError, MemoryLimitError
from paceline.tasks.measure.probe import ArmRunner
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.records.measurement import Validity
from paceline.tasks.train.autotune import search
from paceline.tasks.train.autotune.choice import choose, without_failed_graph
from paceline.tasks.train.autotune.search import _AutotuneSession, alternatives, autotune, layer_arms
from paceline.tasks.train.plan import arm_of, resolve, without_graph
from tests.support.studies import HARDWARE

ARM = arm_of(resolve(load("digits"), HARDWARE, 1293))


def hunt(error, left_out=None):
    def runner(stack, arm):
        raise error

    bench = SimpleNamespace(runner=runner, left_out=lambda arms: left_out or {})
    return _AutotuneSession(bench, num_steps=1000, step=0.01, budget=10.0, started=0.0)


@pytest.mark.parametrize("kind", ["step", "graph"])
def test_an_arm_that_does_not_compile_is_left_out_with_its_reason(kind):
    found = hunt(RuntimeError("unsupported operator\nat line 3"))
    arm = ARM.model_copy(update={"compile": kind})
    with ExitStack() as stack:
        assert found._start_arm(stack, arm, ARM, compiles=True) is None
    assert found.failed == {arm.label: "unsupported operator at line 3"}


NO_ROOM = [
    MemoryLimitError("a pass over 8 samples needs more memory", 8),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["off", "step"])
def test_an_arm_that_does_not_fit_is_left_out_with_its_reason(kind, error):
    found = hunt(error)
    arm = ARM.model_copy(update={"compile": kind})
    with ExitStack() as stack:
        assert found._start_arm(stack, arm, ARM, compiles=False) is None
    assert found.failed == {arm.label: str(error)}


def test_an_arm_that_an_earlier_attempt_had_no_memory_for_is_not_begun():
    found = hunt(AssertionError("begun"), {"": "no room"})
    with ExitStack() as stack:
        assert found._start_arm(stack, ARM, ARM, compiles=False) is None
    assert found.failed == {ARM.label: "no room"}


@pytest.mark.parametrize(
    ("error", "compile"),
    [(RuntimeError("broken"), "off"), (CaptureError("cannot be recorded"), "graph"), (NO_ROOM[1], "graph")],
)
def test_what_only_a_new_process_can_go_on_after_is_raised(error, compile):
    with ExitStack() as stack, pytest.raises(type(error)):
        hunt(error)._start_arm(stack, ARM.model_copy(update={"compile": compile}), ARM, compiles=False)


STEP = 0.01  # seconds of a step of 64 samples in fp32, contiguous, eager
DEVICES = {
    "bf16 is faster": {"bf16-mixed": 0.4, "tf32": 0.6},
    "tf32 is faster": {"bf16-mixed": 1.3, "tf32": 0.7},
    "bf16 and tf32 are slower": {"bf16-mixed": 1.5, "tf32": 1.2},
    "fp16 is faster": {"16-mixed": 0.5},
    "fp16 is slower": {"16-mixed": 1.25},
}
"""Seconds of a step over those of fp32."""


def device(kind, capability):
    gpu = Gpu(uuid="GPU-0", name="simulated", memory_bytes=2**33, compute_capability=capability)
    host = Hardware(host="here", cpu_name="cpu", num_cores=4, memory_bytes=2**33, cpu_bf16=False, gpus=(gpu,))
    return resolve(load("digits"), host, 1293), DEVICES[kind]


def seconds_of(arm, speeds, host_seconds=0.0):
    """Of a step: what the device takes, at least what the host takes to launch it."""
    seconds = STEP * speeds.get(arm.precision, 1.0) * (arm.batch_size or 64) / 64
    if arm.memory_format == "channels_last":
        seconds *= 0.8 if arm.precision in ("bf16-mixed", "16-mixed") else 1.1
    seconds += 0.1 * STEP if arm.loading == "foreground" and arm.variant == "full" else 0.0
    return seconds if arm.compile == "graph" else max(seconds, host_seconds * (1.5 if "mixed" in arm.precision else 1))


def bench_of(speeds, host_seconds):
    started = set()

    def runner(stack, arm, ready=None):
        def run(number):
            first = arm not in started  # in which cuDNN measures its algorithms
            started.add(arm)
            seconds = seconds_of(arm, speeds, host_seconds)
            return [(1.0 if first and step == 0 else seconds) * (1 + 0.001 * (step % 3)) for step in range(number)]

        return ArmRunner(arm, run, arm.batch_size or 64, arithmetic="simulated")

    watch = SimpleNamespace(stop=Validity)
    return SimpleNamespace(
        runner=runner,
        left_out=lambda arms: {},
        has_room_for_graphs=lambda: True,
        watch=lambda: watch,
        samples_per_device=64,
    )


def executions(plan, speeds):
    """Everything that `auto` may execute on a device, as the training would."""
    settings = itertools.product(
        (*speeds, "32-true"), ("channels_last", "contiguous"), ("resident", "streaming"), ("off", "graph")
    )
    for values in settings:
        arm = arm_of(plan).model_copy(
            update=dict(zip(("precision", "memory_format", "loading", "compile"), values, strict=True))
        )
        if (arm.precision, arm.compile) != ("16-mixed", "graph"):
            yield arm


@pytest.mark.parametrize("num_steps", [60, 100_000], ids=["short", "long"])
@pytest.mark.parametrize("host_seconds", [0.0, 1.2 * STEP], ids=["busy device", "slow host"])
@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("bf16 is faster", (9, 0)),
        ("tf32 is faster", (9, 0)),
        ("bf16 and tf32 are slower", (8, 0)),
        ("fp16 is faster", (7, 0)),
        ("fp16 is slower", (7, 0)),
    ],
)
def test_auto_is_within_2_percent_of_the_best_arm(monkeypatch, kind, capability, host_seconds, num_steps):
    """Goal 5 on simulated GPUs; a short training times the layers alone, in a graph where the rules choose one."""
    monkeypatch.setattr(search, "has_compiler", lambda: False)
    plan, speeds = device(kind, capability)
    found = autotune(bench_of(speeds, host_seconds), plan, num_steps, None)
    chosen = choose(plan, found, arm_of(plan), num_steps)
    may_differ = num_steps > 1000
    best = min(
        seconds_of(arm, speeds, host_seconds)
        for arm in executions(plan, speeds)
        if may_differ or arm.compile == plan.compile
    )
    assert seconds_of(arm_of(chosen), speeds, host_seconds) <= 1.02 * best, chosen.reasons


@pytest.mark.parametrize(("times", "chosen"), [(0.75, "step_graph"), (1.1, "graph")], ids=["faster", "slower"])
def test_a_long_training_in_a_graph_is_compared_with_compiled_kernels_in_a_graph(monkeypatch, times, chosen):
    monkeypatch.setattr(search, "has_compiler", lambda: True)
    monkeypatch.setitem(
        globals(), "seconds_of", lambda arm, *_: STEP * {"step": 0.5, "step_graph": times}.get(arm.compile, 1.0)
    )
    plan, speeds = device("bf16 is faster", (9, 0))
    found = autotune(bench_of(speeds, 0.0), plan, 10_000_000, None)
    plan = choose(plan, found, arm_of(plan), 10_000_000)
    assert plan.compile == chosen
    assert "step_graph " in plan.reasons["compile"].reason, "its figure"


def test_the_reason_quotes_the_figures_of_each_precision():
    plan, speeds = device("tf32 is faster", (9, 0))
    chosen = choose(plan, autotune(bench_of(speeds, 0.0), plan, 60, None), arm_of(plan), 60)
    reason = chosen.reasons["precision"].reason
    assert chosen.precision == "tf32"
    assert reason.startswith("timed before training: ")
    assert "tf32 1.35 x [1.35" in reason
    assert "32-true 0.95 x [0.95" in reason
    assert reason.count("the speed of bf16-mixed") == 2


@pytest.mark.parametrize(
    ("capability", "precisions"), [((9, 0), ["bf16-mixed", "tf32", "32-true"]), ((7, 0), ["16-mixed", "32-true"])]
)
def test_each_open_precision_of_a_gpu_is_timed_in_both_memory_formats(capability, precisions):
    plan, _ = device("bf16 is faster", capability)
    timed = [(arm.precision, arm.memory_format) for arm in layer_arms(plan)]
    assert timed == [(name, layout) for name in precisions for layout in ("channels_last", "contiguous")]


def test_what_cudnn_takes_to_choose_its_algorithms_leaves_the_layers_their_time(monkeypatch):
    """The clock is the arms': 1 s for each first step, of six arms, and a limit of 2 s for all the others."""
    now = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    plan, speeds = device("bf16 and tf32 are slower", (9, 0))
    bench = bench_of(speeds, 0.0)

    def runner(stack, arm, ready=None):
        made = untimed(stack, arm, ready)

        def run(number):
            seconds = made.run(number)
            now[0] += sum(seconds)
            return seconds

        return ArmRunner(arm, run, made.samples_per_step, arithmetic=made.arithmetic)

    untimed, bench.runner = bench.runner, runner
    chosen = choose(plan, autotune(bench, plan, 60, None), arm_of(plan), 60)
    assert (chosen.precision, chosen.memory_format) == ("32-true", "contiguous"), chosen.reasons


@pytest.mark.parametrize("capability", [(9, 0), (7, 0)])
def test_no_arm_is_timed_against_itself(capability):
    plan, _ = device("bf16 is faster", capability)
    assert arm_of(plan) not in alternatives(plan).values()
    assert len({arm.label for arm in layer_arms(plan)}) == len(layer_arms(plan))


def test_layers_are_timed_as_the_training_runs_them_where_there_is_room_for_graphs():
    plan, speeds = device("bf16 is faster", (9, 0))
    for has_room, mode in ((True, "graph"), (False, "off")):
        bench = bench_of(speeds, 1.2 * STEP)
        bench.has_room_for_graphs = lambda has_room=has_room: has_room
        (probe,) = autotune(bench, plan, 60, None).probes
        assert {arm.compile for arm in (probe.candidate, probe.baseline, *probe.others.values())} == {mode}


def test_after_a_failed_recording_no_graph_is_timed_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(search, "has_compiler", lambda: False)
    plan, speeds = device("bf16 is faster", (9, 0))
    plan = without_graph(plan, "the step cannot be recorded as a CUDA graph: it waits")
    found = autotune(bench_of(speeds, 0.0), plan, 100_000, None)
    assert (found.failed, found.failed_capture) == ({}, plan.failed_capture)
    timed = [arm for probe in found.probes for arm in (probe.baseline, *probe.others.values())]
    assert {arm.compile for arm in timed} == {"off"}
    chosen = choose(plan, found, arm_of(plan), 100_000)
    assert chosen.compile == "off"
    assert "no CUDA graph, because the step cannot be recorded" in chosen.reasons["compile"].reason
    again, _ = device("bf16 is faster", (9, 0))
    assert again.compile == "graph"
    assert without_failed_graph(again, None) is again
    known = without_failed_graph(again, found)
    assert (known.compile, known.failed_capture) == ("off", plan.failed_capture)
    demanded = again.model_copy(update={"reasons": {}})
    assert without_failed_graph(demanded, found) is demanded
