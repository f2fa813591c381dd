"""Cost of a network, counted on the network itself: independent of the machine."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from paceline.tasks.errors import one_line
from paceline.tasks.records.cost import Cost

SIZES = (2, 4)  # samples of the two batches that are counted; a batch norm cannot train on fewer
GIVEN = "flops_per_sample"  # attribute of a network with its own operations for a sample: forward, and with backward
NAMESPACES = {"aten", "c10d", "prim", "prims", "profiler"}  # torch's own operators
_FLASH, _FLASH_BACKWARD = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward")
)
ATTENTION = {
    _FLASH: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    _FLASH_BACKWARD: lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(grad, query, key, value),
}
"""Formulas of torch's counter for operators on CPUs, which it does not know."""
UNKNOWN = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_scaled_dot_product_flash_attention_for_cpu"}
"""Operators of torch with matrix products inside that its counter does not know."""


def count_cost(network: nn.Module, image_shape: tuple[int, int, int]) -> tuple[Cost | None, str]:
    """Count what one sample needs, forward and in training, on a copy of the network.

    Counts batches of two sizes, because their difference is what grows with the samples. The cost is None, with the
    reason, where the network uses operators that cannot be counted, and does not give its operations itself.
    """
    try:
        counts, reason = _count_growth(network, image_shape)
    except Exception as error:  # noqa: BLE001  whatever a user's module raises on such a batch
        counts, reason = {}, one_line(error)
    given = getattr(network, GIVEN, None)
    if given is not None:
        counts["forward"], counts["training"] = given
    elif reason:
        return None, reason
    cost = Cost(
        forward_flops=counts["forward"],
        training_flops=counts["training"],
        **_num_weights(network),
        saved_values=counts.get("saved_values", 0.0),
        saved_bytes=counts.get("saved_bytes", 0.0),
        image_bytes=prod(image_shape),
    )
    return cost, ""


def _num_weights(network: nn.Module) -> dict[str, int]:
    weights = list(network.parameters())
    return {
        "num_parameters": sum(weight.numel() for weight in weights),
        "num_trained": sum(weight.numel() for weight in weights if weight.requires_grad),
    }


def _count_growth(network: nn.Module, image_shape: tuple[int, int, int]) -> tuple[dict[str, float], str]:
    """What grows with each sample, and why that is not all; "" if it is."""
    with torch.random.fork_rng(devices=[]):
        try:  # without values: this takes no memory, and attention is made of products that are counted
            few, many = (_Count(copy.deepcopy(network).to("meta"), image_shape, size) for size in SIZES)
        except (RuntimeError, TypeError):  # the network reads values, or has tensors that are no parameters
            few, many = (_Count(copy.deepcopy(network).cpu(), image_shape, size) for size in SIZES)
    growth = {name: (value - few.totals[name]) / (SIZES[1] - SIZES[0]) for name, value in many.totals.items()}
    if many.why_not:
        return growth, many.why_not
    return growth, "" if growth["training"] else "the network has no convolution and no matrix product"


class UncountedOperators(TorchDispatchMode):
    """Notes the operators that torch's counter, which comes before it, has let through without a count."""

    known: frozenset[str] = frozenset()  # operators that its counter has formulas for

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See an operator."""
        name = func._schema.name.partition("::")[2]
        if func.namespace not in NAMESPACES or name in UNKNOWN:
            self.uncounted.add(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def why_not(self) -> str:
        """Why the count is not complete; "" if it is."""
        unknown = sorted(self.uncounted - self.known)
        return f"torch does not count the operations of {', '.join(unknown)}" if unknown else ""


class _Count(UncountedOperators):
    """Operations and stored values of one batch; `network` is changed."""

    def __init__(self, network: nn.Module, image_shape: tuple[int, int, int], num_samples: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        weights = [*network.parameters(), *network.buffers()]
        self._storages = {_storage_id(weight): weight for weight in weights}
        images_NCHW = torch.zeros(num_samples, channels, height, width, device=weights[0].device)
        self.totals = {"saved_values": 0.0, "saved_bytes": 0.0}
        with torch.no_grad(), FlopCounterMode(display=False) as forward:
            network.eval()(images_NCHW)
        with self, FlopCounterMode(display=False) as training, saved_tensors_hooks(self._save, lambda tensor: tensor):
            outputs = [output for output in network.train()(images_NCHW) if output is not None]
            torch.stack([output.float().sum() for output in outputs]).sum().backward()
        self.totals |= {"forward": forward.get_total_flops(), "training": training.get_total_flops()}

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        num_bytes, key = tensor.untyped_storage().nbytes(), _storage_id(tensor)
        if key not in self._storages:  # a view of what is stored already takes no memory
            self._storages[key] = tensor
            if tensor.is_floating_point():
                self.totals["saved_values"] += num_bytes / tensor.itemsize
            else:
                self.totals["saved_bytes"] += num_bytes
        return tensor


def _storage_id(tensor: torch.Tensor) -> int:
    """The storage of a tensor; valid as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


class StepCount(UncountedOperators):
    """Operations of a training step, counted while it runs: the same kernels, once, and slower."""

    known = frozenset(f"aten::{operator.__name__}" for operator in ATTENTION)

    def __init__(self) -> None:
        super().__init__()
        self._counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
        self.forward: int | None = None
        """Operations before the first backward pass; None where there was none."""

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count in the body."""
        with self, self._counter:
            yield

    def note_backward(self) -> None:
        """Note that a backward pass starts."""
        if self.forward is None:
            self.forward = self._counter.get_total_flops()

    def cost(self, network: nn.Module, num_samples: float) -> tuple[Cost | None, str]:
        """What a sample of the step needed; None, with the reason, where that was not counted."""
        if self.why_not:
            return None, self.why_not
        total = self._counter.get_total_flops()
        if not total or not num_samples > 0:
            return None, "the step has no matrix product" if not total else "a batch shows no number of samples"
        forward = (self.forward or total) / num_samples
        return Cost(forward_flops=forward, training_flops=total / num_samples, **_num_weights(network)), ""
