"""How many threads torch computes with on a CPU, without the side effects of `torch.set_num_threads` on MKL.

That function gives its number to MKL for each thread that computes, and sets MKL_DYNAMIC to false. Inside a parallel
region of torch, where one thread of MKL is right, MKL then opens a region of its own for each product. Attention on a
CPU (`scaled_dot_product_attention`) does that thousands of times a second. A script whose number of threads comes from
OMP_NUM_THREADS has no such cost, so what is compared with it must not have it either.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

FUNCTIONS = ("omp_set_num_threads", "mkl_serv_set_num_threads", "mkl_serv_get_dynamic", "mkl_serv_get_max_threads")


def use_threads(number: int) -> None:
    """Let the calling thread compute with `number` threads; so do threads that compute for the first time later.

    MKL has one number for the process, torch one for each thread. `torch.set_num_threads` is still called where this
    cannot work: for more threads than MKL allows (the physical cores), if MKL_DYNAMIC is off already, and in builds of
    torch without these functions. After the first such call, all later ones in this process use it too: if torch and
    MKL used different numbers in turn, OpenMP would start and end threads all the time.
    """
    library = _openmp_and_mkl()
    if library is not None:
        is_dynamic = bool(library.mkl_serv_get_dynamic())  # false after torch's function, or by the environment
        if is_dynamic and torch.get_num_threads() == number:
            return
        library.mkl_serv_set_num_threads(number)
        if is_dynamic:
            library.omp_set_num_threads(number)
            if library.mkl_serv_get_max_threads() == torch.get_num_threads() == number:
                return
    torch.set_num_threads(number)


@contextmanager
def threads(number: int, then: int) -> Iterator[None]:
    """Use `number` threads while the body lasts, and `then` after it."""
    use_threads(number)
    try:
        yield
    finally:
        use_threads(then)


@cache
def _openmp_and_mkl() -> ctypes.CDLL | None:
    """The library of torch that contains MKL and is linked to OpenMP; None if a build has none or hides them."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not path.exists():
        return None
    library = ctypes.CDLL(str(path))  # loaded already
    return library if all(hasattr(library, name) for name in FUNCTIONS) else None
