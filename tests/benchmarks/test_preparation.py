"""Preparation on two workers against one: the same files, A B B A, three blocks; prints the ratio with its interval.

infra/test -m benchmark tests/benchmarks/test_preparation.py -s
"""

import time

import numpy as np
import pytest
from distributed import LocalCluster

from conf.schema import Data
from tasks.data import graph, source
from tasks.speedup.statistics import estimate_ratio

NUM_BLOCKS = 3


@pytest.mark.timeout(1800)
def test_two_workers_against_one(cifar10_jpeg_root, tmp_path):
    data = Data(source="cifar10", root=str(cifar10_jpeg_root), image_size=32)
    listing = source.list_samples(data)
    addresses = {}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0") as one,
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0") as two,
    ):
        addresses = {1: one.scheduler_address, 2: two.scheduler_address}

        def seconds(num_workers):
            home = tmp_path / f"{num_workers}-{time.monotonic_ns()}"
            started = time.monotonic()
            prepared = graph.prepare(listing, data, home, addresses[num_workers])
            assert not prepared.reused
            return time.monotonic() - started

        for num_workers in (1, 2):
            seconds(num_workers)  # warm: imports on the workers, files in the page cache
        ratios = []
        for block in range(NUM_BLOCKS):
            times = {1: [], 2: []}
            for num_workers in (1, 2, 2, 1):
                times[num_workers].append(seconds(num_workers))
            ratios.append(sum(times[1]) / sum(times[2]))
            print(f"block {block + 1}: one worker {times[1]}, two workers {times[2]}, ratio {ratios[-1]:.2f}")
    found = estimate_ratio(np.log(ratios))
    print(
        f"goal: two workers close to twice as fast | measured {found.value:.2f} | interval {found.low:.2f} to "
        f"{found.high:.2f} | {NUM_BLOCKS} blocks of A B B A"
    )
