"""Recognises errors of a device without enough memory, in training and in prediction."""

import re

import torch

from paceline.tasks.errors import MeasureMemoryError, MemoryLimitError, causes_of

_OUT_OF_MEMORY = re.compile(r"out of memory|\bCU[A-Z]+_[A-Z_]*ALLOC[A-Z]*_FAILED")
"""How CUDA, NCCL, cuBLAS, cuDNN and their like report it; torch's own error is of its allocator alone."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is a device's want of memory, or was caused by one.

    The cause may be behind others: the end of an interrupted CUDA graph recording fails as well.
    """
    return any(
        isinstance(cause, (torch.OutOfMemoryError, MemoryLimitError, MeasureMemoryError))
        or (isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)) is not None)
        for cause in causes_of(error)
    )
