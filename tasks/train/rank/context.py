"""Context of a rank: its cores and its device, its group, its share of the data and its initial network."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.tasks.data.loading.batch import Normalise
from paceline.tasks.data.loading.loader import EvaluationLoader, make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.train_loader import LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.errors import RunError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import host_identity
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.inference import Int64s
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.networks.whitened import Whitening
from paceline.tasks.model.objectives import Task, task_of
from paceline.tasks.model.pretrained import begin_with
from paceline.tasks.model.threads import use_threads
from paceline.tasks.model.transfer import freeze
from paceline.tasks.plugins import require_plugin
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.train.launch.rank_process import running_ranks, supervisors_of
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank_spec import RankSpec

EVALUATION_PIXELS = 512 * 32 * 32  # of a batch's images, so that large ones need no more memory than small ones
MAX_EVALUATION_BATCH = 512
NODES = Path("/sys/devices/system/node")
FIT_PIXELS = 5_000 * 32 * 32  # of the images that fixed layers are fitted to


class RankContext:
    """Joins the group and opens the data; `build_network` completes it.

    Raises RunError: the code or a user package differs from the coordinator's, or the ranks do not agree.
    """

    network: nn.Module
    task: Task
    no_probe: str | None = None  # why the configured probe is not possible

    def __init__(self, spec: RankSpec) -> None:
        if spec.code_fingerprint != code_fingerprint():
            fault = f"this rank's code is {code_fingerprint()}, the coordinator's {spec.code_fingerprint}"
            raise RunError(f"{fault}; install the same version on every host")
        with require_plugin():
            packages = tuple(package.identity for package in spec.config.packages)
        if spec.packages != packages:
            fault = f"this rank has {' and '.join(packages)}, the coordinator {' and '.join(spec.packages)}"
            raise RunError(f"{fault}; install the same on every host")
        assert spec.prepared is not None
        self.spec, self.config, self.prepared = spec, spec.config, spec.prepared
        self.directory = Path(spec.directory)
        self.writes = spec.rank == 0
        gpu = spec.devices[spec.local_rank] if spec.plan.accelerator == "gpu" else None
        bind(spec.local_rank, spec.num_devices, gpu)
        self.num_threads = spec.plan.num_threads  # CPU threads per rank by the rules or the configuration
        use_threads(self.num_threads)
        self.device = group.pick_device(spec)
        group.join(spec, self.device)
        self.train_split = open_split(self.prepared, "train")
        given = self.config.execution.worker_load
        self.loads = given if isinstance(given, tuple) and len(given) == spec.world_size > 1 else None
        """Relative speeds of the ranks, in proportion to which they share each batch; None for even shares."""
        keeps_batches = self.config.recipe.batch_scaling == "strong"  # also on fewer ranks than are asked for
        planned_world_size = self.config.execution.world_size if keeps_batches else None
        num_samples, batch_size = self.train_split.num_samples, self.config.batch_size_over(spec.world_size)
        self.batches = BatchPlan(num_samples, batch_size, spec.world_size, self.loads, planned_world_size)
        facts = {
            "data": self.prepared.fingerprint,
            "num_steps": self.batches.steps_per_epoch,
            "code": spec.code_fingerprint,
            "device": gpu or f"rank {spec.rank}",
        }
        group.check_agreement(spec, facts, same=("data", "num_steps", "code"), unique=("device",))

    def build_network(self) -> None:
        """Build the task and the network with its initial weights: by the seed, fitted to the data, or pretrained."""
        torch.manual_seed(self.config.seed)
        self.task = task_of(self.config, self.prepared)
        self.network = self.new_network()
        if self.spec.pretrained is None:
            self._fit_layers()
        else:
            begin_with(self.network, self.spec.pretrained)  # includes layers that were fitted to the first data set
        if self.config.model.freeze != "none":
            freeze(self.network, self.config.model.freeze)

    def new_network(self) -> nn.Module:
        """The network with random weights."""
        prepared = self.prepared
        num_classes, num_targets = len(prepared.class_names), len(prepared.target_names)
        return build_network(self.config.model, prepared.picture_shape, num_classes, num_targets)

    def candidate_arm(self) -> Arm:
        """The plan's execution as an arm of a probe."""
        plan = self.spec.plan
        num_threads = plan.num_threads if plan.num_threads != self.num_threads else None
        return arm_of(plan, self.loads).model_copy(update={"num_threads": num_threads})

    def execute(self, plan: Plan) -> None:
        """Use another execution from now on, on the same devices."""
        self.spec = self.spec.model_copy(update={"plan": plan})
        use_threads(plan.num_threads)

    def set_rank_loads(self, loads: tuple[float, ...] | None) -> None:
        """Share each batch by these loads from now on; the batches themselves stay the same."""
        self.loads = loads
        self.batches = replace(self.batches, loads=loads)

    def cut(self, world_size: int, batch_size: int | None = None, loads: tuple[float, ...] | None = None) -> BatchPlan:
        """Cut epochs into batches for a number of ranks."""
        size = self.config.batch_size_over(world_size) if batch_size is None else batch_size * world_size
        return BatchPlan(self.train_split.num_samples, size, world_size, loads)

    def loader(self, arm: Arm, plan: BatchPlan, rank: int) -> TrainLoader:
        """A training loader of the kind that an arm names."""
        recipe = self.config.recipe
        settings = LoaderConfig(
            self.train_split,
            self.prepared.mean,
            self.prepared.std,
            plan=plan,
            rank=rank,
            seed=self.config.seed,
            augment=recipe.augment,
            shift_pixels=recipe.shift_pixels,
            shuffle_mib=recipe.shuffle_mib,
            device=self.device,
            channels_last=arm.memory_format == "channels_last",
            draws=self.task.draws,
            vary=recipe.vary,
        )
        return make_loader(arm.loading, settings)

    def evaluation(self, split: Split) -> Iterator[tuple[Int64s, Batch]]:
        """Read this rank's share of a split in large batches."""
        height, width, _ = self.prepared.image_shape
        views = self.config.model.test_views
        fitting = EVALUATION_PIXELS // (height * width * views)
        if self.device.type == "cuda":
            # A pass of the training keeps its activations for the gradients and fits: without gradients as many fit.
            fitting = max(fitting, (self.spec.plan.micro_batch or self.config.recipe.batch_size) // views)
        batch_size = min(MAX_EVALUATION_BATCH, max(1, fitting))
        return self._evaluation_loader(split).batches(batch_size, self.spec.rank, self.spec.world_size)

    def samples(self, split: Split, indices_N: Int64s) -> Batch:
        """Some samples of a split, as they are evaluated."""
        return self._evaluation_loader(split).batch(indices_N)

    def _evaluation_loader(self, split: Split) -> EvaluationLoader:
        mean, std = self.prepared.mean, self.prepared.std
        return EvaluationLoader(split, mean, std, self.device, self.evaluates_channels_last, self.task.draws)

    @property
    def evaluates_channels_last(self) -> bool:
        """Whether evaluation uses channels last: on CPUs always with bf16, where it is twice as fast."""
        plan = self.spec.plan
        on_cpu = plan.accelerator == "cpu" and plan.precision == "bf16-mixed"
        return on_cpu or plan.memory_format == "channels_last"

    def own_processes(self) -> list[int]:
        """Process ids of this run on this host."""
        return own_processes(self.spec)

    def gpu_uuids(self) -> tuple[str, ...]:
        """UUIDs of this host's GPUs, none on CPUs."""
        return self.spec.devices if self.device.type == "cuda" else ()

    def _fit_layers(self) -> None:
        """Fit the untrained layers to the first images, the same on all ranks; a checkpoint replaces them later."""
        layers = [layer for layer in self.network.modules() if isinstance(layer, Whitening)]
        if not layers:
            return
        height, width, _ = self.train_split.image_shape
        number = min(self.train_split.num_samples, max(1, FIT_PIXELS // (height * width)))
        normalise = Normalise(self.prepared.mean, self.prepared.std, self.train_split.image_shape)
        pixels = torch.from_numpy(self.train_split.gather(np.arange(number)))
        for layer in layers:
            layer.fit(normalise(pixels, channels_last=False))


def own_processes(spec: RankSpec) -> list[int]:
    """Process ids of a run on this host: its ranks, the parent of each (Dask worker or fork server), and the flow."""
    host, pid = spec.coordinator
    flow = [pid] if host == host_identity() else []
    ranks = running_ranks(spec.run_id)
    return [os.getppid(), *ranks, *supervisors_of(ranks), *flow]


def bind(local_rank: int, num_ranks: int, gpu: str | None) -> None:
    """Bind this process, before it starts threads, to cores near its memory or its GPU, of which `gpu` is the UUID."""
    # Ranks of one host are spread over its memory (NUMA) nodes, because reading another node's memory takes twice as
    # long. With one node nothing is bound: two ranks bound to one core each were not faster there (infra/LOG.md).
    if not hasattr(os, "sched_setaffinity"):
        return
    nodes = memory_nodes(os.sched_getaffinity(0))
    if len(nodes) < 2:  # noqa: PLR2004
        return
    if gpu is not None:
        import pynvml

        with suppress(pynvml.NVMLError):  # a driver that names no cores changes nothing
            pynvml.nvmlInit()
            pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(gpu))
    elif cores := cores_of(local_rank, num_ranks, nodes):
        os.sched_setaffinity(0, cores)


def memory_nodes(allowed: set[int], root: Path = NODES) -> list[set[int]]:
    """The cores of each memory node that this process may use; nodes without any are omitted."""
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [parse_cpus(path.read_text(encoding="utf-8")) & allowed for path in lists]
    return [cores for cores in nodes if cores]


def parse_cpus(text: str) -> set[int]:
    """Cores of a list such as `0-3,8-11`, as the kernel writes it."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def cores_of(local_rank: int, num_ranks: int, nodes: Sequence[set[int]]) -> set[int] | None:
    """The cores of a rank's node, or nodes; None where ranks cannot be spread evenly."""
    if num_ranks % len(nodes) == 0:
        return nodes[local_rank * len(nodes) // num_ranks]
    if len(nodes) % num_ranks == 0 and num_ranks > 1:
        each = len(nodes) // num_ranks
        return set().union(*nodes[local_rank * each : (local_rank + 1) * each])
    return None
