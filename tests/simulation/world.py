"""One history: hosts, servers, trainings and faults by a seed, from the first event to the last check."""

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from types import SimpleNamespace

from paceline.conf.load import load
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.train.plan import resolve
from paceline.tasks.train.rank import checkpoint
from tests.simulation import disk, faults, programs
from tests.simulation.cluster import Cluster, Network
from tests.simulation.disk import Disk, SimPath
from tests.simulation.kernel import Host, Kernel
from tests.simulation.ledger import Ledger
from tests.simulation.servers import Mlflow, MlflowClient, Prefect

END_SECONDS = 600.0
"""By then every training has finished, for no fault lasts longer than a few minutes."""
QUIET_SECONDS = 40.0  # after the last end, until what others have left is looked at
GPUS = tuple(
    Gpu(uuid=f"GPU-{number}", name="GPU", memory_bytes=2**33, compute_capability=(9, 0)) for number in range(8)
)
HARDWARE = Hardware(host="h", cpu_name="cpu", num_cores=2, memory_bytes=2**33, cpu_bf16=True, gpus=GPUS)
PREPARED = PreparedSet(
    path="prepared",
    key="key",
    fingerprint="01234567",
    image_shape=(8, 8, 1),
    class_names=("a", "b"),
    num_train=96,
    num_validation=0,
    num_test=8,
    num_rejected=0,
    class_counts={},
    mean=(0.0,),
    std=(1.0,),
    num_bytes=1,
    reused=True,
    seconds=0.0,
)
RESULT = {
    "num_epochs": 3,
    "seconds": 1.0,
    "samples_per_second": 1.0,
    "final_loss": 1.0,
    "validation_scores": (),
    "time_budget": {"loop": 1.0},
    "wall_seconds": 1.0,
    "data_wait_fraction": None,
    "prediction_samples_per_second": 1.0,
    "probe": None,
    "energy": None,
    "peak_memory_bytes": 1,
    "hosts": ("host",),
    "devices": ("GPU",),
}
SECONDS = {"imports": (0.5, 3.0), "evaluation": (0.2, 3.0), "before": (0.0, 20.0), "before resume": (0.5, 30.0)}


@lru_cache
def settings(num_nodes, num_devices, min_workers):
    """Configuration and plan; the same for many histories."""
    overrides = [f"execution.num_nodes={num_nodes}", f"execution.num_devices={num_devices}"]
    if min_workers:
        overrides.append(f"cluster.min_workers={min_workers}")
    config = load("digits", [*overrides, "cluster.kind=address", "cluster.address=tcp://scheduler:8786"])
    return config, resolve(config, HARDWARE, 96)


@dataclass(frozen=True)
class Outcome:
    """How a history ended."""

    seed: int
    faults: tuple[faults.Fault, ...]
    violation: str | None
    trace: tuple[str, ...]
    seconds: float  # simulated
    num_events: int
    num_attempts: int


@dataclass(frozen=True)
class Site:
    """Hosts and trainings of a history."""

    is_single: bool
    """One host with a disk of its own; else hosts that share a file system."""
    has_locks: bool
    num_nodes: int
    num_devices: int
    num_spare: int
    min_workers: int | None
    trainings: tuple[str, ...]
    checkpoint_steps: int
    step_seconds: float
    has_two_clusters: bool
    """Each training has a Dask cluster of its own, on the same devices."""
    start_together: bool
    is_impatient: bool
    """The operator may resume a training that still runs."""


def draw_site(random):
    is_single = random.random() < 0.35
    num_nodes, num_devices = (
        (1, random.choice((1, 2, 2))) if is_single else random.choice(((1, 1), (2, 1), (2, 2), (3, 1)))
    )
    trainings = ("a", "b") if random.random() < 0.35 else ("a",)
    return Site(
        is_single=is_single,
        has_locks=is_single or random.random() < 0.75,
        num_nodes=num_nodes,
        num_devices=num_devices,
        num_spare=0 if is_single else random.choice((0, 1)),
        min_workers=1 if num_nodes * num_devices > 1 and random.random() < 0.3 else None,
        trainings=trainings,
        has_two_clusters=len(trainings) > 1 and random.random() < 0.5,
        checkpoint_steps=random.choice((1, 2, 4)),
        step_seconds=random.choice((0.3, 0.3, 0.3, 0.8, 0.8, 1.5, 4.0)),
        start_together=random.random() < 0.4,
        is_impatient=not is_single and random.random() < 0.4,
    )


class World:
    """The hosts of a history and what runs on them."""

    num_steps, steps_per_epoch, prepared, result = 12, 4, PREPARED, RESULT

    def __init__(self, seed, changes=None, keep_trace=False):
        self.random = Random(seed)
        self.kernel = kernel = Kernel(seed, keep_trace)
        kernel.world = self
        disk.use(kernel)
        self.site = site = replace(draw_site(self.random), **changes or {})
        self.checkpoint_steps, self.step_seconds = site.checkpoint_steps, site.step_seconds
        self.network, self.groups, self.flows, self.faults = Network(), {}, [], ()
        self.ledger = Ledger(self)
        self._make_hosts(site)
        self.mlflow = Mlflow(self.network, self.services)
        self.prefect = Prefect(self.network, self.services)
        MlflowClient.server = self.mlflow
        self.config, self.plan = settings(site.num_nodes, site.num_devices, site.min_workers)
        self.environment = SimpleNamespace(
            root=SimPath("/home"), leases=SimPath("/local/leases"), tracking_uri="simulated"
        )
        first = Cluster(self, "a", site.num_devices)
        self.clusters = {"a": first, "b": Cluster(self, "b", site.num_devices) if site.has_two_clusters else first}
        admin = Host(kernel, "admin")
        self.operators = [
            kernel.spawn(admin, f"operator-{name}", programs.operator_main, self, name) for name in site.trainings
        ]

    def _make_hosts(self, site):
        kernel = self.kernel
        if site.is_single:
            host = Host(kernel, "host")
            self.shared = Disk(server=host)
            self.hosts = self.worker_hosts = self.flow_hosts = [host]
        else:
            heads = [Host(kernel, "head0"), Host(kernel, "head1")]
            nodes = [Host(kernel, f"node{number}") for number in range(site.num_nodes + site.num_spare)]
            self.shared = Disk(server=Host(kernel, "nas"), has_locks=site.has_locks)
            self.hosts, self.worker_hosts, self.flow_hosts = [*heads, *nodes], nodes, heads
        self.services = Host(kernel, "services")
        self.all_hosts = [*self.hosts, self.services]
        for host in self.hosts:
            host.disks = {"home": self.shared, "local": Disk(server=host)}

    def can_happen(self, kind):
        """Whether a fault is one of this site's."""
        on_clusters = ("isolate a host", "hang the disk", "lose locks", "cut a link")
        return not self.site.is_single or kind not in on_clusters

    def seconds(self, name):
        return self.kernel.random.uniform(*SECONDS[name])

    def seconds_before(self):
        """Until the operator starts the training."""
        return 0.0 if self.site.start_together else self.seconds("before")

    def patience(self):
        """Seconds until the operator resumes a training that runs elsewhere; None for ever."""
        is_now = self.site.is_impatient and self.kernel.random.random() < 0.5
        return self.kernel.random.uniform(2.0, 25.0) if is_now else None


def run(seed, chosen=None, keep_trace=False, changes=None, kinds=None):
    """Play the history of a seed, with its own faults or the chosen ones; `changes` of its site, `kinds` of faults."""
    checkpoint._sha256.cache_clear()
    world = World(seed, changes, keep_trace)
    kernel = world.kernel
    drawn = tuple(faults.draw(world.random, world, kinds))
    happening = drawn if chosen is None else tuple(chosen)
    world.faults = happening
    for fault in happening:
        faults.plan(world, fault)

    def is_over():
        return all(operator.status is not None for operator in world.operators) and not any(
            flow.is_alive for flow in world.flows
        )

    kernel.run(END_SECONDS, is_over)
    if kernel.failure is None:
        if is_over():
            _clean_up(world)
        else:
            waiting = ", ".join(f"{each.name}[{each.pid}]" for each in world.flows if each.is_alive) or "the operator"
            kernel.fail(f"waits for ever: {waiting} after {END_SECONDS:g} s")
    violation = kernel.failure
    kernel.close()
    trace = tuple(kernel.trace or ())
    return Outcome(seed, happening, violation, trace, kernel.now, kernel.num_events, len(world.ledger._attempts))


def _clean_up(world):
    """Let others look at what ended processes have left, as any later flow does."""
    kernel = world.kernel
    kernel.run(kernel.now + QUIET_SECONDS + 2 * faults.MAX_SECONDS)
    janitors = [kernel.spawn(host, "janitor", programs.janitor_main, world) for host in world.flow_hosts]
    kernel.run(kernel.now + 120.0, lambda: not any(janitor.is_alive for janitor in janitors))
    if kernel.failure is None:
        world.ledger.check_end()
