"""Distributed execution: settings of DDP and FSDP, the same for training and for the arms of a probe."""

from collections import Counter
from itertools import pairwise
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from paceline.conf.execution import Compression, Precision
from paceline.tasks.train.step.learner import Learner

# One bucket view, no buffer broadcast: see FACTS in infra/decisions/0003.
DDP_SETTINGS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}


def compress_gradients(wrapped: DistributedDataParallel, compression: Compression) -> None:
    """Exchange gradients in fewer bits; `off` leaves them as they are. The ranks' sum is rounded too."""
    if compression == "bf16":
        # By its own name torch takes the hook on NCCL alone, though gloo sums bf16 as well (torch 2.13). A lambda,
        # because torch rejects annotations that are text, as those of this module are.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108


def communication_fraction(model: nn.Module | None, passes_per_step: float = 1.0) -> float | None:
    """Exposed communication over forward, backward and exposed communication, of a model as its strategy wrapped it.

    DistributedDataParallel times its first ten steps and every hundredth one after them, from the start of the first
    bucket's all-reduce to the end of the last one; what overlaps with the backward pass is subtracted. Of several
    passes it times the last, in which gradients are exchanged.

    Returns a share from 0 to 1; 0 for a model that is not distributed; None if nothing was timed, as of sharded ones.
    """
    if model is not None and any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    facts: dict[str, Any] = model._get_ddp_logging_data()
    exposed = facts.get("avg_backward_comm_time", 0) - facts.get("avg_backward_compute_comm_overlap_time", 0)
    computing = facts.get("avg_forward_compute_time", 0) + facts.get("avg_backward_compute_time", 0)
    computing, exposed = computing * passes_per_step, max(0, exposed)
    return float(exposed / (computing + exposed)) if computing > 0 else None


UNIT_PARAMETERS = 2**18
"""Layers with at least so many are gathered individually; smaller ones together, as each gathering has a fixed cost."""
ROUNDED_LAYERS = (nn.Linear, _ConvNd)
"""Layers whose weights autocast rounds in each pass. Under `bf16-mixed` ranks gather the rounded weights, half the
bytes, and autocast has nothing left to round: results are those of DDP. All other parameters, such as those of batch
norms, are gathered in float32, as autocast leaves them.
"""


STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


def apply_fsdp(network: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard a network in place over the ranks of a mesh, unless it is sharded already.

    The ranks must start with the same weights: unlike DistributedDataParallel, sharding copies none from rank 0.
    Gradients are summed in float32.
    """
    if isinstance(network, FSDPModule):
        return
    exact = rounded = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16-mixed":
        rounded = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    _, *layers = network.modules()
    large = [layer for layer in layers if sum(map(torch.numel, layer.parameters(recurse=False))) >= UNIT_PARAMETERS]
    small: list[nn.Module] = [each for each in layers if isinstance(each, ROUNDED_LAYERS) and each not in large]
    if small and rounded is not exact:  # in one message
        fully_shard(small, mesh=mesh, mp_policy=rounded, reshard_after_forward=False)
    units: list[FSDPModule] = []
    for layer in reversed(large):  # layers before the parts that contain them
        policy = rounded if isinstance(layer, ROUNDED_LAYERS) else exact
        units.insert(0, fully_shard(layer, mesh=mesh, mp_policy=policy))
    fully_shard(network, mesh=mesh, mp_policy=exact)
    for before, after in pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    adapt_reduction(network, mesh)


def shard_module(module: LightningModule, mesh: DeviceMesh) -> None:
    """Shard a user's module in place over the ranks of a mesh: each large block of a list of layers, and the rest.

    The ranks must start with the same weights. Weights keep their type: autocast rounds them. A block that shares a
    parameter or a layer with something outside of it belongs to the rest: the two would be trained separately.
    """
    exact, all_owners = MixedPrecisionPolicy(cast_forward_inputs=False), _num_owners(module)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    blocks: dict[nn.Module, None] = {}  # each once, in order
    for layer in (layer for layers in reversed(lists) for layer in layers):  # those within a block before it
        is_called = not isinstance(layer, nn.ModuleList | nn.ModuleDict)
        is_large = sum(map(torch.numel, layer.parameters())) >= UNIT_PARAMETERS
        if is_called and is_large and _num_owners(layer).items() <= all_owners.items():
            blocks[layer] = None
    for layer in blocks:
        fully_shard(layer, mesh=mesh, mp_policy=exact)
    fully_shard(module, mesh=mesh, mp_policy=exact)
    for method in STEP_METHODS:  # Lightning calls these, which need the weights as `forward` does
        register_fsdp_forward_method(module, method)


def _num_owners(module: nn.Module) -> Counter[int]:
    """How many parts of a module have each parameter and each part, by its id."""
    parts = module.modules()
    return Counter(id(each) for part in parts for each in (*part.parameters(recurse=False), *part.children()))


def adapt_reduction(network: nn.Module, mesh: DeviceMesh) -> None:
    """Let the sharded parts of a network sum up gradients by what the mesh's device has."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")  # gloo has no mean (torch 2.13)


class ExchangeStrategy(DDPStrategy):
    """Lightning's DDP strategy with compression on every device: Lightning 2.6.6 ignores hooks on CPUs, silently."""

    def __init__(self, compression: Compression) -> None:
        super().__init__(**DDP_SETTINGS)  # type: ignore[arg-type]
        self._compression = compression

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        compress_gradients(self.model, self._compression)


class ShardedLearner(Learner):
    """A learner whose network is sharded once Lightning has the mesh of ranks."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        precision = self.trainer.precision
        apply_fsdp(self.network, self.device_mesh["data_parallel"], cast(Precision, precision))
