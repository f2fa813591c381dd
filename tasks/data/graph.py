"""Preparation on Dask: cut a listing into chunks, let the workers write shards, publish the set.

The only module of the data stage that imports dask. Pixels never pass through the scheduler or the caller: a task gets
names and returns a small record.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from conf.schema import Data
from tasks.cluster.address import workers
from tasks.cluster.window import completed, connect_to_workers
from tasks.data import manifest, store
from tasks.data.key import preparation_key
from tasks.data.listing import SPLITS, Origin, Sample, SampleListing
from tasks.data.shard import Chunk, Rejected, ShardRecord, write_shard
from tasks.data.split import first_reader
from tasks.errors import InputError, RunError
from tasks.records import PreparedSet

if TYPE_CHECKING:
    from distributed import Client, Future

# 1,024 files of the smallest kind (CIFAR's) are 150 ms of work: a hundred times what Dask spends on a task. Limits are
# constants: shard borders, and with them the fingerprint, must not depend on the cluster.
MAX_FILES = 1_024
MAX_ROWS = 8_192
"""Rows of arrays cost a fiftieth of a file."""
MAX_DECODED_BYTES = 64 * 2**20
MAX_ENCODED_BYTES = 64 * 2**20
RETRIES = 2

Progress = Callable[[int, int], None]


def prepare(
    listing: SampleListing,
    data: Data,
    root_directory: Path,
    address: str,
    on_progress: Progress | None = None,
    say: store.Say = lambda _: None,
) -> PreparedSet:
    """Return the prepared set of a listing: the one on disk, or a new one made by the workers at an address.

    Args:
        listing: What the source offers.
        data: The configuration that the listing was made from.
        root_directory: State directory (PACELINE_HOME), seen by all workers under the same path.
        address: Of the Dask scheduler.
        on_progress: Called with (samples done, samples in all) after each chunk.
        say: Told what people should know, such as a damaged set.

    Raises:
        InputError: Too many samples cannot be decoded, or a class is left without one.
        RunError: The cluster or the disk failed.
    """
    started = time.perf_counter()
    home = root_directory.resolve()
    key = preparation_key(listing, data)
    found = store.find(home, key, say)
    if found is not None:
        listed = Path(found.path) / manifest.REJECTED
        _check_rejected(data, _read_rejected(listed) if found.num_rejected else [], listing.num_samples, lambda: listed)
        return found
    try:
        path, facts = _make(listing, data, key, home, address, on_progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"{home}: preparation failed ({error}); check that every worker can write there") from error
        raise RunError(f"{home}: the disk is full; nothing was kept; free space or move PACELINE_HOME") from error
    return facts.prepared(path, reused=False, seconds=time.perf_counter() - started)


def _make(
    listing: SampleListing, data: Data, key: str, home: Path, address: str, on_progress: Progress | None
) -> tuple[Path, manifest.Manifest]:
    store.remove_stale(home)
    with store.temporary(home, key) as directory:
        records = run_chunks(list(cut(listing, data, directory)), address, directory, on_progress)
        records.sort(key=lambda record: (SPLITS.index(record.split), record.number))
        rejected = [entry for record in records for entry in record.rejected]
        _check_rejected(data, rejected, listing.num_samples, lambda: store.write_rejected(home, key, rejected))
        _check_training(data, listing, records)
        _check_visible(directory, records)
        facts = manifest.build(listing, data, key, records)
        path = store.publish(home, directory, facts, rejected)
    return path, facts


def cut(listing: SampleListing, data: Data, directory: Path) -> Iterator[Chunk]:
    """Cut a listing into chunks bounded in count, encoded and decoded size, at least 100 ms of work where there is.

    Training samples are dealt out like cards, so that each shard has a share of every class: the block shuffle of large
    sets draws whole blocks and relies on it. Other splits are cut in order.
    """
    for split in SPLITS:
        samples = listing.split(split)
        num_chunks = chunks_of(samples, listing.origin, data.image_size**2 * listing.channels)
        for number in range(num_chunks):
            bounds = slice(len(samples) * number // num_chunks, len(samples) * (number + 1) // num_chunks)
            yield Chunk(
                origin=listing.origin,
                split=split,
                number=number,
                samples=samples[number::num_chunks] if split == "train" else samples[bounds],
                class_names=listing.class_names,
                image_size=data.image_size,
                channels=listing.channels,
                directory=str(directory),
            )


def chunks_of(samples: Sequence[Sample], origin: Origin, num_bytes: int) -> int:
    """How many chunks samples are cut into, of `num_bytes` each when decoded."""
    most = MAX_FILES if origin.kind == "files" else MAX_ROWS
    most = max(1, min(most, MAX_DECODED_BYTES // num_bytes))
    encoded = sum(sample.size for sample in samples)
    return min(len(samples), max(-(-len(samples) // most), -(-encoded // MAX_ENCODED_BYTES)))


def run_chunks(
    chunks: Sequence[Chunk], address: str, directory: Path, on_progress: Progress | None
) -> list[ShardRecord]:
    """Have every chunk written by some worker; returns their records in order of completion.

    Raises:
        RunError: The cluster cannot be reached, has no workers, or lost a task for good.
    """
    total = sum(len(chunk.samples) for chunk in chunks)
    records: list[ShardRecord] = []
    done = 0
    with connect_to_workers(address, "preparation") as client:
        submit = partial(_submit, client, workers(client), Counter(chunk.split for chunk in chunks))
        with closing(completed(client, chunks, submit)) as found:
            for record in found:
                records.append(record)
                done += record.num_samples + len(record.rejected)
                store.touch(directory)
                if on_progress is not None:
                    on_progress(done, total)
    return records


def _submit(client: Client, present: list[str], counts: Counter[str], chunk: Chunk) -> Future[ShardRecord]:
    """Send a chunk to the worker whose rank will read its shard; one with nothing to do may steal it."""
    key = f"prepare-{chunk.split}-{chunk.number}-{uuid4().hex}"
    reader = present[first_reader(chunk.split, chunk.number, counts[chunk.split], len(present))]
    return client.submit(
        write_shard, chunk, key=key, pure=False, retries=RETRIES, workers=[reader], allow_other_workers=True
    )


def _read_rejected(path: Path) -> list[Rejected]:
    return [Rejected.model_validate_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _check_rejected(data: Data, rejected: Sequence[Rejected], total: int, keep: Callable[[], Path]) -> None:
    if len(rejected) <= data.max_rejected_fraction * total:
        return
    first = rejected[0]
    raise InputError(
        f"data.root={data.root}: {len(rejected)} of {total} samples ({100 * len(rejected) / total:.1f} %) cannot be "
        f"decoded, first {first.path} ({first.reason}); the limit is "
        f"data.max_rejected_fraction={data.max_rejected_fraction}; mend or remove them "
        f"(list: {keep()}) or raise the limit"
    )


def _check_training(data: Data, listing: SampleListing, records: Sequence[ShardRecord]) -> None:
    counts = map(sum, zip(*(record.class_counts for record in records if record.split == "train"), strict=True))
    empty = [name for name, count in zip(listing.class_names, counts, strict=True) if count == 0]
    if empty:
        raise InputError(
            f"data.root={data.root}: no training sample of class {', '.join(empty)} can be decoded; "
            "every class needs at least one; mend its images or remove the class"
        )


def _check_visible(directory: Path, records: Sequence[ShardRecord]) -> None:
    for record in records:
        for file in record.files:
            if not (directory / file.name).is_file():
                raise RunError(
                    f"{directory / file.name} was written by a worker but cannot be seen here; all hosts need one "
                    "PACELINE_HOME; put it on a file system that every host mounts under the same path"
                )
