"""Muon: the filters of convolutions over images take orthogonal steps; biases, dense layers and all else take SGD's.

`torch.optim.Muon` (2.13) takes matrices only, has no weights of fixed norm, and would be one optimizer of two.
Shapes: B matrices of one shape, R rows, C columns.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim.sgd import sgd

from paceline.tasks.model.networks.whitened import Whitened

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree 5 that is steepest at nought and leaves singular values between 0.7 and 1.2."""
NUM_ITERATIONS = 3
REST_MOMENTUM = 0.85  # of biases and dense layers
RATE_FACTOR = "rate_factor"  # of a group of parameters: what its learning rate is multiplied by
_FILTER_DIMENSIONS, _MATRIX_DIMENSIONS = 4, 2

Tensors = list[torch.Tensor]


class Muon(torch.optim.Optimizer):
    """Nesterov momentum for all; the filters' is orthogonalised, and their norm is that of as many unit vectors.

    A step has the same size whatever the gradient's, and goes as far in each direction. Since batch norm takes the
    filters' scale away, only their direction counts; with their norm fixed, steps stay as large in proportion.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the fixed norm, three
    iterations and SGD for the rest: airbench94_muon (github.com/KellerJordan/cifar10-airbench).

    The network's trained parameters of four dimensions are filters, with this learning rate and momentum; other
    parameters have multiples of the rate, and alone decay, by `weight_decay` times the filters' rate. `fused` updates
    these in one pass.
    """

    def __init__(
        self, network: nn.Module, learning_rate: float, momentum: float, weight_decay: float, *, fused: bool
    ) -> None:
        trained = [weight for weight in network.parameters() if weight.requires_grad]
        filters = [weight for weight in trained if weight.dim() == _FILTER_DIMENSIONS]
        dense = [weight for weight in trained if weight.dim() == _MATRIX_DIMENSIONS]
        vectors = [weight for weight in trained if weight.dim() not in (_FILTER_DIMENSIONS, _MATRIX_DIMENSIONS)]
        factors = (part.rate_factors for part in network.modules() if isinstance(part, Whitened))
        bias_factor, dense_factor = next(factors, (1.0, 1.0))
        groups: list[dict[str, Any]] = [
            {"params": filters, RATE_FACTOR: 1.0, "momentum": momentum, "weight_decay": 0.0, "is_orthogonal": True},
            {"params": vectors, RATE_FACTOR: bias_factor, "weight_decay": weight_decay / bias_factor},
            {"params": dense, RATE_FACTOR: dense_factor, "weight_decay": weight_decay / dense_factor},
        ]
        used = [group | {"lr": learning_rate * group[RATE_FACTOR]} for group in groups if group["params"]]
        super().__init__(used, {"momentum": REST_MOMENTUM, "is_orthogonal": False, "fused": fused})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
            gradients = [gradient for weight in weights if (gradient := weight.grad) is not None]
            if group["is_orthogonal"]:
                _step_filters(weights, gradients, momenta, group["momentum"], group["lr"])
            else:
                options = {name: group[name] for name in ("fused", "weight_decay", "momentum", "lr")}
                options |= {"foreach": False, "dampening": 0.0, "nesterov": True, "maximize": False}
                sgd(weights, gradients, momenta, **options)


def orthogonalise(matrices_BRC: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of each matrix near 1 by Newton and Schulz's iteration; the singular vectors stay.

    Source: Bernstein and Newhouse, "Old Optimizer, New Norm" (2024), and the post on Muon for the coefficients.
    """
    first, third, fifth = COEFFICIENTS
    is_tall = matrices_BRC.shape[1] > matrices_BRC.shape[2]
    iterate_BRC = matrices_BRC.mT if is_tall else matrices_BRC
    iterate_BRC = iterate_BRC / iterate_BRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(NUM_ITERATIONS):
        gram = iterate_BRC @ iterate_BRC.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        iterate_BRC = torch.baddbmm(iterate_BRC, polynomial, iterate_BRC, beta=first)
    return iterate_BRC.mT if is_tall else iterate_BRC


def _step_filters(filters: Tensors, gradients: Tensors, momenta: Tensors, momentum: float, rate: float) -> None:
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    directions = torch._foreach_add(gradients, momenta, alpha=momentum)
    indices: dict[torch.Size, list[int]] = defaultdict(list)
    for index, weight in enumerate(filters):
        indices[weight.shape].append(index)
    for alike in indices.values():  # one launch does for all filters of one shape
        stacked = torch.stack([directions[index] for index in alike])
        # Tensor cores where there are any; the iteration is as good in 16 bits.
        exact = stacked.dtype
        dtype = torch.bfloat16 if stacked.is_cuda and exact == torch.float32 else exact
        steps = orthogonalise(stacked.flatten(2).to(dtype)).to(exact).mul_(rate).view_as(stacked)
        for weight, step in zip((filters[index] for index in alike), steps, strict=True):
            weight.mul_(len(weight) ** 0.5 / weight.norm()).sub_(step)
