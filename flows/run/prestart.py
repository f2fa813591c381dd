"""What a run needs and takes seconds to start, begun before its flow: the cluster, and on it processes for the ranks.

They start while the rest of the run's input is checked and the engines are imported. A flow that nothing was begun
for, as in a deployment, opens its own cluster. Only clusters of this host are begun: others are not this run's alone,
or have to be waited for. Prefect's temporary API is begun as early, see `preflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks import preflight
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.lifecycle import prefect_api
from paceline.flows.lifecycle import prefect_api as temporary_api
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.cluster.start import Opening, open_cluster
from paceline.tasks.records import Plan
from paceline.tasks.train.launch.placement import prepare_seats


@dataclass(frozen=True)
class OpenCluster:
    """A cluster that is there."""

    address: str
    """Of its scheduler."""
    release: Callable[[], None]
    """Say that it is not needed any more, so that it may end beside what comes."""


class Prestart:
    """Checks a run that is to be, and begins what it needs; ends that with the body.

    Args:
        config: of the run.
        site: this machine's facts.
    """

    def __init__(self, config: Config, site: Environment) -> None:
        self._config = config
        self._site = site
        self._opening: Opening | None = None
        self._cleared: PreflightResult | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.reset(self._token)
        temporary_api.stop_unused_api()
        if self._opening is not None:
            with suppress(Exception) if error is not None else nullcontext():  # the first error is the one to tell
                self._opening.close()

    def check(self) -> None:
        """Check the run, and begin meanwhile what its input has been checked for.

        Raises:
            InputError: one line with the value, the rule and the fix.
        """
        self._cleared = preflight.check(self._config, self._site, self)

    def begin_api(self) -> None:
        """Begin Prefect's temporary API, where there is no server."""
        prefect_api.prepare_api(self._site)

    def begin_cluster(self, plan: Plan) -> None:
        """Begin the cluster, if it is one of this host."""
        config = self._config
        if not config.cluster.is_this_host:
            return
        demand = demand_of([config.execution], plan.accelerator)
        with defer_signals():  # or nobody would know what is to be closed
            self._opening = Opening(
                config.cluster, demand, self._site, lambda address: prepare_seats(address, config, plan)
            )

    def cleared(self, config: Config) -> PreflightResult | None:
        """What the checks of a configuration have found; None if they were of another one."""
        return self._cleared if config == self._config else None

    def cluster(self, config: Config) -> OpenCluster | None:
        """The cluster that was begun for a configuration, once it is there; None if there is none."""
        if self._opening is None or config != self._config:
            return None
        return OpenCluster(self._opening.address(), self._opening.release)


_current: ContextVar[Prestart | None] = ContextVar("ahead", default=None)


def preflight_result(config: Config, site: Environment) -> PreflightResult:
    """What the checks find, or have found just before.

    Raises:
        InputError: one line with the value, the rule and the fix.
    """
    ahead = _current.get()
    return (ahead and ahead.cleared(config)) or preflight.check(config, site)


@contextmanager
def cluster_for_run(config: Config, plan: Plan, site: Environment) -> Iterator[OpenCluster]:
    """The cluster that was begun for a run, or a new one that ends with the body."""
    ahead = _current.get()
    begun = ahead and ahead.cluster(config)
    if begun:
        yield begun
        return
    with open_cluster(config.cluster, demand_of([config.execution], plan.accelerator), site) as address:
        yield OpenCluster(address, lambda: None)
