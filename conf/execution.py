"""The settings of how a workload is run on its devices."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.conf.section import Section

Precision = Literal["32-true", "64-true", "tf32", "bf16-mixed", "16-mixed"]
MemoryFormat = Literal["contiguous", "channels_last"]
Loading = Literal["resident", "streaming", "foreground"]
Compile = Literal["off", "step", "graph", "step_graph"]
COMPILED: frozenset[Compile] = frozenset({"step", "step_graph"})  # the network is compiled
CAPTURED: frozenset[Compile] = frozenset({"graph", "step_graph"})  # the step is a CUDA graph
Compression = Literal["off", "bf16"]


class Execution(Section):
    """How a workload is run; free to differ between compared runs."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device; `auto` takes the GPUs where there are any."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Hosts to train on."""
    num_devices: Annotated[int, Field(ge=1)] = 1
    """Devices on each host, one rank each. On CPUs a device is an equal share of the host's cores."""
    precision: Literal["auto", "32-true", "64-true", "tf32", "bf16-mixed", "16-mixed"] = "auto"
    """Arithmetic of the training step. `32-true`: IEEE fp32, also in matrix products and convolutions. `tf32`: fp32
    whose matrix products and convolutions round their inputs to 10 bits, on GPUs of compute capability 8.0 or more.
    `16-mixed` needs a GPU."""
    compile: Literal["auto", "off", "step", "graph", "step_graph"] = "auto"
    """`step` compiles the network with `torch.compile`; `graph` launches the whole step, update included, as one CUDA
    graph, which frees small networks from the host's pace; `step_graph` captures a step of compiled kernels in such a
    graph. Graphs need GPUs; on several, they need `execution.strategy=ddp` and NCCL."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of image tensors."""
    loading: Literal["auto", "resident", "streaming", "foreground"] = "auto"
    """`resident`: the set in device memory; `streaming`: background threads; `foreground`: sample by sample, in
    the step's way."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How ranks share the work; one rank needs none. `ddp`: each holds the whole network; `fsdp`: a part of every
    weight, gradient and optimizer state, for networks that do not fit. Evaluation holds whole weights, and so do probes
    of the presets."""
    activation_checkpointing: Literal["off", "on"] = "off"
    """`on`: the backward pass computes the activations inside each part of the network again, so that they take no
    memory between the two passes; a step takes longer, and its results are the same. Cannot be combined with
    `execution.compile`."""
    gradient_compression: Compression = "off"
    """`bf16`: ranks exchange gradients rounded to 16 bits, half the bytes, for links that are slower than computing."""
    worker_load: Literal["equal", "measured"] | tuple[float, ...] = "equal"
    """How each batch is shared among the ranks. `equal`: evenly; `measured`: in proportion to their speeds, which are
    timed before training; or relative speeds, one number per rank, such as [2,1]. The gradient stays the mean over
    samples."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto", "off"] = "auto"
    """Samples that a rank computes on at once. A larger share of a batch is taken in several passes, whose gradients
    add up to one step: recipe, samples and their order stay as they are. Batch norms take their statistics over a pass.
    `auto`: the whole share; when a GPU's memory does not suffice, the training resumes from its newest checkpoint with
    half of it and logs that; `off`: the whole share."""
    num_threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """CPU threads of each rank; `auto`: the host's cores divided by its ranks. For a training on the CPU, these are the
    physical cores, as in torch."""
    checkpoint_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Steps between checkpoints inside an epoch. `auto` measures the cost of a checkpoint and counts the failures of
    earlier trainings in `PACELINE_HOME`. From both it computes the interval that loses the least time (Young 1974). It
    spends at most 2 % of the time on checkpoints, at least 30 s apart, and loses at most five minutes of work if the
    2 % allow that. An epoch's end that is near takes the place of a checkpoint. null: only each epoch's end has a
    checkpoint."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of times that a training which lost a rank, a worker or a host restarts from its newest checkpoint
    without progress in between. After that the run fails."""

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return self.num_nodes * self.num_devices

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        settings: dict[str, tuple[object, tuple[str, ...]]] = {
            "gradient_compression": (self.gradient_compression, ("off",)),
            "compile": (self.compile, ("auto", "off")),
            "precision": (self.precision, ("auto", "32-true", "tf32", "bf16-mixed")),
            "micro_batch": (self.micro_batch, ("auto", "off")),
        }
        for name, (value, possible) in settings.items():
            if self.strategy == "fsdp" and value not in possible:
                fault = f"execution.{name}={value} cannot be used with execution.strategy=fsdp"
                raise ValueError(f"{fault}; use {name}={' or '.join(possible)}, or execution.strategy=ddp")
        if self.activation_checkpointing == "on" and self.compile not in ("auto", "off"):
            raise ValueError(
                f"execution.activation_checkpointing=on cannot be used with execution.compile={self.compile}: the "
                "compiler and a CUDA graph plan the memory of a step themselves; use execution.compile=off"
            )
        loads = self.worker_load
        if not isinstance(loads, str) and (len(loads) != self.world_size or min(loads) <= 0):
            given = ",".join(f"{load:g}" for load in loads)
            raise ValueError(
                f"execution.worker_load=[{given}] must be one positive number for each of {self.world_size} ranks "
                f"({self.num_nodes} node x {self.num_devices} devices); for example execution.worker_load=equal"
            )
        return self
