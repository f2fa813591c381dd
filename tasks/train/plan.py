"""Resolves every `auto` of an execution into a value and a reason, from a record of the hardware.

Each rule states the measurement that supports it.
"""

from collections.abc import Callable
from typing import Any, Literal

from paceline.conf.config import Config
from paceline.conf.execution import CAPTURED, Precision
from paceline.conf.recipe import FLIPPING
from paceline.tasks.errors import InputError
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Choice
from paceline.tasks.train.checkpoint_interval import rule

# Share of a device's memory for a resident data set; the rest is for the model, its activations and the system.
RESIDENT_MEMORY_FRACTION = 0.25
EAGER = Choice(
    value="off",
    reason="compiling takes 10 s or more, which a short training never wins back; a longer one times it first",
)
RECORDED = "recording takes milliseconds, and the device then does not wait for the host to launch each kernel"
OWN_NETWORK = "a network of a user's package may draw numbers on the host, which a graph would repeat"
OWN_STEPS = "Lightning's Trainer takes the steps of your module, and not as one graph"
BF16_CAPABILITY = (8, 0)  # Ampere, the first generation with bf16 and TF32 tensor cores


def resolve(config: Config, hardware: Hardware, num_train: int) -> Plan:
    """Resolve the execution for `hardware` of the first training host; the others must be equal.

    Raises InputError: the hardware cannot execute what the configuration demands.
    """
    execution, reasons = config.execution, dict[str, Choice]()

    def pick(name: str, rule: Callable[[], Choice]) -> Any:
        """The configured value, or for `auto` that of a rule, whose reason is recorded."""
        configured = getattr(execution, name)
        if configured != "auto":
            return configured
        reasons[name] = rule()
        return reasons[name].value

    gpus = f"{len(hardware.gpus)} GPUs" if hardware.gpus else "no GPU"
    device = Choice(value="gpu" if hardware.gpus else "cpu", reason=f"{gpus} on {hardware.host}")
    accelerator = pick("accelerator", lambda: device)
    _check_devices(config, hardware, accelerator)
    is_old = _check_precision(config, hardware, accelerator)
    precision = pick("precision", lambda: _precision(hardware, accelerator, is_old))
    pick("checkpoint_steps", rule)
    micro_batch = pick("micro_batch", lambda: _micro_batch(config))
    plan = Plan(
        accelerator=accelerator,
        device_name=hardware.gpus[0].name if accelerator == "gpu" else hardware.cpu_name,
        world_size=execution.world_size,
        num_threads=pick("num_threads", lambda: _num_threads(hardware, accelerator, execution.num_devices)),
        precision=precision,
        compile=pick("compile", lambda: EAGER),
        memory_format=pick("memory_format", lambda: _memory_format(accelerator, precision)),
        loading=pick("loading", lambda: _loading(config, hardware, accelerator, num_train)),
        strategy=_strategy(config, precision),
        gradient_compression=execution.gradient_compression,
        micro_batch=None if micro_batch == "off" else micro_batch,
        activation_checkpointing=execution.activation_checkpointing == "on",
        reasons=reasons,
    )
    if "compile" in reasons and accelerator == "gpu" and (config.model.plugin or config.lightning.settings):
        plan = without_graph(plan, OWN_STEPS if config.lightning.settings else OWN_NETWORK)
    # On several GPUs, which have not run graphs yet, only where one is asked for.
    if "compile" in reasons and can_capture(plan) and plan.world_size == 1:
        plan = with_changes(plan, {"compile": "graph"}, RECORDED)
    if plan.compile in CAPTURED and not can_capture(plan):
        gloo = " whose gradients gloo exchanges outside of any CUDA graph," if plan.accelerator == "cpu" else ""
        raise InputError(
            f"execution.compile={plan.compile} is for GPUs in 32-true, 64-true, tf32 or bf16-mixed, which exchange "
            f"gradients by NCCL without compression, and this is {plan.world_size} {plan.accelerator.upper()} of "
            f"{hardware.host},{gloo} in {plan.precision} with gradient_compression={plan.gradient_compression}; "
            "use step, off or auto"
        )
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


def with_changes(plan: Plan, changes: dict[str, Any], reason: str) -> Plan:
    """The plan with other values, all for one reason."""
    reasons = plan.reasons | {name: Choice(value=value, reason=reason) for name, value in changes.items()}
    return plan.model_copy(update=changes | {"reasons": reasons})


def without_graph(plan: Plan, reason: str) -> Plan:
    """The plan without CUDA graphs, after recording one has failed for a reason."""
    changes = {"compile": "off" if plan.compile in CAPTURED else plan.compile}
    failed = plan.model_copy(update={"failed_capture": reason})
    return with_changes(failed, changes, f"no CUDA graph, because {reason}")


def _check_devices(config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"]) -> None:
    if accelerator == "gpu" and not hardware.gpus:
        fault = f"execution.accelerator=gpu, and {hardware.host} has no GPU that NVML sees and torch is built for"
        raise InputError(f"{fault}; use cpu or auto, install a CUDA build of torch, or fix the driver")
    available, unit = (len(hardware.gpus), "GPUs") if accelerator == "gpu" else (hardware.num_cores, "CPU cores")
    asked = f"execution.num_devices={config.execution.num_devices}"
    if config.execution.num_devices > available:
        raise InputError(f"{asked} exceeds the {available} {unit} of {hardware.host}; use at most {available}")
    if accelerator == "gpu" and config.execution.world_size > 1 and hardware.gpus[0].board is not None:
        fault = f"{asked} on {config.execution.num_nodes} hosts, and {hardware.host} has slices of divided GPUs (MIG)"
        raise InputError(f"{fault}, which NCCL cannot connect; use one device, or whole GPUs")


def _check_precision(config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"]) -> bool:
    """Refuse a precision that the devices do not have; return whether one of the GPUs has no bf16."""
    configured = config.execution.precision
    if configured in ("16-mixed", "tf32") and accelerator == "cpu":
        place = f"{hardware.host} trains on its CPU"
        raise InputError(f"execution.precision={configured} is for GPUs, and {place}; use bf16-mixed or 32-true")
    old = [gpu.name for gpu in hardware.gpus if gpu.compute_capability < BF16_CAPABILITY]
    if configured in ("bf16-mixed", "tf32") and accelerator == "gpu" and old:
        lacks = f"{old[0]} has no {configured.removesuffix('-mixed')} arithmetic"
        raise InputError(f"execution.precision={configured}: {lacks}; use 16-mixed or 32-true")
    return bool(old)


def _num_threads(hardware: Hardware, accelerator: Literal["cpu", "gpu"], ranks: int) -> Choice:
    """On a CPU as many as torch takes; with a GPU, threads read and decode, for which a logical core is enough."""
    cores = hardware.compute_threads if accelerator == "cpu" else hardware.num_cores
    kind = "cores" if cores == hardware.num_cores else "physical cores"
    return Choice(value=max(1, cores // ranks), reason=f"{cores} {kind} over {ranks} ranks of a host")


def _precision(hardware: Hardware, accelerator: Literal["cpu", "gpu"], is_old: bool) -> Choice:
    if accelerator == "gpu" and is_old:
        return Choice(value="16-mixed", reason="a GPU before compute capability 8.0: fp16 tensor cores, no bf16")
    if accelerator == "gpu":
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
        fault = "execution.strategy=fsdp trains in 32-true, tf32 or bf16-mixed"
        reason = "execution.precision=auto is 16-mixed on this GPU, which has no bf16 arithmetic"
        raise InputError(f"{fault}, and {reason}; use execution.precision=32-true, or ddp")
    return "fsdp"


def _micro_batch(config: Config) -> Choice:
    sharded = config.execution.strategy == "fsdp"
    reason = "sharded weights are gathered for each pass" if sharded else "as long as the device's memory suffices"
    return Choice(value="off", reason=f"a rank's share of a batch in one pass: {reason}")


def _memory_format(accelerator: Literal["cpu", "gpu"], precision: Precision) -> Choice:
    if accelerator == "gpu" and precision in ("32-true", "64-true"):
        return Choice(value="contiguous", reason="full-precision GPU convolutions gain nothing from channels last")
    return Choice(value="channels_last", reason="convolutions read pixels with all channels together")


def _loading(config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], num_train: int) -> Choice:
    if config.recipe.vary.crop_scale is not None and config.stored_size[0] > config.data.image_size:
        reason = "random crops are cut out of stored photographs, on all cores of the host"
        return Choice(value="streaming", reason=reason)
    memory, place, ranks = hardware.memory_bytes, "device memory", config.execution.num_devices
    if accelerator == "gpu":  # ranks take free GPUs first: the fullest of those that they would take
        free = sorted(gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus)
        memory, place, ranks = free[-config.execution.num_devices], "free device memory", 1
    # uint8, padded for shifts, twice with prepared flips; ranks of a host share its memory.
    augment = config.recipe.augment
    side = config.data.image_size + (2 * config.recipe.shift_pixels if augment != "none" else 0)
    copies = 2 if augment in FLIPPING else 1
    need = num_train * side * side * config.data.num_channels * copies * ranks
    limit = int(memory * RESIDENT_MEMORY_FRACTION)
    return Choice(
        value="resident" if need <= limit else "streaming",
        reason=f"the set takes {need / 2**20:,.0f} MiB of the {limit / 2**20:,.0f} MiB it may use in {place}",
    )
