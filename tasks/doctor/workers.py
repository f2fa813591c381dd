"""The workers of a cluster: their code, their packages, their clocks, and whether they see the shared state."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from paceline.conf.environment import Environment
from paceline.conf.plugins import Plugin
from paceline.tasks.cluster.client import call_workers, connect, workers
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.cluster.user_packages import PackageName, find_differences
from paceline.tasks.cluster.user_packages import WorkerPackages as Packages
from paceline.tasks.cluster.user_packages import look as look_for_packages
from paceline.tasks.data.sources.folder import is_local, reach_root
from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.errors import one_line
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.records import Record
from paceline.tasks.redact import redact
from paceline.tasks.track.environment import installed

if TYPE_CHECKING:
    from distributed import Client

PACKAGES = ("torch", "lightning", "distributed", "dask", "numpy", "mlflow")
ANSWER_SECONDS = 30.0
REACH_SECONDS = 20.0
"""For a file system or a store to answer a worker."""
SKEW_SECONDS, TOO_MUCH_SKEW_SECONDS = 1.0, 30.0
"""Clocks that differ by more muddle the order of logs and metrics; by much more, certificates are not yet or no longer
valid."""
GIB = 2**30


class Seen(Record):
    """A worker as it sees itself."""

    host: str
    code: str
    versions: dict[str, str | None]
    clock: float
    """Unix seconds."""
    sees_home: bool
    """The file that the asking process has put there."""
    writes_home: bool
    free_bytes: int
    writes_leases: bool
    num_gpus: int
    own: Packages
    """What it has of the user's packages that were asked for."""


def examine_workers(
    address: str,
    site: Environment,
    num_expected: int,
    packages: Sequence[Plugin] = (),
    named: Sequence[Plugin] = (),
    root: str | None = None,
) -> list[Finding]:
    """Ask all workers of a cluster.

    Args:
        address: of the scheduler.
        site: has the state directory, the same path everywhere, and where each host's device leases lie.
        num_expected: workers that the execution needs.
        packages: of the user's, that this process has.
        named: those of them that the configuration needs.
        root: of the data, as each worker will read it; None for data that are nowhere else.
    """
    home, leases = site.root, site.leases
    home.mkdir(parents=True, exist_ok=True)
    marker = home / f".doctor-{uuid4().hex}"
    marker.write_text("paceline doctor", encoding="utf-8")
    try:
        with connect(address) as client:
            present = workers(client)
            answers, skews = _ask(
                client, present, (str(marker), str(leases), tuple((one.kind, one.name) for one in packages))
            )
            reached = [] if root is None else [(worker, lacks_data, (root,)) for worker in present]
            lacks = call_workers(client, reached, REACH_SECONDS + ANSWER_SECONDS)
    finally:
        marker.unlink(missing_ok=True)
    silent = {worker: answer for worker, answer in answers.items() if not isinstance(answer, Seen)}
    seen = {worker: answer for worker, answer in answers.items() if isinstance(answer, Seen)}
    found = [_number(seen, silent, num_expected)]
    if not seen:
        return found
    found += [_code(seen), _versions(seen), _skew(skews), _home(seen, home), _leases(seen, leases)]
    if packages:
        found.append(_packages(seen, packages, named))
    if root is not None:
        found.append(_data(dict(zip(present, lacks, strict=True)), root))
    return found


def look(marker: str, leases: str, asked: tuple[PackageName, ...]) -> Seen:
    """What the worker that this runs on sees."""
    there = Path(marker)
    own = there.with_name(f"{there.name}-{uuid4().hex}")
    try:
        own.write_text(socket.gethostname(), encoding="utf-8")
        own.unlink()
        writes = True
    except OSError:
        writes = False
    place = Path(leases)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        place = place.parent
    return Seen(
        host=socket.gethostname(),
        code=code_fingerprint(),
        versions={name: installed(name) for name in PACKAGES},
        clock=time.time(),
        sees_home=there.is_file(),
        writes_home=writes,
        free_bytes=shutil.disk_usage(there.parent).free if there.parent.is_dir() else 0,
        writes_leases=os.access(place, os.W_OK) and place == Path(leases),
        num_gpus=len(describe().gpus),
        own=look_for_packages(asked),
    )


async def lacks_data(root: str) -> str:
    """Why the worker that this runs on cannot read what lies at a root; empty where it can.

    A dead mount or store keeps one thread waiting, and not the worker, whom others take for lost when it is silent.
    """
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
    client: Client, present: list[str], arguments: tuple[str, str, tuple[PackageName, ...]]
) -> tuple[dict[str, object], dict[str, tuple[float, float]]]:
    """What each worker answers; how far its clock is ahead, and how sure that is, in seconds."""
    answers: dict[str, object] = {}
    skews: dict[str, tuple[float, float]] = {}
    for worker in present:  # one by one: the time that the question takes is the uncertainty of its clock
        before = time.time()
        (answer,) = call_workers(client, [(worker, look, arguments)], ANSWER_SECONDS)
        after = time.time()
        answers[worker] = answer
        if isinstance(answer, Seen):
            skews[worker] = (answer.clock - (before + after) / 2, (after - before) / 2)
    return answers, skews


def _number(seen: dict[str, Seen], silent: dict[str, object], num_expected: int) -> Finding:
    gpus = sum(found.num_gpus > 0 for found in seen.values())
    there = f"{len(seen)} on {len({found.host for found in seen.values()})} hosts" + (
        f", {gpus} see GPUs" if gpus else ""
    )
    if silent:
        worker, answer = next(iter(silent.items()))
        why = one_line(answer) if isinstance(answer, BaseException) else "no answer"
        remedy = "install the same version on every host and restart its workers"
        return bad("workers", f"{there}; {len(silent)} do not answer as they should, {worker}: {why}", remedy)
    if len(seen) < num_expected:
        remedy = "start more workers, or lower execution.num_nodes and num_devices"
        return bad("workers", f"{there}; {num_expected} are needed", remedy)
    return good("workers", there)


def _code(seen: dict[str, Seen]) -> Finding:
    own = code_fingerprint()
    other = [worker for worker, found in seen.items() if found.code != own]
    if other:
        remedy = "install the same version there and restart the workers"
        return bad("code", f"{len(other)} workers run other code than this process ({own}): {other[0]}", remedy)
    return good("code", f"{own} everywhere")


def _versions(seen: dict[str, Seen]) -> Finding:
    own = {name: installed(name) for name in PACKAGES}
    other = [
        f"{worker} has {name} {found.versions.get(name)} (here {own[name]})"
        for worker, found in seen.items()
        for name in PACKAGES
        if found.versions.get(name) != own[name]
    ]
    if other:
        return bad(
            "versions",
            f"{other[0]}" + (f" and {len(other) - 1} more" if other[1:] else ""),
            "install the lock everywhere",
        )
    return good("versions", "the same everywhere")


def _packages(seen: dict[str, Seen], packages: Sequence[Plugin], named: Sequence[Plugin]) -> Finding:
    lacks = [
        (package in named, f"{worker} {lack}")
        for worker, found in seen.items()
        for package, lack in find_differences(packages, found.own)
    ]
    if not lacks:
        return good("own on workers", ", ".join(one.identity for one in packages))
    is_needed, first = max(lacks, key=lambda lack: lack[0])
    text = first + (f" and {len(lacks) - 1} more" if lacks[1:] else "")
    remedy = "install the same everywhere and restart the workers"
    return (bad if is_needed else doubtful)("own on workers", text, remedy)


def _skew(skews: dict[str, tuple[float, float]]) -> Finding:
    worst, (ahead, unsure) = max(skews.items(), key=lambda item: abs(item[1][0]))
    text = f"{worst} is {ahead:+.2f} s ahead, give or take {unsure:.2f} s"
    certain = abs(ahead) - unsure
    remedy = "let the hosts follow one time server (chrony, systemd-timesyncd)"
    if certain > TOO_MUCH_SKEW_SECONDS:
        return bad("clocks", text, remedy)
    return doubtful("clocks", text, remedy) if certain > SKEW_SECONDS else good("clocks", text)


def _home(seen: dict[str, Seen], home: Path) -> Finding:
    blind = [found.host for found in seen.values() if not found.sees_home]
    dumb = [found.host for found in seen.values() if not found.writes_home]
    if blind or dumb:
        what = f"{blind[0]} does not see" if blind else f"{dumb[0]} cannot write to"
        remedy = "mount one file system at that path on every host, writable for this user"
        return bad("shared state", f"{what} PACELINE_HOME={home}", remedy)
    return good(
        "shared state", f"{home}: {min(found.free_bytes for found in seen.values()) / GIB:.0f} GiB free, seen by all"
    )


def _data(answers: dict[str, object], root: str) -> Finding:
    lacks = [f"{worker}: {_said(answer)}" for worker, answer in answers.items() if answer]
    if lacks:
        text = lacks[0] + (f" and {len(lacks) - 1} more" if lacks[1:] else "")
        remedy = "mount it there, or give the workers the credentials and the way to the store, and restart them"
        return bad("data on workers", redact(text), remedy)
    return good("data on workers", f"{redact(root)}, reached by all")


def _said(answer: object) -> str:
    return one_line(answer) if isinstance(answer, BaseException) else str(answer)


def _leases(seen: dict[str, Seen], leases: Path) -> Finding:
    by_host: dict[str, bool] = defaultdict(lambda: True)
    for found in seen.values():
        by_host[found.host] &= found.writes_leases
    closed = [host for host, writes in by_host.items() if not writes]
    if closed:
        remedy = "make it writable for all who share the devices, or set PACELINE_LEASES everywhere"
        return bad("leases of workers", f"PACELINE_LEASES={leases} cannot be written on {closed[0]}", remedy)
    return good("leases of workers", f"{leases} on each host")
