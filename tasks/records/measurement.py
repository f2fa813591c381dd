"""Records of measurements: probes, their validity, autotuning, and groups of ranks that measure without training."""

import statistics
from typing import Literal

from pydantic import Field

from paceline.tasks.records.execution import Arm
from paceline.tasks.records.record import Record


class Block(Record):
    """One measured block of one arm."""

    arm: str
    """Role of the arm: `baseline`, `candidate`, `single` (the candidate's execution on one device, for parallel
    efficiency), or a key of `ProbeResult.others`."""
    seconds_per_sample: float
    """Total time of the block's steps over their samples; the first of three or more steps, in which caches are filled
    again, is left out. In probes from before November 2026 the median step."""
    typical_seconds_per_sample: float | None = None  # median over the steps of the block; None where not recorded
    num_steps: int
    rank_seconds: tuple[float, ...] = ()
    """Mean step seconds of each rank by its own clock, of arms in which the ranks do not wait for each other; empty
    otherwise."""
    joules_per_sample: float | None = None  # processors of rank 0's host, all steps; None: no counter is fast enough
    step_variance: float | None = None  # of the counted steps over their squared mean; None where not timed one by one


Rates = dict[str, tuple[float, float | None, float | None]]


class Energy(Record):
    """Energy of the GPUs and processors of a training's hosts in the fit, neighbours included."""

    joules: float
    low: float | None
    high: float | None
    """The reading less and more the error that is assumed of the sensors; None while neighbours had a part in it."""
    source: str  # the measured hardware
    seconds: float  # of the measurement on the first host
    idle_watts: float | None = None  # of the same hardware before the ranks started; None: not measured, as in a resume
    neighbours: tuple[str, ...] = ()  # other processes meanwhile, with the cores that they kept busy
    joules_per_sample: Rates = Field(default_factory=dict)  # of `baseline` and `candidate`, with 95 % interval
    why_no_samples: str = ""  # reason for an empty `joules_per_sample`


class Validity(Record):
    """Validity of a measurement: other work on its host. None where the platform does not report it."""

    steal_fraction: float | None = None  # share of CPU time that the hypervisor took
    foreign_load: float | None = None  # mean number of cores busy with processes that do not belong to the run
    num_cores: int | None = None
    foreign_device_processes: int | None = None  # processes of others with memory on the run's GPUs; None without a GPU
    min_cpu_mhz: float | None = None  # lowest and highest clock seen on any core at the start and the end
    max_cpu_mhz: float | None = None
    min_gpu_clock_fraction: float | None = None  # lowest multiprocessor clock seen on a busy GPU, over its highest
    throttled: tuple[str, ...] = ()  # reasons why a GPU or CPU ran slower than it could: `power cap`, `thermal`
    throttled_fraction: float | None = None
    """Largest share of the time in which the power cap or heat lowered the clock of a GPU, by its driver's counters."""
    mean_gpu_watts: float | None = None  # mean power of the run's GPUs on this host, all together
    cached_fraction: float | None = None  # share of the prepared set's bytes that lay in the page cache at the start
    contaminated: bool | None = None  # True when any of the above is beyond its limit; None for nothing observed
    reasons: tuple[str, ...] = ()  # one clause per limit that was broken, with the figure


class CompetentCosts(Record):
    """Costs of the competent loop besides its steps, in seconds; rank 0's."""

    start_seconds: float  # processor time of starting the interpreter and importing torch. Other work runs at that time
    build_seconds: float  # from the network to the end of the second step, with the start of the workers that load
    evaluation_seconds: tuple[float, ...]  # for a sample, in repeats
    record_seconds: float  # writing the weights and a result to a file
    num_workers: int  # processes that load, of each rank
    num_threads: int  # of each rank


class ProbeResult(Record):
    """Raw outcome of a paired probe. Mappings of arms, and `diverged`, are keyed as `Block.arm`."""

    baseline: Arm
    candidate: Arm
    batch_size: int  # samples per device and step
    samples_per_step: dict[str, int] = Field(default_factory=dict)  # of an arm over all devices; empty: not recorded
    others: dict[str, Arm] = Field(default_factory=dict)
    """Further arms of the same rounds, keyed as `Block.arm`, such as `single`, `half_batch`, `with loading`,
    `competent`, and `all_cores`: the candidate's execution on one rank with the cores of all."""
    diverged: tuple[str, ...] = ()  # arms whose last loss is not finite: their steps are not those of a training
    left_out: dict[str, str] = Field(default_factory=dict)  # arms that could not be executed, by role, and why
    competent: CompetentCosts | None = None  # of the arm `competent`, a loop in a process of its own; None without it
    arithmetic: dict[str, str] = Field(default_factory=dict)  # of each arm on GPUs; empty on CPUs or not recorded
    rounds: tuple[tuple[Block, ...], ...]  # one inner tuple per round: one block of each arm, in the order they ran
    warm_up: tuple[tuple[Block, ...], ...] = ()  # earlier rounds, whose times show that the process was warming up
    seconds: float
    stopped_because: Literal["interval narrow enough", "time is up", "all blocks done"]
    validity: Validity = Validity()  # of the machine during the probe, rank 0's host
    num_repeats: int = 0  # restarts of the probe because the machine was contaminated; the last attempt counts
    steps: str | None = None  # SHA-256 of the file `steps.npz` with the time of each step; None where not recorded

    def seconds_per_sample(self, role: str) -> float:
        """Median over the blocks of an arm, which has at least one."""
        blocks = (block for blocks in self.rounds for block in blocks)
        return statistics.median(block.seconds_per_sample for block in blocks if block.arm == role)


class SlowArm(Record):
    """An arm whose first steps took too long to compare it further."""

    arm: Arm
    candidate: Arm  # the arm that it was compared with
    times: float  # seconds of a step over those of the candidate's


class AutotuneResult(Record):
    """Timings before a training, compared with the execution that the rules chose."""

    probes: tuple[ProbeResult, ...]
    """One after the other. In each the `candidate` is the best execution known by then, the first one the rules'; the
    `baseline` and the others are what could be better."""
    slower: tuple[SlowArm, ...] = ()  # arms that were left out after their first steps
    failed: dict[str, str] = Field(default_factory=dict)
    """Arms that were left out because compiling them failed or they did not fit into memory, by label, and why. Of own
    Lightning code also the rules' arm, where the module does not run in its precision."""
    num_steps: int = 0  # of the training for which it was made
    failed_capture: str | None = None  # why no arm is a CUDA graph although the rules chose one
    compile_seconds: float = 0.0  # that compiling took in it
    budget_seconds: float  # that it might take
    seconds: float  # that it took, all included
    validity: Validity = Validity()  # of rank 0's host meanwhile; what a contaminated one has shown is not gone by


class Measurement(Record):
    """Measurement of a group of ranks in place of training."""

    arms: dict[str, Arm]
    """By role; `baseline` and `candidate` among them. An arm has one device or all of the group's. None: the layers are
    timed, as before a training (`AutotuneResult`)."""
    all_reduce_bytes: tuple[int, ...] = ()  # sizes of the messages whose all-reduce is timed; needs at least two ranks
    can_leave_out: bool = False  # arms other than baseline and candidate may be left out if they cannot be executed
    of_module: Literal["profile", "moves"] | None = None
    """Arms of own Lightning code. The ranks choose them, as only its loader knows the size of a batch; `arms` is
    empty. `profile`: one device and several, at the loader's batch and at half of it; `moves`: single changes."""

    def is_optional(self, label: str | None) -> bool:
        """Whether the arm of a label may be left out."""
        if self.of_module is not None:
            return self.can_leave_out
        needed = {arm.label for role, arm in self.arms.items() if role in ("baseline", "candidate")}
        return label not in needed and (self.can_leave_out or not self.arms)


class FurtherStarts(Record):
    """Probes of a training's two arms in further fresh processes, each short."""

    probes: tuple[ProbeResult, ...] = ()  # disturbed ones included
    seconds: float = 0.0  # wall time of these processes, failed ones included
    reason: str = ""  # why there are so many, or none

    @property
    def undisturbed(self) -> tuple[ProbeResult, ...]:
        """The probes that count."""
        return tuple(probe for probe in self.probes if not probe.validity.contaminated)


class AllReduceTime(Record):
    """One measured all-reduce."""

    num_bytes: int
    num_devices: int
    seconds: float  # median over repeats, as rank 0 sees it
    spread: float  # distance of the quartiles, seconds


class TrainingLength(Record):
    """Length of a training on one device."""

    num_train: int  # samples of an epoch
    num_epochs: int
    num_steps: int | None = None  # of a training that takes as many steps on several devices; else None


class MeasureResult(Record):
    """Result of a measurement."""

    probe: ProbeResult
    all_reduces: tuple[AllReduceTime, ...]
    gradient_bytes: int  # all-reduced per step: 4 for each parameter, 2 where gradients are compressed
    length: TrainingLength | None = None  # of own Lightning code
    host: str = ""  # name of rank 0's host
