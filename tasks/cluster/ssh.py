"""A Dask cluster on hosts that are reached by SSH, for the time of one run.

User, port, key and known hosts are those of `ssh` itself (~/.ssh/config). Every host needs the same interpreter at the
same path, this package, the certificates and PACELINE_HOME, as on a file system that all of them mount.
"""

import asyncio
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster.client import ClusterResources, run_in_thread, wait_for_workers
from paceline.tasks.cluster.gpu_workers import PRELOAD
from paceline.tasks.cluster.host_report import HostFacts
from paceline.tasks.cluster.local import QUIET_HTTP
from paceline.tasks.cluster.tls import Certificates
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.fingerprint import code_fingerprint

CONNECT_OPTIONS = {"connect_timeout": 10, "keepalive_interval": 15}
PYTHON = shlex.quote(sys.executable)
ANSWER_SECONDS, DEATH_SECONDS = 60, 60
SAID_LINES = 3
IDLE_TIMEOUT = "1 hour"  # ends the cluster of a run that was killed so hard that it could not do so itself


def ssh_arguments(settings: Cluster, demand: ClusterResources, certificates: Certificates | None) -> dict[str, Any]:
    """Arguments of Dask's `SSHCluster`, which go to the hosts as JSON: scheduler on the first host, workers on all."""
    scheme = "tls://" if certificates else "tcp://"
    shared: dict[str, Any] = dict(QUIET_HTTP) | ({"interface": settings.interface} if settings.interface else {})
    scheduler = {"port": 0, "protocol": scheme, "idle_timeout": IDLE_TIMEOUT, **shared}
    worker = {"n_workers": demand.workers_per_host, "nthreads": 1, "death_timeout": DEATH_SECONDS, **shared}
    if certificates:
        scheduler["security"] = certificates.settings("scheduler")
        worker["security"] = certificates.settings("worker")
    if demand.gpus:
        worker |= PRELOAD
    return {
        "hosts": [settings.hosts[0], *settings.hosts],
        "connect_options": dict(CONNECT_OPTIONS),
        "scheduler_options": scheduler,
        "worker_options": worker,
        "worker_class": "distributed.Nanny",
        "remote_python": PYTHON,
    }


@contextmanager
def open_ssh(settings: Cluster, demand: ClusterResources, certificates: Certificates | None) -> Iterator[str]:
    """Start scheduler and workers on the hosts and yield the scheduler's address; end them afterwards.

    Raises RunError: a host did not start them, or not in time.
    """
    from distributed import SSHCluster

    security, hosts = certificates.security() if certificates else None, f"cluster.hosts={','.join(settings.hosts)}"
    with _capture_log() as lines:
        try:
            cluster = SSHCluster(**ssh_arguments(settings, demand, certificates), security=security)
        except Exception as error:
            reason = " / ".join(lines[-SAID_LINES:])[-500:] or " ".join(str(error).split())
            raise RunError(f"{hosts}: cannot start Dask there: {reason}; fix the hosts or name others") from error
    with cluster:
        needed = f"{hosts} must reach each other on any port, and the scheduler"
        wait_for_workers(cluster.scheduler_address, demand, settings.wait_seconds, lambda: needed)
        yield cluster.scheduler_address


@contextmanager
def _capture_log() -> Iterator[list[str]]:
    """Capture the output of the starting processes, which `SSHCluster` logs but omits from its error."""
    lines: list[str] = []
    logger = logging.getLogger("distributed.deploy.ssh")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def ask_hosts(settings: Cluster, certificates: Certificates | None) -> list[HostFacts]:
    """Facts of each host in order. Raises InputError: one cannot be reached, or lacks something that a worker needs."""
    directory = [certificates.authority.rpartition("/")[0]] if certificates else []
    command = " ".join([PYTHON, "-m", "paceline.tasks.cluster.host_report", *map(shlex.quote, directory)])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(_ask(host, command) for host in settings.hosts))

    answers = run_in_thread(ask_all())
    return [_parse_answer(host, answer) for host, answer in zip(settings.hosts, answers, strict=True)]


async def _ask(host: str, command: str) -> str:
    import asyncssh

    try:
        async with asyncio.timeout(ANSWER_SECONDS), asyncssh.connect(host, **CONNECT_OPTIONS) as connection:
            answer = await connection.run(command, check=False)
    except (OSError, ValueError, asyncssh.Error) as error:  # a ValueError: of keys that cannot be read
        fault = f"cluster.hosts: {host} cannot be reached by SSH ({one_line(error)})"
        remedy = f"it must let this user in without a password: try  ssh -o BatchMode=yes {host} true"
        raise InputError(f"{fault}; {remedy}") from error
    if answer.exit_status != 0:
        lines = str(answer.stderr).strip().splitlines() or [f"exit status {answer.exit_status}"]
        fault = f"cluster.hosts: {host} cannot run {command} ({lines[-1]})"
        raise InputError(f"{fault}; every host needs this interpreter and this package at the same path")
    return str(answer.stdout)


def _parse_answer(host: str, answer: str) -> HostFacts:
    last = (answer.strip().splitlines() or [""])[-1]  # a login script may have printed something first
    try:
        facts = HostFacts.model_validate_json(last)
    except ValidationError as error:
        fault = f"cluster.hosts: {host} answered {last[:80]!r} instead of its facts"
        raise InputError(f"{fault}; install the same version there") from error
    if facts.code != code_fingerprint():
        fault = f"cluster.hosts: {host} has other code ({facts.code}) than this host ({code_fingerprint()})"
        raise InputError(f"{fault}; install the same version on every host")
    if facts.missing:
        fault = f"cluster.hosts: {host} cannot read {', '.join(facts.missing)}"
        remedy = "copy the directory of PACELINE_TLS to the same path there, or set cluster.tls=off"
        raise InputError(f"{fault}; {remedy}")
    return facts
