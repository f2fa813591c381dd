"""The coordinator: starts all ranks of a group through Dask or none, watches them, and ends all with the first failure.

Runs in the flow's own process. Knows where ranks run, not what they compute.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from conf.schema import Config
from tasks.cluster.address import connect, workers
from tasks.cluster.hardware import describe
from tasks.errors import InputError, RankError, RunError
from tasks.fingerprint import code_fingerprint
from tasks.records import Hardware, Measurement, MeasureResult, Plan, PreparedSet, RankSpec, Record, TrainResult
from tasks.train.checkpoint import newest_verified
from tasks.train.launch import Seat, seat_ranks
from tasks.train.supervise import (
    RankOutcome,
    free_port,
    interface_of,
    progress_topic,
    running_ranks,
    supervise,
)

if TYPE_CHECKING:
    from distributed import Client, Future

POLL_SECONDS = 0.2
LIVENESS_SECONDS = 2.0
SETTLE_SECONDS = 0.6
ABORT_SECONDS = 15.0
# Errors of ranks that only saw another one go; the root cause is the earliest error that is none of these.
ECHOES = ("connection closed", "connection reset", "connectfullmesh", "aborted", "broken pipe")

Progress = Callable[[dict[str, Any]], None]


class TrainJob(Record):
    """One training to be done."""

    config: Config
    plan: Plan
    prepared: PreparedSet
    run_id: str
    tracking_uri: str
    home: str
    resume: bool = False
    measurement: Measurement | None = None
    """Measure this instead of training."""
    cold_compile: bool = False
    """Compile from nothing, whatever earlier trainings have left in caches."""

    @property
    def directory(self) -> Path:
        """Where the run's checkpoints and the ranks' logs lie."""
        return Path(self.home) / "runs" / self.run_id


def train_group(job: TrainJob, address: str, on_progress: Progress | None = None) -> TrainResult:
    """Train on the cluster at `address` and return rank 0's result.

    Raises:
        InputError: the cluster cannot seat the group, or other code runs there.
        RankError: a rank failed; all others have been ended.
        RunError: a worker was lost.
    """
    return _merge(_group(job, address, on_progress))


def measure_group(job: TrainJob, address: str) -> MeasureResult:
    """Have the group measure what `job.measurement` asks for, and return rank 0's result.

    Raises:
        InputError: the cluster cannot seat the group, or other code runs there.
        RankError: a rank failed; all others have been ended.
        RunError: a worker was lost.
    """
    assert job.measurement is not None
    return MeasureResult.model_validate(_group(job, address, None)[0].result)


def _group(job: TrainJob, address: str, on_progress: Progress | None) -> list[RankOutcome]:
    with connect(address) as client:
        specs = _specs(client, job, _seats(client, job.config))
        with _progress(client, job.run_id, on_progress):
            return _run(client, specs)


def inspect(config: Config, address: str) -> Hardware:
    """Hardware of the first host that would train on the cluster at `address`.

    Raises:
        InputError: no scheduler answers, the cluster cannot seat the group, or other code runs there.
    """
    with connect(address) as client:
        first = _seats(client, config)[0].worker
        found: Hardware = client.run(describe, workers=[first])[first]
        return found


def _seats(client: Client, config: Config) -> list[Seat]:
    present = workers(client)
    codes = client.run(code_fingerprint, workers=present)
    strangers = [worker for worker in present if codes[worker] != code_fingerprint()]
    if strangers:
        raise InputError(
            f"worker {strangers[0]} runs other code ({codes[strangers[0]]}) than this process ({code_fingerprint()}); "
            "install the same version on every host and restart its workers"
        )
    hosts = [(worker, urlparse(worker).hostname or worker) for worker in present]
    return seat_ranks(hosts, config.execution.num_nodes, config.execution.num_devices)


def _specs(client: Client, job: TrainJob, seats: list[Seat]) -> list[tuple[Seat, RankSpec]]:
    port = client.submit(free_port, workers=[seats[0].worker], allow_other_workers=False, pure=False).result()
    checkpoints = job.directory / "checkpoints"
    resume_from = newest_verified(checkpoints) if job.resume else None
    attempt = len(list(job.directory.glob("attempt-*")))
    found = client.run(describe, workers=[seat.worker for seat in seats])
    specs = []
    for seat in seats:
        gpus = found[seat.worker].gpus if job.plan.accelerator == "gpu" else ()
        interface = client.submit(
            interface_of, seat.host, workers=[seat.worker], allow_other_workers=False, pure=False
        ).result()
        spec = RankSpec(
            config=job.config,
            plan=job.plan,
            prepared=job.prepared,
            run_id=job.run_id,
            tracking_uri=job.tracking_uri,
            directory=str(job.directory / f"attempt-{attempt}" / f"rank-{seat.rank}"),
            checkpoint_directory=str(checkpoints),
            resume_from=str(resume_from) if resume_from else None,
            rank=seat.rank,
            local_rank=seat.local_rank,
            node_rank=seat.node_rank,
            world_size=len(seats),
            num_nodes=job.config.execution.num_nodes,
            master_address=seats[0].host,
            master_port=port,
            interface=interface,
            devices=tuple(gpu.uuid for gpu in gpus),
            measurement=job.measurement,
            coordinator=(socket.gethostname(), os.getpid()),
            code_fingerprint=code_fingerprint(),
            cold_compile=job.cold_compile,
        )
        specs.append((seat, spec))
    return specs


def _run(client: Client, specs: list[tuple[Seat, RankSpec]]) -> list[RankOutcome]:
    futures = [
        client.submit(
            supervise,
            spec.model_dump_json(),
            workers=[seat.worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
            key=f"rank-{spec.rank}-{spec.run_id}-{time.time_ns()}",
        )
        for seat, spec in specs
    ]
    try:
        return _watch(client, futures, [seat for seat, _ in specs])
    finally:
        _end(client, futures, [seat.worker for seat, _ in specs], specs[0][1].run_id)


def _watch(client: Client, futures: list[Future[RankOutcome]], seats: list[Seat]) -> list[RankOutcome]:
    next_look = time.monotonic() + LIVENESS_SECONDS
    while True:
        outcomes = _finished(futures)
        if any(outcome.error is not None for outcome in outcomes):
            time.sleep(SETTLE_SECONDS)  # the peers' errors, so that the root cause can be told from its echoes
            raise _root_cause(_finished(futures))
        if len(outcomes) == len(futures):
            return sorted(outcomes, key=lambda outcome: outcome.rank)
        if time.monotonic() > next_look:
            next_look = time.monotonic() + LIVENESS_SECONDS
            _check_workers(client, seats)
        time.sleep(POLL_SECONDS)


def _finished(futures: list[Future[RankOutcome]]) -> list[RankOutcome]:
    for future in futures:
        if future.status in ("error", "lost", "cancelled"):
            reason = future.exception(timeout=5) if future.status == "error" else "its worker or the scheduler is gone"
            raise RunError(f"the supervisor of a rank ended as {future.status}: {reason}")
    return [future.result() for future in futures if future.status == "finished"]


def _check_workers(client: Client, seats: list[Seat]) -> None:
    present = set(workers(client))
    for seat in seats:
        if seat.worker not in present:
            raise RunError(
                f"Dask worker {seat.worker} of rank {seat.rank} on {seat.host} is gone; "
                "look at its log, then resume the run"
            )


def _root_cause(outcomes: list[RankOutcome]) -> RankError:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    own = [o for o in failed if not any(echo in (o.error or "").lower() for echo in ECHOES)]
    first = min(own or failed, key=lambda outcome: outcome.failed_at or float("inf"))
    return RankError(f"rank {first.rank} failed: {first.error}", first.rank, first.traceback)


def _end(client: Client, futures: list[Future[RankOutcome]], addresses: list[str], run_id: str) -> None:
    """Cancel what still runs and wait until no rank of the run is left on any host."""
    if all(future.status == "finished" for future in futures):
        return
    client.cancel(futures, force=True)
    deadline = time.monotonic() + ABORT_SECONDS
    while time.monotonic() < deadline:
        left = client.run(running_ranks, run_id, workers=addresses, on_error="return")
        if not any(isinstance(found, list) and found for found in left.values()):
            return
        time.sleep(POLL_SECONDS)


@contextmanager
def _progress(client: Client, run_id: str, on_progress: Progress | None) -> Iterator[None]:
    if on_progress is None:
        yield
        return
    topic = progress_topic(run_id)
    client.subscribe_topic(topic, lambda event: on_progress(event[1]))
    try:
        yield
    finally:
        client.unsubscribe_topic(topic)


def _merge(outcomes: list[RankOutcome]) -> TrainResult:
    """Rank 0's result with what concerns all ranks, and the wall time seen from outside."""
    results = [outcome.result or {} for outcome in outcomes]
    merged = results[0] | {"wall_seconds": outcomes[0].wall_seconds}
    merged["peak_memory_bytes"] = max(result["peak_memory_bytes"] for result in results)
    hosts = {result["hosts"][0]: result["energy_joules"] for result in reversed(results)}
    merged["energy_joules"] = None if None in hosts.values() else sum(hosts.values())
    for name in ("predictions", "hosts", "devices"):
        merged[name] = [entry for result in results for entry in result[name]]
    return TrainResult.model_validate(merged)
