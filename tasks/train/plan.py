"""Resolves every `auto` of an execution into a value and a reason, from a record of the hardware.

Each rule states the measurement that supports it.
"""

from typing import Literal

from paceline.conf.config import Config
from paceline.conf.execution import CAPTURED, Compile, Loading, MemoryFormat, Precision
from paceline.conf.recipe import FLIPPING
from paceline.tasks.errors import InputError
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Choice
from paceline.tasks.train.checkpoint_interval import rule

# Share of a device's memory for a resident data set; the rest is for the model, its activations and the system.
RESIDENT_MEMORY_FRACTION = 0.25
BF16_CAPABILITY = (8, 0)  # Ampere, the first generation with bf16 and TF32 tensor cores


def resolve(config: Config, hardware: Hardware, num_train: int) -> Plan:
    """Resolve the execution for `hardware` of the first training host; the others must be equal.

    Raises:
        InputError: the hardware cannot execute what the configuration demands.
    """
    reasons: dict[str, Choice] = {}
    accelerator = _accelerator(config, hardware, reasons)
    _check_devices(config, hardware, accelerator)
    precision = _precision(config, hardware, accelerator, reasons)
    if config.execution.checkpoint_steps == "auto":
        reasons["checkpoint_steps"] = rule()
    device_name = hardware.gpus[0].name if accelerator == "gpu" else hardware.cpu_name
    plan = Plan(
        accelerator=accelerator,
        device_name=device_name,
        world_size=config.execution.world_size,
        num_threads=_num_threads(config, hardware, accelerator, reasons),
        precision=precision,
        compile=_compile(config, reasons),
        memory_format=_memory_format(config, accelerator, precision, reasons),
        loading=_loading(config, hardware, accelerator, num_train, reasons),
        strategy=_strategy(config, precision),
        gradient_compression=config.execution.gradient_compression,
        micro_batch=_micro_batch(config, reasons),
        activation_checkpointing=config.execution.activation_checkpointing == "on",
        reasons=reasons,
    )
    _check_graph(plan, hardware)
    return plan


def arm_of(plan: Plan, loads: tuple[float, ...] | None = None) -> Arm:
    """A plan's execution as an arm of a probe."""
    return Arm(
        num_devices=plan.world_size,
        precision=plan.precision,
        compile=plan.compile,
        memory_format=plan.memory_format,
        loading=plan.loading,
        strategy="fsdp" if plan.strategy == "fsdp" else "ddp",
        gradient_compression=plan.gradient_compression,
        micro_batch=plan.micro_batch,
        activation_checkpointing=plan.activation_checkpointing,
        loads=loads,
    )


def can_capture(plan: Plan) -> bool:
    """Whether the whole step could be one CUDA graph, in which NCCL exchanges the gradients of several ranks."""
    can_exchange = plan.world_size == 1 or (plan.strategy == "ddp" and plan.gradient_compression == "off")
    is_free = plan.precision != "16-mixed" and not plan.activation_checkpointing  # of decisions of the host
    return plan.failed_capture is None and plan.accelerator == "gpu" and can_exchange and is_free


def without_graph(plan: Plan, reason: str) -> Plan:
    """The plan without CUDA graphs, after recording one has failed for a reason."""
    chosen = "off" if plan.compile in CAPTURED else plan.compile
    choice = Choice(value=chosen, reason=f"no CUDA graph, because {reason}")
    return plan.model_copy(
        update={"compile": chosen, "failed_capture": reason, "reasons": plan.reasons | {"compile": choice}}
    )


def _accelerator(config: Config, hardware: Hardware, reasons: dict[str, Choice]) -> Literal["cpu", "gpu"]:
    configured = config.execution.accelerator
    if configured == "auto":
        chosen: Literal["cpu", "gpu"] = "gpu" if hardware.gpus else "cpu"
        reason = f"{len(hardware.gpus)} GPUs on {hardware.host}" if hardware.gpus else f"no GPU on {hardware.host}"
        reasons["accelerator"] = Choice(value=chosen, reason=reason)
        return chosen
    if configured == "gpu" and not hardware.gpus:
        raise InputError(
            f"execution.accelerator=gpu, and {hardware.host} has no GPU that NVML sees and torch is built for; "
            "use cpu or auto, install a CUDA build of torch, or fix the driver"
        )
    return configured


def _check_devices(config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"]) -> None:
    available = len(hardware.gpus) if accelerator == "gpu" else hardware.num_cores
    unit = "GPUs" if accelerator == "gpu" else "CPU cores"
    if config.execution.num_devices > available:
        raise InputError(
            f"execution.num_devices={config.execution.num_devices} exceeds the {available} {unit} of {hardware.host}; "
            f"use at most {available}"
        )
    if accelerator == "gpu" and config.execution.world_size > 1 and hardware.gpus[0].board is not None:
        raise InputError(
            f"execution.num_devices={config.execution.num_devices} on {config.execution.num_nodes} hosts, and "
            f"{hardware.host} has slices of divided GPUs (MIG), which NCCL cannot connect; use one device, or whole "
            "GPUs"
        )


def _precision(
    config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], reasons: dict[str, Choice]
) -> Precision:
    configured = config.execution.precision
    if configured in ("16-mixed", "tf32") and accelerator == "cpu":
        raise InputError(
            f"execution.precision={configured} is for GPUs, and {hardware.host} trains on its CPU; "
            "use bf16-mixed or 32-true"
        )
    old = [gpu.name for gpu in hardware.gpus if gpu.compute_capability < BF16_CAPABILITY]
    if configured in ("bf16-mixed", "tf32") and accelerator == "gpu" and old:
        kind = configured.removesuffix("-mixed")
        raise InputError(
            f"execution.precision={configured}: {old[0]} has no {kind} arithmetic; use 16-mixed or 32-true"
        )
    if configured != "auto":
        return configured
    reasons["precision"] = _auto_precision(hardware, accelerator, bool(old))
    return reasons["precision"].value  # type: ignore[return-value]


def _auto_precision(hardware: Hardware, accelerator: Literal["cpu", "gpu"], old_gpu: bool) -> Choice:
    if accelerator == "gpu":
        if old_gpu:
            return Choice(value="16-mixed", reason="a GPU before compute capability 8.0: fp16 tensor cores, no bf16")
        return Choice(value="bf16-mixed", reason="the GPU multiplies bf16 on tensor cores")
    if hardware.cpu_bf16:
        return Choice(value="bf16-mixed", reason="the CPU multiplies bf16 in hardware (AVX512-BF16 or AMX)")
    return Choice(value="32-true", reason="the CPU has neither AVX512-BF16 nor AMX; emulated bf16 would be slower")


def _strategy(config: Config, precision: Precision) -> Literal["single", "ddp", "fsdp"]:
    if config.execution.world_size == 1:
        return "single"
    if config.execution.strategy != "fsdp":
        return "ddp"
    if precision == "16-mixed":  # of `auto`: the configuration itself refuses it
        raise InputError(
            "execution.strategy=fsdp trains in 32-true, tf32 or bf16-mixed, and execution.precision=auto is 16-mixed "
            "on this GPU, which has no bf16 arithmetic; use execution.precision=32-true, or ddp"
        )
    return "fsdp"


def _micro_batch(config: Config, reasons: dict[str, Choice]) -> int | None:
    configured = config.execution.micro_batch
    if configured == "auto":
        sharded = config.execution.strategy == "fsdp"
        reason = "sharded weights are gathered for each pass" if sharded else "as long as the device's memory suffices"
        reasons["micro_batch"] = Choice(value="off", reason=f"a rank's share of a batch in one pass: {reason}")
    return configured if isinstance(configured, int) else None


def _memory_format(
    config: Config, accelerator: Literal["cpu", "gpu"], precision: Precision, reasons: dict[str, Choice]
) -> MemoryFormat:
    configured = config.execution.memory_format
    if configured != "auto":
        return configured
    if accelerator == "gpu" and precision in ("32-true", "64-true"):
        choice = Choice(value="contiguous", reason="full-precision GPU convolutions gain nothing from channels last")
    else:
        choice = Choice(value="channels_last", reason="convolutions read pixels with all channels together")
    reasons["memory_format"] = choice
    return choice.value  # type: ignore[return-value]


def _compile(config: Config, reasons: dict[str, Choice]) -> Compile:
    configured = config.execution.compile
    if configured != "auto":
        return configured
    reason = "compiling takes 10 s or more, which a short training never wins back; a longer one times it first"
    reasons["compile"] = Choice(value="off", reason=reason)
    return "off"


def _check_graph(plan: Plan, hardware: Hardware) -> None:
    if plan.compile not in CAPTURED or can_capture(plan):
        return
    gloo = " whose gradients gloo exchanges outside of any CUDA graph," if plan.accelerator == "cpu" else ""
    raise InputError(
        f"execution.compile={plan.compile} is for GPUs in 32-true, 64-true, tf32 or bf16-mixed, which exchange "
        f"gradients by NCCL without compression, and this is {plan.world_size} {plan.accelerator.upper()} of "
        f"{hardware.host},{gloo} in {plan.precision} with gradient_compression={plan.gradient_compression}; "
        "use step, off or auto"
    )


def _loading(
    config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], num_train: int, reasons: dict[str, Choice]
) -> Loading:
    configured = config.execution.loading
    if configured != "auto":
        return configured
    if config.recipe.vary.crop_scale is not None and config.stored_size[0] > config.data.image_size:
        reason = "random crops are cut out of stored photographs, on all cores of the host"
        reasons["loading"] = Choice(value="streaming", reason=reason)
        return "streaming"
    memory, place, ranks = hardware.memory_bytes, "device memory", config.execution.num_devices
    if accelerator == "gpu":  # ranks take free GPUs first: the fullest of those that they would take
        free = sorted(gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus)
        memory, place, ranks = free[-config.execution.num_devices], "free device memory", 1
    need = resident_bytes(config, num_train) * ranks  # ranks of a host share its memory
    limit = int(memory * RESIDENT_MEMORY_FRACTION)
    fits = need <= limit
    reasons["loading"] = Choice(
        value="resident" if fits else "streaming",
        reason=f"the set takes {need / 2**20:,.0f} MiB of the {limit / 2**20:,.0f} MiB it may use in {place}",
    )
    return "resident" if fits else "streaming"


def resident_bytes(config: Config, num_train: int) -> int:
    """Bytes of the training split in device memory: uint8, padded for shifts, twice with prepared flips."""
    augment = config.recipe.augment
    side = config.data.image_size + (2 * config.recipe.shift_pixels if augment != "none" else 0)
    copies = 2 if augment in FLIPPING else 1
    return num_train * side * side * config.data.num_channels * copies


def _num_threads(
    config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], reasons: dict[str, Choice]
) -> int:
    configured = config.execution.num_threads
    if configured != "auto":
        return configured
    threads = max(1, hardware.num_cores // config.execution.num_devices)
    reasons["num_threads"] = Choice(
        value=threads, reason=f"{hardware.num_cores} cores over {config.execution.num_devices} ranks of a host"
    )
    return threads
