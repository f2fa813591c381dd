"""Records of executions: the plan of a training, and the arms of a probe."""

import itertools
from collections.abc import Collection
from typing import Literal

from paceline.conf.execution import Compile, Compression, Loading, MemoryFormat, Precision
from paceline.tasks.records.record import Choice, Record

_GPU_ARITHMETIC: dict[Precision, str] = {
    "32-true": "ieee fp32",
    "64-true": "fp64",
    "tf32": "tf32",
    "bf16-mixed": "bf16, else ieee fp32",
    "16-mixed": "fp16, else ieee fp32",
}


def arithmetic_of(precision: Precision, accelerator: str) -> str | None:
    """Arithmetic of matrix products and convolutions, which `set_arithmetic` sets; None on CPUs, which have one."""
    # Ratios depend on it as on the precision: before it was set, torch's default made convolutions of 32-true TF32.
    return f"{_GPU_ARITHMETIC[precision]}, cudnn benchmark" if accelerator == "gpu" else None


class Plan(Record):
    """The execution with every `auto` resolved, and the reason of each."""

    accelerator: Literal["cpu", "gpu"]
    device_name: str
    world_size: int
    num_threads: int
    precision: Precision
    compile: Compile
    memory_format: MemoryFormat
    loading: Loading
    strategy: Literal["single", "ddp", "fsdp"]
    gradient_compression: Compression = "off"
    micro_batch: int | None = None  # samples that a rank computes on at once; None for its whole share of a batch
    activation_checkpointing: bool = False  # the backward pass computes activations again
    failed_capture: str | None = None
    """Why the step may not be recorded as a CUDA graph, such as a failure of an earlier attempt; None: it may be."""
    reasons: dict[str, Choice]  # for each field that was `auto`: what was chosen and why

    @property
    def arithmetic(self) -> str | None:
        """Arithmetic on its devices; None on CPUs."""
        return arithmetic_of(self.precision, self.accelerator)


COMPILE_LABELS: dict[Compile, str] = {
    "off": "eager",
    "step": "compiled",
    "graph": "one graph",
    "step_graph": "compiled in one graph",
}
Variant = Literal["full", "synthetic_input", "no_sync", "token_sync", "no_update", "competent"]


class Arm(Record):
    """One way to execute the steps of a probe."""

    num_devices: int
    precision: Precision
    compile: Compile
    memory_format: MemoryFormat
    loading: Loading
    batch_size: int | None = None  # samples per device and step, their mean over the devices; None for the recipe's
    strategy: Literal["ddp", "fsdp"] = "ddp"
    gradient_compression: Compression = "off"
    loads: tuple[float, ...] | None = None
    """Relative speeds of the devices, in proportion to which they share each batch; None for even shares. Without
    meaning on one device, as strategy and compression are."""
    micro_batch: int | None = None  # samples that a device computes on at once; None for its whole share of a batch
    activation_checkpointing: bool = False  # the backward pass computes activations again
    num_threads: int | None = None  # of the CPU, each rank; None: its host's cores over its ranks, or as configured
    variant: Variant = "full"
    """What is left out to see its cost: `synthetic_input` computes on one batch that is there already, `no_sync` leaves
    the gradients of each device alone while all compute, `token_sync` lets the devices wait for each other in each step
    as usual, but exchange a single number, `no_update` leaves the weights as they are. `competent`: a loop in plain
    PyTorch, in a process without Paceline; its workers load, whatever `loading` says."""

    @property
    def label(self) -> str:
        """Short description for people."""
        is_group = self.num_devices > 1
        parts = [f"{self.num_devices} device{'s' if is_group else ''}", self.precision]
        parts += [self.memory_format.replace("_", " "), COMPILE_LABELS[self.compile], self.loading]
        optional = (
            (self.batch_size is not None, f"batch {self.batch_size}"),
            (self.micro_batch is not None, f"micro-batches of {self.micro_batch}"),
            (self.activation_checkpointing, "activation checkpointing"),
            (self.num_threads is not None, f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''}"),
            (is_group and self.strategy != "ddp", self.strategy),
            (is_group and self.gradient_compression != "off", f"{self.gradient_compression} gradients"),
            (is_group and self.loads is not None, f"shares {':'.join(f'{load:.2g}' for load in self.loads or ())}"),
            (self.variant != "full", self.variant.replace("_", " ")),
        )
        return ", ".join([*parts, *(text for applies, text in optional if applies)])


BASELINE = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="foreground")
"""Default baseline of a run."""


def baseline_of(arm: Arm) -> Arm:
    """The default baseline, with as little memory as an arm: it may not fit where it takes more samples at once."""
    memory = {name: getattr(arm, name) for name in ("micro_batch", "activation_checkpointing")}
    return BASELINE.model_copy(update=memory)


FACTORS = {
    "loading": "loading",
    "layout": "memory_format",
    "precision": "precision",
    "threads": "num_threads",
    "compile": "compile",
    "devices": "num_devices",
}
"""Factors from the naive baseline to a run, each with its setting of an arm."""
EXCHANGEABLE = ("loading", "layout", "precision")
"""Factors that a ladder adds in every order. The others follow in one order, because each further combination would be
compiled again (14 to 46 s on CPUs) or occupy all devices."""
FASTER_INPUT = "faster input"  # the move of `paceline advise` that stands for all that could be done about loading
LADDER_PREFIX = "with "  # of the roles of a ladder's arms


def differing_factors(baseline: Arm, candidate: Arm) -> tuple[str, ...]:
    """The factors in which two arms differ, in the order of `FACTORS`."""
    return tuple(factor for factor, name in FACTORS.items() if getattr(baseline, name) != getattr(candidate, name))


def with_factors(baseline: Arm, candidate: Arm, factors: Collection[str]) -> Arm:
    """The candidate with all but these of its factors as in the baseline."""
    others = {name: getattr(baseline, name) for factor, name in FACTORS.items() if factor not in factors}
    return candidate.model_copy(update=others)


def factor_orders(factors: Collection[str]) -> list[tuple[str, ...]]:
    """The orders in which a ladder adds factors, which are in the order of `FACTORS`."""
    last = [factor for factor in factors if factor not in EXCHANGEABLE]
    firsts = itertools.permutations(factor for factor in factors if factor in EXCHANGEABLE)
    return [(*first, *last) for first in firsts]


def ladder_arms(baseline: Arm, candidate: Arm) -> dict[str, Arm]:
    """The arms between two others that a ladder needs, by role."""
    arms = {}
    for order in factor_orders(differing_factors(baseline, candidate)):
        for count in range(1, len(order)):
            factors = [factor for factor in FACTORS if factor in order[:count]]
            arms[LADDER_PREFIX + "+".join(factors)] = with_factors(baseline, candidate, factors)
    return arms
