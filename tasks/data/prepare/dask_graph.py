"""Preparation on Dask: cut a listing into chunks, let the workers write shards, publish the set.

Pixels never pass through the scheduler or the caller: a task gets names and returns a small record.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import ValidationError

from paceline.conf.data import Data
from paceline.tasks.cluster.bounded_submit import connect_to_workers, iter_results
from paceline.tasks.cluster.client import host_of, workers
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.listing import SampleListing
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner, TaskChunks
from paceline.tasks.data.prepare.shard import Rejected, ShardRecord, write_shards
from paceline.tasks.errors import InputError, OutsideError, RunError, one_line
from paceline.tasks.files import is_full
from paceline.tasks.records.data import PreparedSet, Reads

if TYPE_CHECKING:
    from distributed import Future

RETRIES = 2

OnProgress = Callable[[int, int], None] | None


def prepare(
    listing: SampleListing,
    data: Data,
    root_directory: Path,
    address: str,
    on_progress: OnProgress = None,
    *,
    check_content: bool = False,
) -> PreparedSet:
    """Return the prepared set of a listing: the one on disk (as `store.find`), or a new one of workers at an address.

    InputError if too many samples cannot be decoded, or a class is left without one; RunError if cluster or disk fail.
    """
    started = time.perf_counter()
    home, key = root_directory.resolve(), preparation_key(listing, data)
    existing = store.find(home, key, check_content=check_content)
    if existing is not None:
        if existing.num_rejected > data.max_rejected_fraction * listing.num_samples:
            raise _rejection_error(data, listing, existing.num_rejected, Path(existing.path) / manifest.REJECTED)
        return existing
    try:
        path, facts, reads = _make(listing, data, key, home, address, on_progress)
    except OSError as error:
        if not is_full(error):
            fix = "check that every worker can read the data and write there"
            raise OutsideError(f"{home}: preparation failed ({one_line(error)}); {fix}") from error
        raise RunError(f"{home}: the disk is full; nothing was published; free space or move PACELINE_HOME") from error
    prepared = facts.to_prepared_set(path, reused=False, seconds=time.perf_counter() - started)
    return prepared.model_copy(update={"reads": reads})


def _make(
    listing: SampleListing, data: Data, key: str, home: Path, address: str, on_progress: OnProgress
) -> tuple[Path, manifest.Manifest, Reads]:
    store.remove_stale(home)
    with store.temporary(home, key) as directory, closing(store.RejectedSpool(directory)) as spool:
        records: list[ShardRecord] = []
        for line in store.read_finished_lines(directory):
            with suppress(ValidationError, OSError):  # of another version, or gone: that shard is written again
                record = ShardRecord.model_validate_json(line)
                if all((directory / file.name).stat().st_size == file.num_bytes for file in record.files):
                    records.append(spool.take_rejected(record))
        num_resumed = len(records)
        cutter = ChunkPlanner(listing, data, directory, frozenset((record.split, record.number) for record in records))
        try:
            _run_chunks(cutter, address, spool, records, on_progress)
        except BaseException as error:
            if records and not is_full(error):
                lines = (spool.restore(record).model_dump_json() for record in records)
                store.leave_to_next(home, key, directory, lines)
            raise
        if spool.num_rejected > data.max_rejected_fraction * listing.num_samples:
            list_path = store.write_rejected_list(home, key, spool.pieces())
            raise _rejection_error(data, listing, spool.num_rejected, list_path)
        counts = manifest.class_counts(records, "train", len(listing.class_names))
        empty = [name for name, count in zip(listing.class_names, counts, strict=True) if count == 0]
        if empty and not listing.num_planes:  # masks need not hold every class
            fault = f"no training sample of class {', '.join(empty)} can be decoded; every class needs at least one"
            raise InputError(f"data.root={data.root}: {fault}; fix its images or remove the class")
        facts = manifest.build(listing, data, key, records, spool.num_rejected)
        path = store.publish(home, directory, facts, spool.pieces())
    return path, facts, Reads.total(record.reads for record in records[num_resumed:])


def _run_chunks(
    cutter: ChunkPlanner, address: str, spool: store.RejectedSpool, records: list[ShardRecord], on_progress: OnProgress
) -> None:
    """Have some worker write every chunk that is not finished, and add its record; rejected samples are spooled."""
    done = sum(record.num_samples for record in records) + spool.num_rejected
    with connect_to_workers(address, "preparation") as client:
        readers = workers(client)
        threads: dict[str, int] = client.nthreads()
        # Lazily: a portion exists as an object only while it is at the scheduler.
        portions = cutter.portions(len(readers), -(-sum(threads.values()) // len(readers)))
        hosts = Counter[str]()
        for worker, number in threads.items():
            hosts[host_of(worker)] += number
        sharing = [hosts[host_of(reader)] for reader in readers]

        def submit(portion: TaskChunks) -> Future[list[ShardRecord]]:
            """Send a portion to the worker whose rank will read its shards; one with nothing to do may steal it."""
            key, where = f"prepare-{portion.key}-{uuid4().hex}", [readers[portion.reader]]
            options: dict[str, Any] = {"workers": where, "allow_other_workers": True, "pure": False, "retries": RETRIES}
            return client.submit(write_shards, portion.chunks, sharing[portion.reader], key=key, **options)

        with closing(iter_results(client, portions, submit)) as results:
            for record in chain.from_iterable(results):
                records.append(spool.take_rejected(record))
                done += record.num_samples + len(record.rejected)
                store.touch(cutter.directory)
                if on_progress is not None:
                    on_progress(done, cutter.listing.num_samples)


def _rejection_error(data: Data, listing: SampleListing, num_rejected: int, list_path: Path) -> InputError:
    total = listing.num_samples
    with list_path.open(encoding="utf-8") as lines:
        first = Rejected.model_validate_json(next(lines))
    return InputError(
        f"data.root={data.root}: {num_rejected} of {total} samples ({100 * num_rejected / total:.1f} %) cannot be "
        f"decoded, first {first.path} ({first.reason}); the limit is "
        f"data.max_rejected_fraction={data.max_rejected_fraction}; fix or remove them "
        f"(list: {list_path}) or set data.max_rejected_fraction={math.ceil(100 * num_rejected / total) / 100:g}"
    )
