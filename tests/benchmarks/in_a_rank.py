"""Measurements inside one rank's process: python in_a_rank.py SPEC.json WHAT SECONDS, in the environment of a rank.

Prints a probe's result as JSON. WHAT: `loading` (goal 1), `prediction` (goals 3 and C), `loop` (goal 4); `device`
(goal D) prints the device's idle shares and the waits of the host between log points; `flops` (goal F) the
operations of a training step by our count and by a profiler's.
"""

import json
import os
import sys
import time
import warnings
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.tasks.data.loading.sampling import StepSchedule
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.streaming import _NUM_BUFFERS
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.flops import count_cost
from paceline.tasks.model.inference import fold_batch_norm, predictions
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.rank.callbacks import (
    BudgetCallback,
    CheckpointCallback,
    ProgressCallback,
    ValidationCallback,
    log_steps,
)
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank.fit import fit
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.benchmark_step import BareStep, StepInputs
from paceline.tasks.train.step.compile import CompileWatch
from paceline.tasks.train.step.precision import forward_context, prepare_network
from tests.support.profiled_flops import profiled_flops

WARM_UP = 3
AHEAD = _NUM_BUFFERS + 1
MARK = "spin_kernel"
"""In the name of the kernel of `torch.cuda._sleep`, which no step launches."""
MIN_GAP = 10.0  # microseconds; shorter gaps are between any two kernels
SYNCHRONISED = "called a synchronizing"
"""As c10/cuda warns of an operation that waits. torch's notice on the mode itself contains "synchronizing" too."""


def chosen(place):
    """The execution that the plan chose."""
    arm = place.candidate_arm()
    assert arm.num_devices == 1
    assert arm.compile != "step", "what is compiled is measured elsewhere"
    return arm


def fit_once(place, loader):
    stopwatch = Stopwatch("startup", time.monotonic())
    return fit(place, loader, StepSchedule(place.batches), stopwatch, Heartbeat(), CompileWatch(), log=None)


def timed(steps):
    """Mean seconds of a number of an iterator's steps, for each of them, the device's work included.

    What a background thread has made while another arm was measured comes first, and does not count.
    """

    def run(number):
        for _ in range(AHEAD):
            next(steps)
        finish()
        started = time.perf_counter()
        for _ in range(number):
            next(steps)
        finish()
        return [(time.perf_counter() - started) / number] * number

    return run


def loading(place):
    """A per-sample DataLoader against what the plan chose, and against streaming: full augmented batches."""

    def endless(loader):
        epoch = 0
        while True:
            loader.seek(epoch * len(loader))
            yield from islice(loader, place.batches.num_full_steps)
            epoch += 1

    arms = {"baseline": BASELINE, "candidate": chosen(place)}
    arms["streaming"] = chosen(place).model_copy(update={"loading": "streaming"})
    size = place.batches.global_batch_size
    return {
        role: ArmRunner(arm, timed(endless(place.loader(arm, place.batches, 0))), size) for role, arm in arms.items()
    }


def finish():
    """Wait for a GPU, ahead of which the host runs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prediction(place):
    """The test split's first batch again and again: a plain fp32 loop against what a run does after its training."""
    _, batch = next(iter(place.evaluation(open_split(place.spec.prepared, "test"))))
    arm = chosen(place)
    plain = prepare_network(place.network, "32-true", channels_last=False, device=place.device)
    ours = prepare_network(
        fold_batch_norm(plain), "32-true", channels_last=place.evaluates_channels_last, device=place.device
    )
    contiguous = batch._replace(images_NCHW=batch.images_NCHW.contiguous())

    def endless(network, context, one):
        while True:
            yield from predictions(network, [(None, one)], context, place.task)

    return {
        "baseline": ArmRunner(
            BASELINE, timed(endless(plain, forward_context("32-true", place.device), contiguous)), len(batch.labels_N)
        ),
        "candidate": ArmRunner(
            arm, timed(endless(ours, forward_context(arm.precision, place.device), batch)), len(batch.labels_N)
        ),
    }


def loop(place):
    """The same steps: a loop by hand, and Lightning with a run's own callbacks, between its log points; no tracking."""
    arm = chosen(place)
    recipe = place.config.recipe
    inputs = StepInputs(place.network, place.task, recipe, recipe.learning_rate, place.device)
    full = place.batches.num_full_steps
    by_hand = BareStep(inputs, arm, place.loader(arm, place.batches, 0), full)

    def lightning(number):
        loader = place.loader(arm, place.batches, 0)
        windows = fit_once(place, loader)[1]["windows"]
        loader.close()
        return [seconds / steps for _, steps, seconds in windows[1:] for _ in range(steps)]

    def in_windows(times):
        length = log_steps(full)
        windows = [times[start : start + length] for start in range(0, len(times), length)]
        return [sum(window) / len(window) for window in windows[1:] for _ in window]

    steps = recipe.num_epochs * full
    samples = place.batches.global_batch_size
    return {
        "baseline": ArmRunner(arm, lightning, samples),
        "candidate": ArmRunner(arm, lambda number: in_windows(by_hand.run(steps)), samples),
    }


def device(place):
    """How long the device has nothing to do in steps, and how often the host waits for it between log points.

    What is no step (log points, validation, checkpoints) is between two marks on the device.
    """
    for kind, name in ((ProgressCallback, "close_window"), (ValidationCallback, "on_train_epoch_end")):
        setattr(kind, name, may_wait(getattr(kind, name)))
    CheckpointCallback._save = may_wait(CheckpointCallback._save)
    BudgetCallback.on_train_end = watched_until(BudgetCallback.on_train_end)
    loader = place.loader(place.candidate_arm(), place.batches, 0)
    with warnings.catch_warnings(record=True) as told, profile(activities=[ProfilerActivity.CUDA]) as profiled:
        warnings.simplefilter("always")
        fit_once(place, loader)
    loader.close()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type.name == "CUDA"
    ]
    in_steps, overall = idle_shares(kernels)
    waits = [str(one.message) for one in told if SYNCHRONISED in str(one.message)]
    return {"idle": in_steps, "idle_overall": overall, "num_waits": len(waits), "waits": sorted(set(waits))}


def flops(place):
    """Of an eager step: our count, and that of a profiler of the device's own step."""
    arm = chosen(place).model_copy(update={"compile": "off"})
    cost, reason = count_cost(place.new_network(), place.spec.prepared.picture_shape)
    assert cost is not None, reason
    inputs = StepInputs(place.network, place.task, place.config.recipe, place.config.recipe.learning_rate, place.device)
    with closing(place.loader(arm, place.batches, 0)) as loader:
        steps = BareStep(inputs, arm, loader, place.batches.num_full_steps)
        steps.run(WARM_UP)
        profiled = profiled_flops(lambda: steps.run(1))
    return {"counted": cost.training_flops * place.batches.global_batch_size, "profiled": profiled}


def may_wait(method):
    """Of a callback: the host may wait for the device in it, and is watched from its end on."""

    def quietly(*arguments, **keywords):
        torch.cuda.set_sync_debug_mode("default")
        if not open_calls:
            torch.cuda._sleep(1)
        open_calls.append(method)
        try:
            return method(*arguments, **keywords)
        finally:
            open_calls.pop()
            if not open_calls:
                torch.cuda._sleep(1)
                torch.cuda.set_sync_debug_mode("warn")

    return quietly


open_calls = []
"""Of what may wait: a checkpoint closes a window of losses."""


def watched_until(method):
    """Of a callback: after it Lightning takes network and optimizer to the host, which is no step any more."""

    def last(*arguments, **keywords):
        torch.cuda.set_sync_debug_mode("default")
        return method(*arguments, **keywords)

    return last


def idle_shares(kernels):
    """The share of the time that no kernel covers: of the time in steps, and of all from the first kernel to the last.

    `kernels` are names with start and end in microseconds. In steps only gaps above `MIN_GAP` count. Steps are the time
    outside of pairs of marks; those before the end of the first pair warm up.
    """
    assert kernels, "the profiler saw no kernel"
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    begin = end = kernels[0][1]
    num_marks = idle = idle_in_steps = seconds_in_steps = 0
    for name, start, stop in kernels:
        gap, last = max(0.0, start - end), end
        end = max(end, stop)
        idle += gap
        if num_marks > 0 and num_marks % 2 == 0:
            idle_in_steps += gap if gap > MIN_GAP else 0.0
            seconds_in_steps += end - last
        num_marks += MARK in name
    assert seconds_in_steps > 0, "no step after the first log point"
    return idle_in_steps / seconds_in_steps, idle / (end - begin)


def main(spec_path, what, seconds):
    place = RankContext(RankSpec.model_validate_json(Path(spec_path).read_text()))
    place.build_network()
    if what in ("device", "flops"):
        print(json.dumps({"device": device, "flops": flops}[what](place)))
        return
    changes = {"max_seconds": float(seconds), "num_blocks": 1000, "target_half_width": 0.005}
    settings = place.config.speedup.model_copy(update=changes)
    runners = {"loading": loading, "prediction": prediction, "loop": loop}[what](place)
    found = run_probe(runners, settings, watch=lambda: ValidityWatch([os.getpid()]))
    print(found.model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
