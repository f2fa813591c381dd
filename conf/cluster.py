"""The settings of where the Dask workers come from."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from paceline.conf.execution import Execution
from paceline.conf.hints import typed
from paceline.conf.section import Section, Shape, Text

# What ends in a job script, on a command line of another host or in its shell: no blank, quote or line break.
Address = Annotated[
    Text,
    Shape(
        r"(?:(?:tcp|tls)://)?(?:\[[A-Za-z0-9:.%]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}",
        "is not the address of a Dask scheduler, such as tls://host:8786",
    ),
]
Host = Annotated[Text, Shape(r"[A-Za-z0-9_:][A-Za-z0-9_.:%@-]*", "is not the name of a host, such as node1")]
Interface = Annotated[
    Text, Shape(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,14}", "is not the name of a network interface, such as eth0")
]
SlurmName = Annotated[
    Text,
    Shape(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@-]*", "is not a name that Slurm allows; use letters, digits and _ . , : + @ -"),
]
TimeLimit = Annotated[
    Text, Shape(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", "is not a time limit of Slurm, such as 2:00:00 or 1-12")
]
Memory = Annotated[Text, Shape(r"[1-9][0-9]*[MGT]", "is not an amount of memory, such as 64G")]
SBATCH_OPTIONS = (
    "acctg-freq begin cluster-constraint clusters comment constraint contiguous core-spec cores-per-socket cpu-freq "
    "cpus-per-gpu deadline delay-boot dependency distribution exclude exclusive extra-node-info gpu-bind gpu-freq "
    "gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold kill-on-invalid-dep licenses "
    "mail-type mail-user mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodelist "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket overcommit oversubscribe power prefer priority "
    "profile qos reboot requeue reservation signal sockets-per-node spread-job switches thread-spec threads-per-core "
    "time-min tmp tres-bind tres-per-task use-min-nodes wait-all-nodes wckey"
)
"""Those that choose nodes, resources, order and account. Not those that set variables, name files or bring a command
(`export`, `output`, `wrap`, `prolog`): they would run code or overwrite files on the node."""
SbatchOption = Annotated[
    Text,
    Shape(
        rf"--(?:{'|'.join(SBATCH_OPTIONS.split())})(?:=[A-Za-z0-9_.,:+@%/=*&|()\[\]?-]+)?",
        "is not an option that chooses nodes, resources or order, without blanks and quotes, such as "
        "--constraint=a100; set variables, files and commands in the site's jobqueue.yaml",
    ),
]


class KindRules(NamedTuple):
    """Which settings belong to a kind of cluster. `tasks/cluster/kinds.py` has what the kind does."""

    settings: frozenset[str] = frozenset()  # settings that some kinds have no use for, and this one has
    required: tuple[str, ...] = ()
    example: str = ""  # values for the required settings
    is_this_host: bool = False  # all workers run on this host, and end with the run
    accelerators: tuple[str, ...] = ("auto", "cpu", "gpu")  # values of `execution.accelerator` that it goes with
    accelerator_hint: str = ""


Kind = Literal["local", "local_cuda", "ssh", "slurm", "address"]
KINDS: dict[str, KindRules] = {
    "local": KindRules(frozenset({"num_workers"}), is_this_host=True),
    "local_cuda": KindRules(is_this_host=True, accelerators=("auto", "gpu"), accelerator_hint="use cluster.kind=local"),
    "ssh": KindRules(frozenset({"hosts", "interface"}), ("hosts",), "cluster.hosts=[node1,node2]"),
    "slurm": KindRules(
        frozenset({"interface", "partition", "account", "time_limit", "cores_per_host", "memory_per_host", "sbatch"}),
        ("cores_per_host", "memory_per_host"),
        "cluster.cores_per_host=16 cluster.memory_per_host=64G",
        accelerators=("cpu", "gpu"),
        accelerator_hint="use execution.accelerator=gpu or execution.accelerator=cpu",
    ),
    "address": KindRules(frozenset({"address"}), ("address",), "cluster.address=tcp://host:8786"),
}


class Cluster(Section):
    """Where the Dask workers come from."""

    kind: Kind = "local"
    """`local`: workers on this machine for this run; `local_cuda`: one worker for each GPU to be used;
    `ssh`: workers on `hosts`; `slurm`: one job per host; `address`: join a running scheduler."""
    num_workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """`local`: worker processes; `auto`: one per rank, and also one per core if data are still to be prepared. The
    other kinds start one worker for each device that is trained on."""
    address: Address | None = None
    """`address`: the scheduler's address, such as tcp://host:8786, or tls:// where it wants certificates. A run that
    Prefect starts joins only the scheduler that PACELINE_SCHEDULER names on its host."""
    hosts: tuple[Host, ...] = ()
    """`ssh`: hosts by the names under which `ssh` knows them; the scheduler runs on the first one too."""
    interface: Interface | None = None
    """`ssh`, `slurm`: network interface that Dask listens on, such as eth0; null for the one that leads outwards."""
    partition: SlurmName | None = None
    """`slurm`: partition of the jobs; null for Slurm's default."""
    account: SlurmName | None = None
    """`slurm`: account that the jobs are charged to."""
    time_limit: TimeLimit | None = None
    """`slurm`: time limit of the jobs, such as 2:00:00 or 1-12 (a day and a half)."""
    cores_per_host: Annotated[int, Field(ge=1)] | None = None
    """`slurm`: CPU cores that a job asks for; needed there."""
    memory_per_host: Memory | None = None
    """`slurm`: memory that a job asks for, such as 64G; needed there."""
    sbatch: tuple[SbatchOption, ...] = ()
    """`slurm`: further options of sbatch that choose nodes, resources or order, such as --constraint=a100."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Whether the Dask parts talk TLS, with the certificates in PACELINE_TLS, and refuse everybody else; `auto`: beyond
    this host's loopback, and there with a certificate that is made for the run. A run that Prefect starts accepts
    `off` only where its host has PACELINE_CLUSTER_TLS=off."""
    wait_seconds: Annotated[float, Field(gt=0)] = 300.0
    """`ssh`, `slurm`: how long to wait for the workers, seconds; the time in Slurm's queue counts."""
    min_workers: Annotated[int, Field(ge=1)] | None = None
    """Smallest number of workers with which a training continues after it has lost others; null: all. Batch and
    learning rate follow `recipe.batch_scaling`. `weak`: each device keeps its batch, and the learning rate falls with
    the number of devices; `strong`: the remaining workers take larger shares of the same batches."""

    @property
    def is_this_host(self) -> bool:
        """Whether all workers run on this host and belong to the run."""
        return KINDS[self.kind].is_this_host

    @model_validator(mode="after")
    def _check_tls_and_kind(self) -> Self:
        if self.address is not None and self.tls != "auto" and (self.tls == "on") != self.address.startswith("tls://"):
            raise ValueError(
                f"cluster.tls={self.tls} cannot be used with cluster.address={self.address}; "
                "write tls:// for a scheduler that requires certificates, and tcp:// for any other"
            )
        rules = KINDS[self.kind]
        for name in dict.fromkeys(name for kind in KINDS.values() for name in sorted(kind.settings)):
            if name not in rules.settings and getattr(self, name) != type(self).model_fields[name].default:
                kinds = [kind for kind, other in KINDS.items() if name in other.settings]
                fault = f"cluster.{name}={typed(getattr(self, name))} cannot be used with cluster.kind={self.kind}"
                raise ValueError(f"{fault}; remove cluster.{name} or choose cluster.kind={' or '.join(kinds)}")
        missing = [name for name in rules.required if not getattr(self, name)]
        if missing:
            fault = f"cluster.kind={self.kind} needs {', '.join(f'cluster.{name}' for name in missing)}"
            raise ValueError(f"{fault}; for example {rules.example}")
        return self

    def check_execution(self, execution: Execution) -> None:
        """Raise ValueError for an accelerator or a number of hosts that workers of this kind do not have."""
        rules = KINDS[self.kind]
        if execution.accelerator not in rules.accelerators:
            fault = f"cluster.kind={self.kind} cannot be used with execution.accelerator={execution.accelerator}"
            raise ValueError(f"{fault}; {rules.accelerator_hint}")
        if self.hosts and len(self.hosts) < execution.num_nodes:
            fault = f"execution.num_nodes={execution.num_nodes} exceeds the {len(self.hosts)} hosts of cluster.hosts"
            raise ValueError(f"{fault}; use execution.num_nodes={len(self.hosts)}, or name more hosts")
