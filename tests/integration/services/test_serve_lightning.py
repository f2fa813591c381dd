"""Nights of own Lightning code: a deployment whose runs take the code as it is, and one series while that changes."""

import json
import shutil

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.flows.compare import compare_runs
from tests.support.deployments import Served
from tests.support.nights import repeat
from tests.support.own_lightning import PACKAGE, SMALL

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

EXPERIMENT = "own-nights"


@pytest.fixture
def code(tmp_path):
    """A copy of the example, as its author has it."""
    return shutil.copytree(PACKAGE, tmp_path / "text")


@pytest.fixture
def own(code, tmp_path):
    """Arguments of a command that trains it."""
    settings = [*SMALL, f"data.init_args.directory={tmp_path / 'data'}", "speedup.baseline=none"]
    return [str(code / "config.yaml"), "--code", str(code), *settings, f"track.experiment={EXPERIMENT}"]


@pytest.fixture
def served(own, paceline, prefect_url):
    process = paceline("serve", *own, "--cron", "0 2 * * *", "--timezone", "UTC", PREFECT_RUNNER_POLL_FREQUENCY="1")
    yield Served(prefect_url, "config", process, flow="paceline-lightning")
    process.terminate()
    process.communicate(timeout=60)


def run_of(client, flow_run):
    """The only MLflow run of a flow run."""
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{flow_run}'")
    assert run.info.status == "FINISHED"
    return run


def spoil(code):
    """A change of the code that gives it one more argument, and after which it learns nothing."""
    path = code / "prose" / "gpt.py"
    text = path.read_text()
    for before, after in (
        ('return {"loss": loss}', 'return {"loss": 0 * loss}'),
        ("num_new_bytes: int = 32,", "num_new_bytes: int = 32, num_old_bytes: int = 32,"),
    ):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_change_of_the_code_stays_in_its_series_and_raises_an_alarm(served, own, code, paceline, prefect_url):
    client = MlflowClient(Environment().tracking_uri)
    flow_run = served.begin_with()
    state = served.end_of(flow_run)
    assert state["type"] == "COMPLETED", state
    first = run_of(client, flow_run)
    assert first.data.tags["paceline.regression"] == "none"
    assert "0 comparable runs before it" in first.data.tags["paceline.regression_text"]
    assert first.data.tags["prefect.deployment_name"] == "config"
    assert first.data.tags["paceline.view"]
    repeat(client, first.info.run_id, 7)

    process = paceline("run", *own, "--json")  # by hand, on the same code
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    assert client.get_run(summary["run_id"]).data.tags["paceline.series"] == first.data.tags["paceline.series"]
    assert "val_loss" in summary["regression"]["text"]
    assert "val_loss" not in client.get_run(summary["run_id"]).data.tags["paceline.regression"]
    _, same = compare_runs(Environment(), [first.info.run_id, summary["run_id"]], None, None).runs
    assert same.match.matches, same.match

    spoil(code)
    flow_run = served.begin_with()
    state = served.end_of(flow_run)
    assert state["type"] == "COMPLETED", state
    worse = run_of(client, flow_run)
    assert worse.data.tags["paceline.series"] == first.data.tags["paceline.series"]
    assert "val_loss" in worse.data.tags["paceline.regression"]
    text = worse.data.tags["paceline.regression_text"]
    assert "above the" in text
    assert "packages directory (code " in text, "it names what has changed"
    _, other = compare_runs(Environment(), [first.info.run_id, worse.info.run_id], None, None).runs
    assert "packages" in other.why_no_ratio
    assert worse.data.tags["paceline.workload"] != first.data.tags["paceline.workload"]

    planted = served.end_of(served.begin_with(lightning={"code": "/tmp"}))
    assert planted["type"] == "FAILED"
    assert "/tmp is not code that a run which Prefect starts may import" in planted["message"]
    shutil.rmtree(code)
    gone = served.end_of(served.begin_with())
    assert gone["type"] == "FAILED"
    assert f"--code {code} is no directory" in gone["message"]
