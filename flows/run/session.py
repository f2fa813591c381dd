"""The session of a run: its checks, its cluster and its MLflow run, which the stages share, and what follows them."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from prefect import get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks import preflight
from paceline.flows.checks.prestart import OpenCluster, cluster_for_run
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.mlflow_run import open_run
from paceline.flows.lifecycle.outage import publish
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.lifecycle.promotion import promote
from paceline.flows.run import history
from paceline.flows.run.confirmation import confirm_regression
from paceline.flows.run.outcome import FinishedRun, Outcome
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.errors import InputError
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.report.summary import summary_table
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import TrainJob


@dataclass
class RunSession:
    """What the stages of a run share: the configuration, a Dask cluster, and the MLflow run that `prepare` opens."""

    check: ClassVar[Callable[..., preflight.PreflightResult]]
    """The check before a session of this kind."""
    config: Config
    environment: Environment
    checked: preflight.PreflightResult
    cluster: OpenCluster
    resume: str | None
    started: float
    _run: ExitStack
    workload: str = ""
    training: TrainJob | None = None
    outcome: FinishedRun | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    """JSON of the run, once it is accounted for; after the session with the confirmation of a regression."""
    _handle: RunHandle | None = None

    @property
    def handle(self) -> RunHandle:
        """The MLflow run. Raises InputError: no data were prepared."""
        if self._handle is None:
            raise InputError("this session has no run yet", hint="prepared = prepare(session)")
        return self._handle

    @property
    def job(self) -> TrainJob:
        """The training, which `prepare` plans for own code, else `train`. Raises InputError: that has not run yet."""
        if self.training is None:
            raise InputError("this session has no training yet", hint="trained = train(session, prepare(session))")
        return self.training

    def open_run(self, workload: str) -> RunHandle:
        """Create the MLflow run, or resume it; the session ends it with its true status."""
        run = open_run("run", self.config, self.environment, self.checked.experiment_id, workload, self.resume)
        self.workload, self._handle = workload, self._run.enter_context(run)
        return self._handle

    def confirm(self) -> None:
        """Do nothing: only a preset can confirm a regression."""


@dataclass
class Session(RunSession):
    """The session of a preset."""

    check = staticmethod(preflight.check)
    outcome: Outcome | None = None
    starts: FurtherStarts = field(default_factory=FurtherStarts)

    def confirm(self) -> None:
        """Confirm a regression, if the settings ask for that; the summary has the confirmation then."""
        assert self.outcome is not None
        self.summary = confirm_regression(self.outcome, self.job, self.cluster.address, self.handle, self.summary)


class OwnSession(RunSession):
    """The session of own Lightning code."""

    check = staticmethod(preflight.check_lightning)


Kind = TypeVar("Kind", bound=RunSession)


@contextmanager
def open_session(kind: type[Kind], config: Config, resume: str | None = None) -> Iterator[Kind]:
    """Check a configuration, and open its cluster; inside a Prefect flow. The MLflow run ends with the body.

    After a run that was accounted for, the registered model is promoted, and a regression is reported. Presets confirm
    it first, if the settings ask for that.

    Raises:
        InputError: a setting does not fit this machine; nothing was started.
        RegressionError: the run got worse than those before it, and `track.on_regression` is `fail`.
    """
    started, environment = time.monotonic(), Environment()
    checked = preflight.result_of(kind.check, config, environment)
    cancel_older()  # only now: a refused run must not cancel its predecessor
    tls = choose_tls(config.cluster)
    get_run_logger().info("cluster.tls=%s: %s", tls.value, tls.reason)
    with cluster_for_run(config, checked.plan, environment) as cluster:
        checked = preflight.confirm_on_cluster(config, checked, cluster.address)
        with ExitStack() as run:
            made = kind(config, environment, checked, cluster, resume, started, run)
            yield made
        if (outcome := made.outcome) is None:
            return
        # Only now: a run that is KILLED has no champion.
        promote(made.summary["registered"], made.handle, get_run_logger())
        made.confirm()
    publish(summary_table(made.summary), "summary", "What the run achieved and how fast")
    mlflow_views.link(made.summary["view"], "This run among those like it")
    history.report_regression(outcome, made.summary)
