"""Gives each Dask worker of a host its own GPU.

Use: `dask worker ADDRESS --nworkers N --nthreads 1 --preload-nanny paceline.tasks.cluster.gpu_workers`.

dask-cuda does so too, but its workers always create a CUDA context (26.10 appends `--create-cuda-context` behind all
arguments). Here the rank, not its worker, uses the GPU. A worker's context would take half a gigabyte of the GPU's
memory, and in the compute mode EXCLUSIVE_PROCESS the rank could not start.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

from paceline.tasks.cluster import renewal
from paceline.tasks.cluster.hardware import describe

PRELOAD = {"preload_nanny": [__name__]}  # argument of Dask's nannies

_positions: defaultdict[str, Iterator[int]] = defaultdict(count)  # by scheduler


def dask_setup(nanny: Any) -> None:
    """Let the nanny's worker see all GPUs of the host, its own first, as a worker of dask-cuda does."""
    gpus = [gpu.uuid for gpu in describe().gpus]
    if gpus:
        first = next(_positions[nanny.scheduler_addr]) % len(gpus)
        nanny.env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
    renewal.dask_setup(nanny)  # this preload replaces that of conf/dask/dask.yaml
