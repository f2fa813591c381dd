"""A rank's measurement of the user's module for a forecast, without training.

The loader decides the size of a batch, and half of a batch is the only other size: its two halves are two steps.
"""

import math
import socket
from contextlib import ExitStack
from functools import partial

from paceline.tasks.errors import InputError, RunError
from paceline.tasks.host import has_compiler
from paceline.tasks.measure.probe import ArmLostError, run_probe
from paceline.tasks.records.execution import FASTER_INPUT, Arm
from paceline.tasks.records.measurement import AllReduceTime, MeasureResult
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
    single = arm_of(spec.plan).model_copy(update={"num_devices": 1})
    left_out: dict[str, str] = {}
    all_reduces: tuple[AllReduceTime, ...] = ()
    with name_oom("probe", "probe"), group.wait_for_rank_0(), leave_no_trace(), ExitStack() as stack:
        try:
            runners = {"baseline": bench.runner(stack, single)}
            num_samples = runners["baseline"].samples_per_step // bench.num_batches
            num_train, num_epochs = _length(bench, num_samples)
            arms = _profile(single, spec, num_samples) if asked.of_module == "profile" else _moves(single, spec)
            for role, arm in arms.items():
                try:
                    runners[role] = bench.runner(stack, arm)
                except ArmLostError as error:
                    if not asked.can_leave_out:
                        raise
                    left_out[role] = str(error)
            if "candidate" not in runners:  # a probe needs one
                others = [role for role in runners if role != "baseline"]
                if not others:
                    raise RunError(f"the module does not run as any other than {single.label}")
                runners["candidate"] = runners.pop(others[0])
            probe = run_probe(runners, spec.config.speedup, group.broadcast, bench.watch)
            if asked.all_reduce_bytes:
                all_reduces = time_all_reduces(runners["no_sync"].run, asked.all_reduce_bytes, spec, device)
        except ArmLostError as error:
            raise RunError(f"the module does not run as {error}") from error
    return MeasureResult(
        probe=probe.model_copy(update={"left_out": left_out | probe.left_out}),
        all_reduces=all_reduces,
        gradient_bytes=bench.num_trained * GRADIENT_BYTES[spec.plan.gradient_compression],
        num_train=num_train,
        num_epochs=num_epochs,
        host=socket.gethostname(),
    )


def _length(bench: ModuleProbe, num_samples: int) -> tuple[int, int]:
    """Samples of an epoch on one device, and epochs, the same on all ranks. Raises InputError: they are not known."""
    planned, per_epoch = (group.broadcast(float(value)) for value in (bench.planned_steps(), bench.epoch_batches()))
    if not planned:
        fault = "the length of the training is not known: a time limit ends it, or nothing"
        raise InputError(fault, hint="trainer.max_steps=1000", setting="trainer")
    num_batches = planned * bench.num_batches
    num_epochs = 1 if math.isinf(per_epoch) else max(1, round(num_batches / per_epoch))
    return int(num_batches * num_samples / num_epochs), num_epochs


def _profile(single: Arm, spec: RankSpec, num_samples: int) -> dict[str, Arm]:
    """Arms at the loader's batch and at half of it: of one device, and of the group with each kind of exchange."""
    if num_samples < MIN_SAMPLES:
        fault = f"a batch of the training loader has {num_samples} sample, or its size is not known"
        hint = "give the loader batches of two samples or more: their halves show what a step costs whatever its size"
        raise InputError(f"{fault}, and a forecast needs two sizes", hint=hint, setting="data")
    half = single.model_copy(update={"batch_size": num_samples // 2})
    if spec.world_size == 1:
        return {"candidate": half}
    arms = {"half": half}
    for name, one in (("", single), ("half ", half)):
        for variant in ("no_sync", "token_sync", "full"):
            arms[name + variant] = one.model_copy(update={"num_devices": spec.world_size, "variant": variant})
    arms["candidate"] = arms.pop("full")
    return arms


def _moves(single: Arm, spec: RankSpec) -> dict[str, Arm]:
    """Single changes of the execution on one device, by the setting that makes them."""
    changes = {f"execution.precision={precision}": {"precision": precision} for precision in ("bf16-mixed", "32-true")}
    if has_compiler() or spec.plan.accelerator == "gpu":
        changes["execution.compile=step"] = {"compile": "step"}
    changes[FASTER_INPUT] = {"variant": "synthetic_input"}
    arms = {name: single.model_copy(update=change) for name, change in changes.items()}
    return {name: arm for name, arm in arms.items() if arm != single}
