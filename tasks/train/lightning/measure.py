"""A rank's measurement of the user's module for a forecast, without training.

The loader decides the size of a batch, and half of a batch is the only other size: its two halves are two steps.
"""

import math
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from paceline.conf.lightning import LENGTH_HINT
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.host import has_compiler
from paceline.tasks.measure.probe import ArmLostError, ArmRunner, run_probe
from paceline.tasks.records.execution import FASTER_INPUT, Arm
from paceline.tasks.records.measurement import AllReduceTime, Measurement, MeasureResult, TrainingLength
from paceline.tasks.train.lightning.fit import join, options_of, strategy
from paceline.tasks.train.lightning.probe import ModuleProbe, leave_no_trace
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import GRADIENT_BYTES, name_oom, time_all_reduces
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec

MIN_SAMPLES = 2  # of a batch, half of which is a batch too


def measure_module(spec: RankSpec, stopwatch: Stopwatch) -> MeasureResult:
    """Measure what the specification asks for.

    Raises:
        InputError: the module or its loader cannot be trained, or a forecast of it is not possible.
        RunError: the module cannot run an arm that is needed.
    """
    stopwatch.switch("setup")
    asked, device = spec.measurement, join(spec)
    assert asked is not None
    bench = ModuleProbe(spec, device, options_of(spec), partial(strategy, spec, device))
    all_reduces: tuple[AllReduceTime, ...] = ()
    with name_oom("probe", "probe"), group.wait_for_rank_0(), leave_no_trace(), ExitStack() as stack:
        try:
            runners, left_out, length = _start_arms(bench, spec, asked, stack)
            probe = run_probe(runners, spec.config.speedup, group.broadcast, bench.watch)
            if probe.left_out and not asked.can_leave_out:
                role, why = next(iter(probe.left_out.items()))
                raise ArmLostError(f"{runners[role].arm.label}: {why}")
            if asked.all_reduce_bytes:
                all_reduces = time_all_reduces(runners["no_sync"].run, asked.all_reduce_bytes, spec, device)
        except ArmLostError as error:
            raise RunError(f"the module does not run as {error}") from error
    bench.close()
    return MeasureResult(
        probe=probe.model_copy(update={"left_out": left_out | probe.left_out}),
        all_reduces=all_reduces,
        gradient_bytes=bench.num_trained * GRADIENT_BYTES[spec.plan.gradient_compression],
        length=length,
        host=socket.gethostname(),
    )


def _start_arms(
    bench: ModuleProbe, spec: RankSpec, asked: Measurement, stack: ExitStack
) -> tuple[dict[str, ArmRunner], dict[str, str], TrainingLength]:
    """The arms by role; those that the module cannot run, where they may be left out; the length of the training."""

    def start(arm: Arm) -> ArmRunner:
        try:
            return bench.runner(stack, arm)
        except ArmLostError as error:
            raise ArmLostError(f"{arm.label}: {error}") from error

    single, several = (arm_of(spec.plan).model_copy(update={"num_devices": number}) for number in (1, spec.world_size))
    whole = start(several) if spec.world_size > 1 else None  # first: all ranks set up their data at once
    runners, left_out = {"baseline": start(single)}, dict[str, str]()
    num_samples = runners["baseline"].samples_per_step // bench.num_batches
    length = _length(bench, num_samples)
    if asked.of_module == "profile":
        arms = _profile(single, several, num_samples)
        runners |= {"candidate": whole} if whole else {}
    else:
        arms = _moves(single, spec)
    for role, arm in arms.items():
        try:
            runners[role] = start(arm)
        except ArmLostError as error:
            if not asked.can_leave_out:
                raise
            left_out[role] = str(error)
    if "candidate" not in runners:  # a probe needs one
        others = [role for role in runners if role != "baseline"]
        if not others:
            raise RunError(f"the module runs as {single.label} alone")
        runners["candidate"] = runners.pop(others[0])
    _check_halves(runners)
    return runners, left_out, length


def _length(bench: ModuleProbe, num_samples: int) -> TrainingLength:
    """The length of the training on one device, the same on all ranks. Raises InputError: it is not known."""
    planned, per_epoch = (group.broadcast(float(value)) for value in (bench.planned_steps(), bench.epoch_batches()))
    if not planned:
        raise InputError("the length of the training is not known", hint=LENGTH_HINT, setting="trainer")
    num_batches = planned * bench.num_batches
    num_epochs = 1 if math.isinf(per_epoch) else max(1, round(num_batches / per_epoch))
    num_train = int(num_batches * num_samples / num_epochs)
    return TrainingLength(
        num_train=num_train, num_epochs=num_epochs, num_steps=int(planned) if bench.has_fixed_steps else None
    )


def _check_halves(runners: Mapping[str, ArmRunner]) -> None:
    """Raise InputError: batches of this kind cannot be halved."""
    whole = {
        runner.arm.num_devices: runner.samples_per_step for runner in runners.values() if not runner.arm.batch_size
    }
    for runner in runners.values():
        if runner.arm.batch_size and runner.samples_per_step >= whole[runner.arm.num_devices]:
            fault = "the batches of the training loader cannot be halved, and a forecast needs two sizes"
            hint = "let the loader give tensors, or dicts, lists, tuples or dataclasses of them"
            raise InputError(fault, hint=hint, setting="data")


def _profile(single: Arm, several: Arm, num_samples: int) -> dict[str, Arm]:
    """Arms at the loader's batch and at half of it, but for those that are there; of several devices by exchange."""
    if num_samples < MIN_SAMPLES:
        fault = f"a batch of the training loader has {num_samples} sample, or its size is not known"
        hint = "give the loader batches of two samples or more: their halves show what a step costs whatever its size"
        raise InputError(f"{fault}, and a forecast needs two sizes", hint=hint, setting="data")
    half = {"batch_size": num_samples // 2}
    if several == single:
        return {"candidate": single.model_copy(update=half)}
    arms = {"half": single.model_copy(update=half)}
    for name, size in (("", {}), ("half ", half)):
        for variant in ("no_sync", "token_sync", "full"):
            arms[name + variant] = several.model_copy(update=size | {"variant": variant})
    del arms["full"]  # it is the candidate
    return arms


def _moves(single: Arm, spec: RankSpec) -> dict[str, Arm]:
    """Single changes of the execution on one device, by the setting that makes them."""
    changes = {f"execution.precision={precision}": {"precision": precision} for precision in ("bf16-mixed", "32-true")}
    if has_compiler() or spec.plan.accelerator == "gpu":
        changes["execution.compile=step"] = {"compile": "step"}
    changes[FASTER_INPUT] = {"variant": "synthetic_input"}
    arms = {name: single.model_copy(update=change) for name, change in changes.items()}
    return {name: arm for name, arm in arms.items() if arm != single}
