"""The workers of a cluster: their code, their packages, their clocks, and whether they see the shared state."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil

from paceline.conf.environment import Environment
from paceline.conf.plugins import Plugin
from paceline.tasks.cluster import gpu_workers
from paceline.tasks.cluster.client import call_workers, connect, workers
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.cluster.user_packages import PackageName, WorkerPackages, find_differences, list_packages
from paceline.tasks.data.sources.folder import is_local, reach_root
from paceline.tasks.doctor.finding import Finding, Status, bad, doubtful, good
from paceline.tasks.errors import one_line
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.measure.gpu import contexts_of
from paceline.tasks.records.record import Record
from paceline.tasks.redact import redact
from paceline.tasks.track.environment import installed_version
from paceline.tasks.train.launch.run_lock import is_locked, run_lock

if TYPE_CHECKING:
    from distributed import Client

PACKAGES = ("torch", "lightning", "distributed", "dask", "numpy", "mlflow")
ANSWER_SECONDS = 30.0
REACH_SECONDS = 20.0  # for a file system or a store to answer a worker
SKEW_SECONDS, TOO_MUCH_SKEW_SECONDS = 1.0, 30.0
"""Clocks that differ by more muddle the order of logs and metrics; by much more, certificates are not yet or no longer
valid."""
LOCK_SUFFIX = ".lock"
GIB = 2**30


class Seen(Record):
    """A worker's report about itself."""

    host: str
    code: str
    versions: dict[str, str | None]
    clock: float  # Unix seconds
    sees_home: bool  # it sees the marker file of the examining process
    writes_home: bool
    sees_lock: bool  # the lock that the examining process holds next to its marker
    mount: str  # file system of PACELINE_HOME, with its options
    free_bytes: int
    writes_leases: bool
    num_gpus: int
    contexts: dict[str, bool]  # GPUs on which it holds a CUDA context, and whether each takes a single process
    own: WorkerPackages  # the requested user packages that it has


def examine_workers(
    address: str,
    site: Environment,
    num_expected: int,
    packages: Sequence[Plugin] = (),
    named: Sequence[Plugin] = (),
    root: str | None = None,
) -> list[Finding]:
    """Examine all workers of a cluster."""
    home, leases = site.root, site.leases
    home.mkdir(parents=True, exist_ok=True)
    marker = home / f".doctor-{uuid4().hex}"
    marker.write_text("paceline doctor", encoding="utf-8")
    with ExitStack() as stack:
        stack.callback(marker.unlink, missing_ok=True)
        stack.callback(shutil.rmtree, marker.with_suffix(LOCK_SUFFIX), ignore_errors=True)
        with suppress(OSError):  # without locks no worker sees one, which is reported
            stack.enter_context(run_lock(marker.with_suffix(LOCK_SUFFIX)))
        client = stack.enter_context(connect(address))
        requested = tuple((plugin.kind, plugin.name) for plugin in packages)
        answers, skews = _ask(client, (str(marker), str(leases), requested))
        reached = [] if root is None else [(worker, lacks_data, (root,)) for worker in answers]
        lacks = call_workers(client, reached, REACH_SECONDS + ANSWER_SECONDS)
    reports = {worker: answer for worker, answer in answers.items() if isinstance(answer, Seen)}
    findings = [_number(answers, reports, num_expected)]
    if not reports:
        return findings
    findings += [_code(reports), _versions(reports), _skew(skews), _home(reports, home)]
    findings += [_locks(reports, home), _leases(reports, leases)]
    if any(report.num_gpus for report in reports.values()):
        findings.append(_contexts(reports))
    if packages:
        findings.append(_packages(reports, packages, named))
    if root is not None:
        findings.append(_data(dict(zip(answers, lacks, strict=True)), root))
    return findings


def look(marker: str, leases: str, asked: tuple[PackageName, ...]) -> Seen:
    """Report on the worker that runs this function."""
    marker_file = Path(marker)
    scratch_file = marker_file.with_name(f"{marker_file.name}-{uuid4().hex}")
    writes, place = False, Path(leases)
    with suppress(OSError):
        scratch_file.write_text(socket.gethostname(), encoding="utf-8")
        scratch_file.unlink()
        writes = True
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    sees_lock = False
    with suppress(OSError):
        sees_lock = is_locked(marker_file.with_suffix(LOCK_SUFFIX)) is True
    return Seen(
        host=socket.gethostname(),
        code=code_fingerprint(),
        versions={name: installed_version(name) for name in PACKAGES},
        clock=time.time(),
        sees_home=marker_file.is_file(),
        writes_home=writes,
        sees_lock=sees_lock,
        mount=_mount_of(marker_file),
        free_bytes=shutil.disk_usage(marker_file.parent).free if marker_file.parent.is_dir() else 0,
        writes_leases=os.access(place, os.W_OK) and place.is_dir(),
        num_gpus=len(gpus := describe().gpus),
        contexts=contexts_of(os.getpid(), [gpu.uuid for gpu in gpus]),
        own=list_packages(asked),
    )


async def lacks_data(root: str) -> str:
    """Why the worker that this runs on cannot read what lies at a root; empty where it can."""
    # A dead mount or store keeps one thread waiting, and not the worker, whom others take for lost when it is silent.
    try:
        return await asyncio.wait_for(asyncio.to_thread(_lacks, root), REACH_SECONDS)
    except TimeoutError:
        return f"data.root={root}: no answer within {REACH_SECONDS:.0f} s"


def _lacks(root: str) -> str:
    try:
        filesystem, path = reach_root(root)
        if not filesystem.exists(path):
            return f"data.root={root}: is not there"
        is_closed = is_local(filesystem) and not os.access(path, os.R_OK)
        return f"data.root={root}: may not be read" if is_closed else ""
    except Exception as error:  # noqa: BLE001  whatever it is, it is what was to be found out
        return one_line(error)


def _ask(
    client: Client, arguments: tuple[str, str, tuple[PackageName, ...]]
) -> tuple[dict[str, object], dict[str, tuple[float, float]]]:
    """Each worker's answer, and the offset of its clock with its uncertainty, in seconds."""
    answers: dict[str, object] = {}
    skews: dict[str, tuple[float, float]] = {}
    for worker in workers(client):  # one by one: the time that the question takes is the uncertainty of its clock
        before = time.time()
        (answer,) = call_workers(client, [(worker, look, arguments)], ANSWER_SECONDS)
        after = time.time()
        answers[worker] = answer
        if isinstance(answer, Seen):
            skews[worker] = (answer.clock - (before + after) / 2, (after - before) / 2)
    return answers, skews


def _number(answers: dict[str, object], reports: dict[str, Seen], num_expected: int) -> Finding:
    gpus = sum(report.num_gpus > 0 for report in reports.values())
    summary = f"{len(reports)} on {len({report.host for report in reports.values()})} hosts"
    summary += f", {gpus} see GPUs" if gpus else ""
    if silent := [worker for worker in answers if worker not in reports]:
        answer = answers[silent[0]]
        why = one_line(answer) if isinstance(answer, BaseException) else "no answer"
        fault = f"{summary}; {len(silent)} do not answer as they should, {silent[0]}: {why}"
        return bad("workers", fault, "install the same version on every host and restart its workers")
    if len(reports) < num_expected:
        remedy = "start more workers, or lower execution.num_nodes and num_devices"
        return bad("workers", f"{summary}; {num_expected} are needed", remedy)
    return good("workers", summary)


def _code(reports: dict[str, Seen]) -> Finding:
    code = code_fingerprint()
    if other := [worker for worker, report in reports.items() if report.code != code]:
        fault = f"{len(other)} workers run other code than this process ({code}): {other[0]}"
        return bad("code", fault, "install the same version there and restart the workers")
    return good("code", f"{code} everywhere")


def _contexts(reports: dict[str, Seen]) -> Finding:
    """A CUDA context of a worker, as dask-cuda creates it, next to those of ranks."""
    holders = [(worker, report.contexts) for worker, report in reports.items() if report.contexts]
    if not holders:
        return good("contexts", "no worker holds a CUDA context")
    worker, contexts = max(holders, key=lambda holder: any(holder[1].values()))
    text = f"{len(holders)} workers hold a CUDA context, {worker} on {', '.join(contexts)}"
    remedy = f"start them with dask worker --preload-nanny {gpu_workers.__name__} in place of dask cuda worker"
    if any(contexts.values()):
        fault = f"{text}, which takes a single process (EXCLUSIVE_PROCESS): no training can start"
        return bad("contexts", fault, remedy)
    return doubtful("contexts", f"{text}: memory that trainings lack", remedy)


def _versions(reports: dict[str, Seen]) -> Finding:
    versions = {name: installed_version(name) for name in PACKAGES}
    other = [
        f"{worker} has {name} {report.versions.get(name)} (here {versions[name]})"
        for worker, report in reports.items()
        for name in PACKAGES
        if report.versions.get(name) != versions[name]
    ]
    return _judge("versions", other, "install the lock everywhere", "the same everywhere")


def _packages(reports: dict[str, Seen], packages: Sequence[Plugin], named: Sequence[Plugin]) -> Finding:
    lacks = [
        (package in named, f"{worker} {lack}")
        for worker, report in reports.items()
        for package, lack in find_differences(packages, report.own)
    ]
    lacks.sort(key=lambda lack: not lack[0])  # those that the run needs come first
    status: Status = "error" if any(is_needed for is_needed, _ in lacks) else "warning"
    remedy, fine = "install the same everywhere and restart the workers", ", ".join(each.identity for each in packages)
    return _judge("own on workers", [lack for _, lack in lacks], remedy, fine, status)


def _judge(check: str, faults: Sequence[str], remedy: str, fine: str, status: Status = "error") -> Finding:
    """The first of the faults with the number of the others; a good finding without any."""
    more = f" and {len(faults) - 1} more" if faults[1:] else ""
    return Finding(check=check, status=status, found=faults[0] + more, remedy=remedy) if faults else good(check, fine)


def _skew(skews: dict[str, tuple[float, float]]) -> Finding:
    worst, (ahead, unsure) = max(skews.items(), key=lambda item: abs(item[1][0]))
    text = f"{worst} is {ahead:+.2f} s ahead, give or take {unsure:.2f} s"
    certain = abs(ahead) - unsure
    remedy = "let the hosts follow one time server (chrony, systemd-timesyncd)"
    if certain > TOO_MUCH_SKEW_SECONDS:
        return bad("clocks", text, remedy)
    return doubtful("clocks", text, remedy) if certain > SKEW_SECONDS else good("clocks", text)


def _home(reports: dict[str, Seen], home: Path) -> Finding:
    faults = [f"{report.host} does not see" for report in reports.values() if not report.sees_home]
    faults += [f"{report.host} cannot write to" for report in reports.values() if not report.writes_home]
    if faults:
        remedy = "mount one file system at that path on every host, writable for this user"
        return bad("shared state", f"{faults[0]} PACELINE_HOME={home}", remedy)
    free = min(report.free_bytes for report in reports.values())
    return good("shared state", f"{home}: {free / GIB:.0f} GiB free, seen by all")


def _mount_of(path: Path) -> str:
    """The file system that holds a path, with its options."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return f"{mount.fstype} ({mount.opts})" if mount else "unknown"


def _locks(reports: dict[str, Seen], home: Path) -> Finding:
    """Whether a lock of this process is seen on the workers' hosts: without it, two processes could train one run."""
    here, hosts = socket.gethostname(), {report.host for report in reports.values()}
    if blind := [report for report in reports.values() if not report.sees_lock]:
        fault = f"{blind[0].host} does not see a lock that {here} takes in PACELINE_HOME={home}; it is {blind[0].mount}"
        return bad("locks", fault, "mount it with locks between hosts: NFS without the options nolock and local_lock")
    others = len(hosts - {here})
    return good("locks", f"a lock of {here} holds on {others} other hosts" if others else "there is only one host")


def _data(answers: dict[str, object], root: str) -> Finding:
    lacks = [
        redact(f"{worker}: {one_line(answer) if isinstance(answer, BaseException) else answer}")
        for worker, answer in answers.items()
        if answer
    ]
    remedy = "mount it there, or give the workers the credentials and the way to the store, and restart them"
    return _judge("data on workers", lacks, remedy, f"{redact(root)}, reached by all")


def _leases(reports: dict[str, Seen], leases: Path) -> Finding:
    if closed := [report.host for report in reports.values() if not report.writes_leases]:
        remedy = "make it writable for all who share the devices, or set PACELINE_LEASES everywhere"
        return bad("leases of workers", f"PACELINE_LEASES={leases} cannot be written on {closed[0]}", remedy)
    return good("leases of workers", f"{leases} on each host")
