"""Operations of one step of a training, counted while it runs: the same kernels, once, and slower."""

import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch

from paceline.tasks.measure.device_limit import DTYPES
from paceline.tasks.model.flops import StepCount

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


class StepFlops(StepCount):
    """The floating-point operations of a step, and the precision of its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._dtypes: Counter[torch.dtype] = Counter()
        self.is_counting = self._is_compiled = False

    @classmethod
    def start(cls) -> "StepFlops":
        """Start to count, unless the training is compiled: it would run its code for this step uncompiled."""
        count = cls()
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            count._is_compiled = True
            return count
        count.is_counting = True
        count._stack.enter_context(count.count())
        return count

    def stop(self) -> None:
        """Stop to count."""
        self._stack.close()
        self.is_counting = False

    @property
    def why_not(self) -> str:
        """Why the count is not complete; "" if it is."""
        return "the operations of compiled code are not counted" if self._is_compiled else super().why_not

    @property
    def total(self) -> int:
        """Operations of the step."""
        return int(self._counter.get_total_flops())

    @property
    def precision(self) -> str | None:
        """Precision of most matrix products, by the names of settings; None without any."""
        names = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}
        return names.get(self._dtypes.most_common(1)[0][0]) if self._dtypes else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See an operator, with the type of its numbers."""
        if func._schema.name.partition("::")[2] in PRODUCTS:
            self._dtypes[args[0].dtype] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)
