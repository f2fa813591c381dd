"""Exponential moving average of the weights, updated on the device after each step.

The sum starts at zero and is divided by the weight of all its terms, so that the initial weights have no part in the
average: sum / (1 - decay^steps), the bias correction of Kingma and Ba, "Adam" (2015). A step costs one pass over the
weights and reads nothing on the host, also in a CUDA graph.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class WeightAverage:
    """The average of a network's trained weights and floating-point buffers; sharded where the network is.

    Create it once the network is where it is trained: it reads the weights in place.

    Args:
        network: Network that is trained.
        decay: Decay per step, between 0 and 1.
        sums: Those of an earlier process, by the names of the weights; None to start.
    """

    def __init__(self, network: nn.Module, decay: float, sums: dict[str, torch.Tensor] | None = None) -> None:
        frozen = {name for name, weight in network.named_parameters() if not weight.requires_grad}
        weights = {
            name: value
            for name, value in network.state_dict().items()
            if value.is_floating_point() and name not in frozen
        }
        self._decay = decay
        self.sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        for name, saved in (sums or {}).items():
            total, value = self.sums[name], saved
            if isinstance(total, DTensor) and not isinstance(saved, DTensor):  # one rank was there before
                value = distribute_tensor(
                    saved.to(total.device), total.device_mesh, total.placements, src_data_rank=None
                )
            total.copy_(value)
        self.buffers = [self.sums[name] for name, _ in network.named_buffers() if name in self.sums]
        """Sums of the buffers, which differ from rank to rank."""
        self._local_sums = [_local(value) for value in self.sums.values()]
        self._local_weights = [_local(value) for value in weights.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step into the average."""
        torch._foreach_lerp_(self._local_sums, self._local_weights, 1.0 - self._decay)

    @torch.no_grad()
    def load_into(self, network: nn.Module, num_steps: int) -> None:
        """Load the average after `num_steps` steps into an unsharded network; collective where weights are sharded."""
        total = 1.0 - self._decay**num_steps
        weights = network.state_dict()
        for name, value in self.sums.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            weights[name].copy_(full / total)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
