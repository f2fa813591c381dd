"""The specification of one rank, written as JSON for its process."""

from pydantic import Field

from paceline.conf.config import Config
from paceline.tasks.measure.records import Measurement
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.measurement import AutotuneResult, ProbeResult
from paceline.tasks.records.record import Record


class RankSpec(Record):
    """Everything one rank needs, as data: `python -m paceline.tasks.train.rank.main spec.json` replays it."""

    config: Config
    plan: Plan
    prepared: PreparedSet
    pretrained: Pretrained | None = None
    """None to begin by the seed."""
    run_id: str
    directory: str
    """Where this rank writes its log, metrics, result and predictions."""
    checkpoint_directory: str
    resume_from: str | None
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    num_nodes: int
    num_devices: int
    """Ranks on each host."""
    master_address: str
    master_port: int
    interface: str | None
    """Network interface that carries the worker's address, for gloo and NCCL."""
    devices: tuple[str, ...] = ()
    """UUIDs of the group's GPUs on this host in one order for all its ranks, indexed by the local rank; empty on
    CPUs."""
    measurement: Measurement | None = None
    """Measure this and train nothing; None to train."""
    probe: ProbeResult | None = None
    """What an earlier attempt of this training has measured; None to measure."""
    search: AutotuneResult | None = None
    """What is known of the executions that `auto` can choose from; None for nothing."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Labels of arms that an earlier attempt had no memory for, and why they are not timed."""
    may_search: bool = False
    """Whether this attempt may time executions before it trains."""
    home: str
    """PACELINE_HOME, for measurements of the device that later trainings use."""
    may_measure_limit: bool = True
    """Whether to measure the limit of the device if it is not known; not while other trainings use the host."""
    coordinator: tuple[str, int]
    """Host and process id of the flow, whose load on this host is the run's own."""
    compile_cache: str
    """Directory for what is compiled; what earlier trainings have left there is not compiled again."""
    code_fingerprint: str
    """Of the code that the coordinator runs; a rank with other code refuses to start."""
    packages: tuple[str, ...] = ()
    """Of the user's packages that the configuration names, as the coordinator has them; as for the code."""
    python_path: str = ""
    """Folder of other packages than those of the worker, imported first; empty for none."""
