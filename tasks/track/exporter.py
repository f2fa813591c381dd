"""Metrics of a site for Prometheus, read from MLflow at each request."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.files import nearest_existing
from paceline.tasks.names import Metric, Tag
from paceline.tasks.track.queries import MAX_RUNS, FoundRun, find_runs
from paceline.tasks.track.store import existing_client

logger = logging.getLogger(__name__)

NEWEST = f"of the newest {MAX_RUNS} runs of an experiment"
VALUES = {
    "paceline_speedup_ratio": (Metric.SPEEDUP, "Speedup over its baseline, of the newest finished run"),
    "paceline_recovery_seconds": (
        Metric.RECOVERY_SECONDS,
        "Longest recovery from a failure, of the newest run with one",
    ),
}


class SiteCollector(Collector):
    """Collects the metrics of the runs and of the disk.

    Args:
        site: Names the store and PACELINE_HOME.
    """

    def __init__(self, site: Environment) -> None:
        self._site = site

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics; of a store that cannot be reached only that it is away."""
        disk = GaugeMetricFamily("paceline_free_bytes", "Free disk space under PACELINE_HOME", labels=["home"])
        disk.add_metric([str(self._site.root)], shutil.disk_usage(nearest_existing(self._site.root)).free)
        yield disk
        try:
            runs = self._find_runs()
        except InputError as error:
            logger.warning("%s", error)
            runs = None
        yield GaugeMetricFamily("paceline_store_up", "Whether the MLflow store answers", value=float(runs is not None))
        if runs is not None:
            yield from run_metrics(runs)

    def _find_runs(self) -> dict[str, list[FoundRun]]:
        uri = self._site.tracking_uri
        names = [experiment.name for experiment in existing_client(uri).search_experiments()]
        return {name: find_runs(uri, name, f"tags.`{Tag.ROLE}` != ''") for name in names}


def run_metrics(runs: dict[str, list[FoundRun]]) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of runs, given by experiment, the newest first."""
    states = GaugeMetricFamily("paceline_runs", f"Number by state, {NEWEST}", labels=["experiment", "role", "state"])
    regressions = GaugeMetricFamily("paceline_regressions", f"Number {NEWEST} that regressed", labels=["experiment"])
    for experiment, found in runs.items():
        for (role, status), number in sorted(Counter((run.tags[Tag.ROLE], run.status) for run in found).items()):
            states.add_metric([experiment, role, status.lower()], number)
        unlike = ("none", "accepted", "disturbed", "not comparable")
        regressions.add_metric([experiment], sum(run.tags.get(Tag.REGRESSION, "none") not in unlike for run in found))
    yield from (states, regressions)
    for name, (metric, text) in VALUES.items():
        family = GaugeMetricFamily(name, text, labels=["experiment", "run"])
        for experiment, found in runs.items():
            newest = {run.name: run.metrics[metric] for run in reversed(found) if metric in run.metrics}
            for run_name, value in newest.items():
                family.add_metric([experiment, run_name], value)
        yield family


def site_registry(site: Environment) -> CollectorRegistry:
    """The registry of prometheus_client with the metrics of a site."""
    registry = CollectorRegistry()
    registry.register(SiteCollector(site))
    return registry
