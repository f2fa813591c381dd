"""Metrics of a site for Prometheus, read from MLflow at each request."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.files import nearest_existing
from paceline.tasks.names import Metric, Tag
from paceline.tasks.track.queries import MAX_RUNS, FoundRun, find_runs
from paceline.tasks.track.store import existing_client

NO_REGRESSION = ("none", "accepted", "disturbed", "not comparable")  # values of the tag
NEWEST = f"among the newest {MAX_RUNS} of an experiment"
VALUES = {
    "paceline_speedup_ratio": (Metric.SPEEDUP, "Speedup of the newest finished run over its baseline"),
    "paceline_recovery_seconds": (Metric.RECOVERY_SECONDS, "Longest recovery of the newest run that had a failure"),
}


class SiteCollector(Collector):
    """Collects the metrics of a site's runs and disk; of a store that does not answer, only that it is away."""

    def __init__(self, site: Environment) -> None:
        self._site = site

    def collect(self) -> Iterator[GaugeMetricFamily]:  # noqa: D102
        disk = GaugeMetricFamily("paceline_free_bytes", "Free disk space for PACELINE_HOME", labels=["home"])
        disk.add_metric([str(self._site.root)], shutil.disk_usage(nearest_existing(self._site.root)).free)
        up = GaugeMetricFamily("paceline_store_up", "Whether the MLflow store answers")
        uri = self._site.tracking_uri
        try:
            names = [experiment.name for experiment in existing_client(uri).search_experiments()]
            yield from run_metrics({name: find_runs(uri, name, f"tags.`{Tag.ROLE}` != ''") for name in names})
            up.add_metric([], 1)
        except InputError as error:
            logging.getLogger(__name__).warning("%s", error)
            up.add_metric([], 0)
        yield from (disk, up)


def run_metrics(runs: Mapping[str, Sequence[FoundRun]]) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of runs, given by experiment, the newest first."""
    states = GaugeMetricFamily("paceline_runs", f"Runs by state, {NEWEST}", labels=["experiment", "role", "state"])
    regressions = GaugeMetricFamily("paceline_regressions", f"Runs that regressed, {NEWEST}", labels=["experiment"])
    families = {name: GaugeMetricFamily(name, text, labels=["experiment", "run"]) for name, (_, text) in VALUES.items()}
    for experiment, its_runs in runs.items():
        for (role, state), number in Counter((run.tags[Tag.ROLE], run.status.lower()) for run in its_runs).items():
            states.add_metric([experiment, role, state], number)
        num_worse = sum(run.tags.get(Tag.REGRESSION, "none") not in NO_REGRESSION for run in its_runs)
        regressions.add_metric([experiment], num_worse)
        for name, (metric, _) in VALUES.items():
            newest = {run.name: run.metrics[metric] for run in reversed(its_runs) if metric in run.metrics}
            for label, value in newest.items():
                families[name].add_metric([experiment, label], value)
    yield from (states, regressions, *families.values())
