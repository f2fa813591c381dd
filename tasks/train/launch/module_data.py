"""The user's Lightning code on the workers of a cluster: its packages, and its data, prepared in child processes."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from pydantic import ValidationError

from paceline.conf.lightning import Lightning
from paceline.tasks import deadline
from paceline.tasks.cluster.bounded_submit import connect_to_workers, iter_results
from paceline.tasks.cluster.client import connect, host_of, workers
from paceline.tasks.data.key import FORMAT_VERSION
from paceline.tasks.data.prepare import store
from paceline.tasks.data.prepare.manifest import Partition, PartitionFile, PartitionsManifest
from paceline.tasks.errors import InputError, PacelineError, RunError, one_line
from paceline.tasks.files import TEMPORARY_SUFFIX, is_full, sha256_of, sync_tree
from paceline.tasks.records.data import PARTITIONS, PreparedPartitions
from paceline.tasks.train.lightning import child, code

if TYPE_CHECKING:
    from distributed import Client, Future

    from paceline.tasks.train.launch.coordinator import TrainJob

POLL_SECONDS = 0.1


def require_code(module: Lightning, address: str) -> None:
    """Raise InputError: a worker has other packages of the user's classes than this process."""
    names = code.package_names(module.settings, Path(module.code) if module.code else None)
    if not names:
        return
    expected = module.packages[-len(names) :]
    with connect(address) as client:
        answers = client.run(code.identify, names, on_error="return")
    for worker, answer in sorted(answers.items()):
        if answer != expected:
            has = f"has {' and '.join(answer)}" if isinstance(answer, tuple) else one_line(answer)
            raise InputError(f"worker {worker} {has}, this run {' and '.join(expected)}", hint=code.SAME_CODE)


def prepare_on_hosts(job: TrainJob, address: str) -> list[str]:
    """Prepare the data on all hosts at the same time; return the hosts. Raises RunError: it failed on one of them."""
    module = job.config.lightning
    copied = str(job.directory / code.FOLDER) if module.code else None
    with connect(address) as client:
        hosts = {host_of(worker): worker for worker in reversed(workers(client))}
        if job.config.cluster.is_this_host:  # a process of this host may have imported the code already
            deadline.within(partial(_prepare_here, module, copied, min(hosts)))
        else:
            _prepare_there(client, module, copied, hosts)
    if copied is not None:
        code.list_written(Path(copied))
    return sorted(hosts)


def _prepare_there(client: Client, module: Lightning, copied: str | None, hosts: dict[str, str]) -> None:
    """Prepare on one worker of each host, at the same time. Raises RunError: it failed on one of them."""
    futures = {}
    for index, (host, worker) in enumerate(sorted(hosts.items())):
        request = child.Request(task="prepare", code=copied, settings=module.settings, host_index=index)
        how = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0}
        futures[host] = client.submit(child.ask, request, **how)
    while not all(future.done() for future in futures.values()):
        deadline.check()
        time.sleep(POLL_SECONDS)
    for host, future in futures.items():
        if (error := future.exception()) is not None:
            raise RunError(f"on host {host}: {one_line(error)}") from error


def _prepare_here(module: Lightning, copied: str | None, host: str) -> None:
    """Prepare on this host, if possible in the process that has read the settings: it has imported the user's code."""
    written: AbstractContextManager[None] = nullcontext()
    if module.code is not None and copied is not None:
        written = code.link_written(Path(module.code), Path(copied), code.data_paths(module.settings))
    try:
        with written:
            child.ask_again(child.Request(task="prepare", code=copied, settings=module.settings))
    except PacelineError as error:
        raise RunError(f"on host {host}: {one_line(error)}") from error


def prepare_partitions(
    module: Lightning,
    copied: str | None,
    home: Path,
    address: str,
    on_progress: Callable[[int, int, int], None],
    *,
    check_content: bool = False,
) -> PreparedPartitions:
    """Have all workers prepare the partitions of the user's DataModule, one at a time each, or find them prepared.

    `copied` is the directory of code that the workers import from; `check_content` as in `store.find_as`. `on_progress`
    gets the number of prepared partitions, of all, and the bytes that the prepared ones have; an error of it ends the
    preparation.

    Raises InputError: the keys or a partition are not what they must be; RunError: the user's code failed.
    """
    started, home = time.perf_counter(), home.resolve()
    with connect_to_workers(address, "preparation") as client:
        request = child.Request(task="partitions", code=copied, settings={"data": module.settings["data"]})
        (answer,) = iter_results(client, [request], lambda one: client.submit(child.ask, one, pure=False))
        answer |= {"keys": sorted(answer["keys"])}  # a set has another order in each process
        inputs = {"format": FORMAT_VERSION, **answer}
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        facts = store.find_as(home, key, PartitionsManifest, check_content=check_content)
        is_reused = facts is not None
        if facts is None:
            request = request.model_copy(update={"task": "partition"})
            facts = _make(client, home, key, answer["keys"], request, on_progress)
    path, seconds = store.directory_of(home, key), time.perf_counter() - started
    return facts.to_prepared(path, reused=is_reused, seconds=seconds)


def _make(
    client: Client,
    home: Path,
    key: str,
    names: list[str],
    request: child.Request,
    on_progress: Callable[[int, int, int], None],
) -> PartitionsManifest:
    store.remove_stale(home)
    with store.temporary(home, key, (PARTITIONS,)) as directory:
        done: dict[str, Partition] = {}
        for line in store.read_finished_lines(directory):
            with suppress(ValidationError, OSError):  # of another version, or gone: that one is prepared again
                partition = Partition.model_validate_json(line)
                if all((directory / file.name).stat().st_size == file.num_bytes for file in partition.files):
                    done[partition.name] = partition
        for place in (directory / PARTITIONS).iterdir():  # what is not whole would stand in the way of the new one
            if place.name not in done:
                shutil.rmtree(place)

        def submit(name: str) -> Future[Partition]:
            task = request.model_copy(update={"partition": name})
            return client.submit(write_partition, task, str(directory), key=f"partition-{name}-{uuid4().hex}")

        try:
            num_bytes = sum(file.num_bytes for one in done.values() for file in one.files)
            with closing(iter_results(client, [name for name in names if name not in done], submit)) as results:
                for partition in results:
                    done[partition.name] = partition
                    store.touch(directory)
                    num_bytes += sum(file.num_bytes for file in partition.files)
                    on_progress(len(done), len(names), num_bytes)
        except BaseException as error:
            if done and not is_full(error):
                store.leave_to_next(home, key, directory, (one.model_dump_json() for one in done.values()))
            raise
        facts = PartitionsManifest(
            format_version=FORMAT_VERSION,
            key=key,
            fingerprint="",
            partitions=tuple(done[name] for name in names),
            provenance={
                "source": request.settings["data"]["class_path"],
                "host": socket.gethostname(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        facts = facts.model_copy(update={"fingerprint": facts.content()})
        store.publish(home, directory, facts, ())
    return facts


def write_partition(request: child.Request, directory: str) -> Partition:
    """Prepare a partition in a child process, in a folder that gets its name last, and list its files with digests.

    A worker that was taken for lost may write the same partition: the first one counts.

    Raises InputError: nothing was written, or a link; RunError: the user's code failed.
    """
    final = Path(directory) / PARTITIONS / request.partition
    temporary = final.with_name(f"{request.partition}.{uuid4().hex}{TEMPORARY_SUFFIX}")
    temporary.mkdir()
    try:
        child.ask(request.model_copy(update={"directory": str(temporary)}))
        what = f"prepare_partition({request.partition!r})"
        paths = [path for path in temporary.rglob("*") if path.is_symlink() or not path.is_dir()]
        if any(path.is_symlink() or not path.is_file() for path in paths):
            raise InputError(f"{what} wrote a link", hint="write the content itself into the directory")
        if not sum(path.stat().st_size for path in paths):
            raise InputError(f"{what} wrote nothing", hint="write at least one file into the directory that it gets")
        sync_tree(temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = tuple(
        PartitionFile(name=str(path.relative_to(directory)), num_bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(final.rglob("*"))
        if path.is_file()
    )
    return Partition(name=request.partition, files=files)
