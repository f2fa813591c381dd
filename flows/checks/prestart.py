"""Starts Prefect's temporary API and a cluster of this host, with its rank processes, while a run is checked.

The run of a deployment opens its own. A process that is started ahead of a run has started them before.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from paceline.conf.cluster import Cluster
from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.origin import FLOW_RUN
from paceline.flows.lifecycle import prefect_api
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks import host
from paceline.tasks.cluster.client import ClusterResources, demand_of
from paceline.tasks.cluster.kinds import Opening, kind_of, open_cluster
from paceline.tasks.cluster.local import LOOPBACK, NANNY_DEFAULTS, NANNY_VARIABLES, num_local_workers
from paceline.tasks.errors import InputError
from paceline.tasks.records.execution import Plan
from paceline.tasks.train.competent import process as competent
from paceline.tasks.train.launch.fork_server import ForkServer
from paceline.tasks.train.launch.layout import rank_environment
from paceline.tasks.train.launch.placement import FIT_MODULE, prepare_seats
from paceline.tasks.train.launch.rank_process import RANK_MODULE, interface_of
from paceline.tasks.train.lightning import child
from paceline.tasks.train.plan import resolve

START_SECONDS = 120.0
was_started_ahead = False  # whether this process was started before its run was known


@dataclass(frozen=True)
class OpenCluster:
    """A cluster that runs."""

    address: str
    release: Callable[[], None]  # let the cluster end in the background: no stage needs it any more


class Prestart:
    """Starts parts of a run as soon as its checks allow, and ends them with the body."""

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self.environment = environment
        self.opening: Opening | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.reset(self._token)
        try:
            if self.opening is not None:
                with suppress(Exception) if error is not None else nullcontext():  # report the first error
                    self.opening.close()
        finally:
            _end_fork_servers()

    def start_fork_server(self, plan: Plan) -> None:
        """Start to import what the ranks of a preset need, long before there is a worker, where ranks are forked."""
        if not competent.is_wanted(self.config.speedup):  # standby processes start that loop early
            _start_fork_server(self.config, plan)

    def start_cluster(self, plan: Plan, *, prepares: bool) -> None:
        """Start the cluster, if it is one of this host; `prepares` if it will prepare data in parallel."""
        config = self.config
        if not config.cluster.is_this_host:
            return
        demand = demand_of([config.execution], plan.accelerator, prepares=prepares)
        with defer_signals():  # a signal in between would leave the cluster without an owner
            self.opening = _take_started(config, demand) or _open(config, plan, demand, self.environment)


_ahead: list[tuple[Cluster, int, Opening]] = []
"""Clusters that were opened before their run is known, with their settings and numbers of workers."""


def open_ahead(config: Config, plan: Plan, environment: Environment, *, pauses: bool = False) -> None:
    """Start to open the cluster of a run before it is known; the next run takes what fits, see `close_ahead`."""
    if _ahead or config.cluster.kind != "local":  # workers of dask-cuda would hold memory of the GPUs
        return
    prepares = config.lightning.has_partitions  # other data are mostly there
    demand = demand_of([config.execution], plan.accelerator, prepares=prepares)
    with defer_signals():
        opening = _open(config, plan, demand, environment, pauses=pauses)
        _ahead.append((config.cluster, num_local_workers(config.cluster, demand), opening))


def close_ahead() -> None:
    """Close the cluster that was opened ahead, if no run has taken it, and the fork server; faults do not matter."""
    while _ahead:
        with suppress(Exception):
            _ahead.pop()[-1].close()
    child.close_waiting()
    _end_fork_servers()


_fork_servers: list[ForkServer] = []
"""The fork server of the run that this process is about to start."""


def start_fork_server(config: Config, environment: Environment) -> ForkServer | None:
    """Start a fork server for the ranks of own Lightning code, and for the process that imports that code.

    None where ranks are not forked. `close_ahead` ends it.
    """
    plan = plan_of(config, environment)
    return None if plan is None else _start_fork_server(config, plan, child.__name__, FIT_MODULE)


def _start_fork_server(config: Config, plan: Plan, answers: str = "", *before: str) -> ForkServer | None:
    """None on GPUs, as CUDA fails after a fork, on other hosts, and where a cluster was opened ahead."""
    if _ahead or config.cluster.kind != "local" or plan.accelerator != "cpu":
        return None
    with suppress(OSError):  # no such socket in a sandbox
        _fork_servers.append(ForkServer(local_rank_environment(plan), RANK_MODULE, answers, *before))
        return _fork_servers[-1]
    return None


def _end_fork_servers() -> None:
    while _fork_servers:
        _fork_servers.pop().end()


def local_rank_environment(plan: Plan) -> dict[str, str]:
    """Environment of the ranks of a local cluster without GPUs, before there is a worker."""
    of_worker = NANNY_DEFAULTS | os.environ | NANNY_VARIABLES
    return rank_environment(of_worker, plan.num_threads, interface_of(LOOPBACK), devices=())


def plan_of(config: Config, environment: Environment) -> Plan | None:
    """The plan of a run on this host before its checks; None where these will refuse it."""
    with suppress(InputError):
        return resolve(config, kind_of(config.cluster).first_host(config, environment), 0)
    return None


def start_ahead(config: Config, plan: Plan, environment: Environment) -> None:
    """Start the API and the cluster of a run before it is known; the next run takes what fits. Returns when they run.

    Raises RunError: one of them does not start.
    """
    api = prefect_api.prepare_api(environment)
    open_ahead(config, plan, environment, pauses=True)
    for *_, opening in _ahead:
        opening.prepared.result()
    if api is not None:
        api.wait(START_SECONDS)


def _open(
    config: Config, plan: Plan, demand: ClusterResources, environment: Environment, *, pauses: bool = False
) -> Opening:
    server = _fork_servers[0].address if _fork_servers else None
    seats = partial(prepare_seats, config=config, plan=plan, fork_server=server)
    return Opening(config.cluster, demand, environment, seats, pauses=pauses)


def _take_started(config: Config, demand: ClusterResources) -> Opening | None:
    """The cluster that was opened ahead, if it is what a run needs; else it ends."""
    while _ahead:
        *conditions, opening = _ahead.pop()
        if conditions == [config.cluster, num_local_workers(config.cluster, demand)]:
            return opening
        opening.close()  # and wait: two at a time would set Dask's settings for each other
    return None


_current: ContextVar[Prestart | None] = ContextVar("prestart", default=None)


def cold_seconds() -> float | None:
    """Seconds since the start of this run's program; None where its process may have had other work before."""
    if was_started_ahead:
        return None
    if FLOW_RUN in os.environ:  # Prefect has started this process for the run
        started = host.process_start()
    else:
        started = host.program_start if _current.get() is not None else None
    return None if started is None else time.clock_gettime(time.CLOCK_BOOTTIME) - started


@contextmanager
def cluster_for_run(config: Config, plan: Plan, environment: Environment) -> Iterator[OpenCluster]:
    """The cluster that was started for a run, or a new one that ends with the body."""
    prestart = _current.get()
    if prestart is not None and prestart.opening is not None and prestart.config == config:
        yield OpenCluster(prestart.opening.address(), prestart.opening.release)
        return
    with open_cluster(config.cluster, demand_of([config.execution], plan.accelerator), environment) as address:
        yield OpenCluster(address, lambda: None)
