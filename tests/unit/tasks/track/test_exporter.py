import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from paceline.conf.environment import Environment
from paceline.flows.commands.operations import metrics
from paceline.tasks.track.exporter import SiteCollector, run_metrics
from paceline.tasks.track.queries import FoundRun
from tests.support.refusals import refused

DASHBOARD = Path(__file__).parents[4] / "infra" / "grafana.json"


def found(number, status="FINISHED", regression="none", name="digits", **metrics):
    return FoundRun(
        run_id=str(number),
        name=name,
        status=status,
        start_time=number,
        metrics={key.replace("_", "/", 1): value for key, value in metrics.items()},
        tags={"paceline.role": "run", "paceline.regression": regression},
    )


def values(runs):
    families = run_metrics({"nights": sorted(runs, key=lambda run: -run.start_time)})
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_the_newest_run_of_a_name_is_exported():
    runs = [
        found(1, speedup_ratio=1.5, recovery_seconds=3.0),
        found(2, speedup_ratio=2.0),
        found(3, "FAILED"),
        found(4, regression="throughput", name="faces", speedup_ratio=4.0),
        found(5, regression="accepted"),
        found(6, regression="disturbed"),
    ]
    assert values(runs) == {
        ("paceline_runs", "nights", "run", "finished"): 5,
        ("paceline_runs", "nights", "run", "failed"): 1,
        ("paceline_regressions", "nights"): 1,
        ("paceline_speedup_ratio", "nights", "digits"): 2.0,
        ("paceline_speedup_ratio", "nights", "faces"): 4.0,
        ("paceline_recovery_seconds", "nights", "digits"): 3.0,
    }


def test_the_dashboard_asks_for_metrics_that_are_exported_and_shows_all(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    of_the_site = list(SiteCollector(Environment()).collect())
    assert {one.value for family in of_the_site for one in family.samples if one.name == "paceline_store_up"} == {0}
    assert list(tmp_path.iterdir()) == [], "to ask creates no store"
    families = [*of_the_site, *run_metrics({})]
    asked = set(re.findall(r"\bpaceline_\w+", json.dumps(json.loads(DASHBOARD.read_text())["panels"])))
    assert asked == {family.name for family in families}


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "192.0.2.1:9464"])
def test_an_address_that_cannot_be_listened_on_is_refused(address):
    with refused("--listen", address):
        metrics.execute(Namespace(listen=address, json=False))
