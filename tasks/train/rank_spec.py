"""The work of a training, and the specification of one rank of it, written as JSON for its process."""

from pydantic import Field

from paceline.conf.config import Config
from paceline.tasks.records.data import PreparedPartitions, PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.measurement import AutotuneResult, Measurement, ProbeResult
from paceline.tasks.records.record import Record


class Work(Record):
    """What the coordinator of a training and its ranks all have."""

    config: Config
    plan: Plan
    prepared: PreparedSet | None = None  # None for the user's own Lightning code, which has its own data
    partitions: PreparedPartitions | None = None  # what the user's DataModule has prepared; None for nothing
    pretrained: Pretrained | None = None  # initial weights; None to initialise by the seed
    run_id: str
    home: str  # PACELINE_HOME, for measurements of the device that later trainings use
    measurement: Measurement | None = None  # measure this and train nothing; None to train
    search: AutotuneResult | None = None  # earlier timings of the executions that `auto` can choose from; None for none
    may_search: bool = False  # whether the ranks may time executions before they train
    may_measure_limit: bool = True
    """Whether to measure the limit of the device if it is not known; not while other trainings use the host."""
    python_path: str = ""
    """Folders of other packages than those of the workers, which the ranks import first; empty for none."""
    packages: tuple[str, ...] = ()
    """User packages that the configuration names, as the ranks must find them; empty for those of the coordinator."""


class RankSpec(Work):
    """Everything one rank needs, as data: `python -m paceline.tasks.train.rank.main spec.json` replays it."""

    directory: str  # where this rank writes its log, metrics, result and predictions
    checkpoint_directory: str
    resume_from: str | None
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    num_nodes: int
    num_devices: int  # ranks on each host
    master_address: str
    master_port: int
    interface: str | None  # network interface that carries the worker's address, for gloo and NCCL
    devices: tuple[str, ...] = ()
    """UUIDs of the group's GPUs on this host in one order for all its ranks, indexed by the local rank; empty on
    CPUs."""
    probe: ProbeResult | None = None  # what an earlier attempt of this training has measured; None to measure
    left_out: dict[str, str] = Field(default_factory=dict)
    """Labels of arms that an earlier attempt had no memory for, and why they are not timed."""
    is_prepared: bool = False  # whether `prepare_data` has run on this host for this attempt
    coordinator: tuple[str, int]  # host and process id of the flow, whose load on this host is the run's own
    compile_cache: str  # directory for what is compiled; what earlier trainings have left there is not compiled again
    code_fingerprint: str  # of the code that the coordinator runs; a rank with other code refuses to start
