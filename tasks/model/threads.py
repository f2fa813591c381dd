"""How many threads torch computes with on a CPU, without a side effect of `torch.set_num_threads` on MKL.

That function also sets MKL_DYNAMIC to false: inside a parallel region of torch, where one thread of MKL is right, MKL
then opens a region of its own for each product. Attention on a CPU (`scaled_dot_product_attention`) takes 5 % longer. A
script whose number of threads comes from OMP_NUM_THREADS keeps the default, so what is compared with it keeps it too.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch


def use_threads(number: int) -> None:
    """Let the calling thread, and threads that have not computed yet, compute with `number` threads."""
    if torch.get_num_threads() != number:
        with _same_dynamic():
            torch.set_num_threads(number)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """`use_threads` while the body lasts; None changes nothing."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    with _same_dynamic():  # a thread that first computes in the body sets it again
        use_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _same_dynamic() -> Iterator[None]:
    """Give MKL_DYNAMIC the value that it had before the body."""
    mkl = _mkl()
    if mkl is None:
        yield
        return
    before = mkl.mkl_serv_get_dynamic()
    try:
        yield
    finally:
        mkl.MKL_Set_Dynamic(before)


@cache
def _mkl() -> ctypes.CDLL | None:
    """The library of torch that contains MKL; None if this build has none, or hides these functions."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.exists():
        return None
    mkl = ctypes.CDLL(str(library))  # loaded already
    return mkl if all(hasattr(mkl, name) for name in ("mkl_serv_get_dynamic", "MKL_Set_Dynamic")) else None
