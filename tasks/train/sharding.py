"""Sharded networks (FSDP2): each rank keeps a part of every weight, its gradient and its optimizer state.

The weights of a layer are whole while it is at work. Knows nothing of steps, data or checkpoints.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

UNIT_PARAMETERS = 2**18
"""A layer with so many is gathered on its own; smaller ones together, for each gathering has a fixed cost."""


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a network in place over the ranks of a mesh; does nothing to one that is sharded.

    The ranks must begin with the same weights: unlike DistributedDataParallel, sharding copies none from rank 0.
    """
    if isinstance(network, FSDPModule):
        return
    for layer in network.modules():
        if layer is not network and sum(one.numel() for one in layer.parameters(recurse=False)) >= UNIT_PARAMETERS:
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")  # gloo has no mean (torch 2.13)


def whole(network: nn.Module, replica: nn.Module) -> nn.Module:
    """The replica with the weights of a sharded network; collective.

    Args:
        network: sharded.
        replica: of the same architecture, not sharded.
    """
    replica.load_state_dict(get_model_state_dict(network, options=StateDictOptions(full_state_dict=True)))
    return replica
