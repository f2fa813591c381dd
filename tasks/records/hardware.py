"""Records of hardware."""

from paceline.tasks.records.record import Record


class Gpu(Record):
    """One GPU as NVML names it."""

    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Hardware(Record):
    """Hardware of a host."""

    host: str
    cpu_name: str
    num_cores: int
    memory_bytes: int
    cpu_bf16: bool
    """The CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    gpus: tuple[Gpu, ...] = ()
