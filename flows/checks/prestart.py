"""Starts Prefect's temporary API, and a cluster of this host with its rank processes, while a run is being checked.

A flow without a prestart, as in a deployment, opens its own cluster.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.origin import FLOW_RUN
from paceline.flows.lifecycle import prefect_api
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.cluster.kinds import Opening, open_cluster
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.host import process_seconds
from paceline.tasks.records.execution import Plan
from paceline.tasks.train.launch.placement import prepare_seats


@dataclass(frozen=True)
class OpenCluster:
    """A cluster that runs."""

    address: str
    release: Callable[[], None]  # let the cluster end in the background: no stage needs it any more


class Prestart:
    """Starts parts of a run as soon as its checks allow, and ends them with the body."""

    def __init__(self, config: Config, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._opening: Opening | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.reset(self._token)
        prefect_api.stop_unused_api()
        if self._opening is not None:
            with suppress(Exception) if error is not None else nullcontext():  # report the first error
                self._opening.close()

    def start_api(self) -> None:
        """Start Prefect's temporary API, if there is no server."""
        prefect_api.prepare_api(self._environment)

    def start_cluster(self, plan: Plan) -> None:
        """Start the cluster, if it is one of this host."""
        config = self._config
        if not config.cluster.is_this_host:
            return
        demand = demand_of([config.execution], plan.accelerator)
        with defer_signals():  # a signal in between would leave the cluster without an owner
            self._opening = Opening(
                config.cluster, demand, self._environment, lambda address: prepare_seats(address, config, plan)
            )

    def cluster(self, config: Config) -> OpenCluster | None:
        """Wait for the cluster that was started for this configuration; None if none was."""
        if self._opening is None or config != self._config:
            return None
        return OpenCluster(self._opening.address(), self._opening.release)


_current: ContextVar[Prestart | None] = ContextVar("prestart", default=None)


def cold_seconds() -> float | None:
    """Seconds since the start of this run's process; None where that may have had other work before."""
    is_fresh = _current.get() is not None or FLOW_RUN in os.environ
    return process_seconds() if is_fresh else None


@contextmanager
def cluster_for_run(config: Config, plan: Plan, environment: Environment) -> Iterator[OpenCluster]:
    """The cluster that was started for a run, or a new one that ends with the body."""
    prestart = _current.get()
    started = prestart and prestart.cluster(config)
    if started:
        yield started
        return
    with open_cluster(config.cluster, demand_of([config.execution], plan.accelerator), environment) as address:
        yield OpenCluster(address, lambda: None)
