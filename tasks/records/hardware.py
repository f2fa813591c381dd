"""Records of hardware."""

from paceline.tasks.records.record import Record


class Gpu(Record):
    """One GPU as NVML names it, or one slice of a divided GPU (MIG)."""

    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int | None = None  # memory that was free when it was described
    compute_capability: tuple[int, int]
    board: str | None = None  # UUID of the divided GPU that it is a slice of


class Hardware(Record):
    """Hardware of a host."""

    host: str
    cpu_name: str
    num_cores: int  # logical cores
    num_physical_cores: int | None = None  # None if unknown, as of a Slurm node before it is allocated
    memory_bytes: int
    cpu_bf16: bool  # the CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)
    gpus: tuple[Gpu, ...] = ()

    @property
    def compute_threads(self) -> int:
        """Threads that compute at once on all cores, as many as torch takes by default.

        Two threads on one physical core share its arithmetic units.
        """
        return self.num_physical_cores or self.num_cores


class DeviceLimit(Record):
    """Rates that one device reached in a process: the limit with which the rates of a training step are compared."""

    device_name: str  # model of the GPU or CPU
    driver: str | None  # version of the GPU's driver; None on a CPU
    torch: str  # version
    num_threads: int | None  # CPU threads of the process; None on a GPU
    flops_per_second: dict[str, float]
    """Best rate of a matrix product by precision, such as `bf16-mixed`; a multiplication with its addition is two
    operations."""
    bytes_per_second: float  # best rate of a copy within the device's memory; bytes read and bytes written
    seconds: float  # duration of the measurement
    contaminated: bool | None = None  # whether other work used the machine meanwhile; None for unknown
