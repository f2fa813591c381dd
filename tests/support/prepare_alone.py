"""Prepares a folder and says what memory that took: python -m tests.support.prepare_alone ROOT HOME."""

import json
import resource
import sys
import time
from pathlib import Path

import psutil

from paceline.conf.data import Data
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from tests.support.jobs import two_workers


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(root, home):
    data = Data(source="folder", root=root, image_size=32)
    with two_workers() as address:
        workers = psutil.Process().children(recursive=True)
        resident = []

        def look(done, total):
            if not resident or done - resident[-1][0] > total // 100 or done == total:
                resident.append((done, max(worker.memory_info().rss for worker in workers)))

        graph.prepare(source.list_samples(Data()), Data(), Path(home), address)  # what is loaded once
        started, before = time.perf_counter(), peak_bytes()
        listing = source.list_samples(data)
        listed, after_listing = time.perf_counter(), peak_bytes()
        prepared = graph.prepare(listing, data, Path(home), address, look)
        ended, after = time.perf_counter(), peak_bytes()
        again = graph.prepare(listing, data, Path(home), address)
    return {
        "num_samples": listing.num_samples,
        "num_prepared": prepared.num_train + prepared.num_validation + prepared.num_test,
        "reused": again.reused and again.fingerprint == prepared.fingerprint,
        "listing_seconds": listed - started,
        "prepare_seconds": ended - listed,
        "flow_bytes_before": before,
        "flow_bytes_of_listing": after_listing - before,
        "flow_bytes_of_preparing": after - after_listing,
        "worker_bytes_early": next(size for done, size in resident if done > listing.num_samples // 10),
        "worker_bytes": max(size for _, size in resident),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
