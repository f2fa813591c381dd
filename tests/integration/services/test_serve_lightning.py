"""Nights of own Lightning code: a deployment whose runs take the code as it is, and one series while that changes."""

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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_is_a_run_of_the_code_as_it_is_and_of_no_other(served, code):
    flow_run = served.begin_with()
    state = served.end_of(flow_run)
    assert state["type"] == "COMPLETED", state
    client = MlflowClient(Environment().tracking_uri)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment], f"tags.`prefect.flow_run_id` = '{flow_run}'")
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.deployment_name"] == "config"
    assert run.data.tags["paceline.regression"] == "none"
    assert run.data.tags["paceline.regression_text"].startswith("0 comparable runs before it")
    assert run.data.tags["paceline.series"]
    assert "viewStateShareKey" in run.data.tags["paceline.view"]
    planted = served.end_of(served.begin_with(lightning={"code": "/tmp"}))
    assert planted["type"] == "FAILED"
    assert "/tmp is not code that a run which Prefect starts may import" in planted["message"]
    shutil.rmtree(code)
    gone = served.end_of(served.begin_with())
    assert gone["type"] == "FAILED"
    assert f"--code {code} is no directory" in gone["message"]


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
def test_a_change_of_the_code_stays_in_its_series_and_raises_an_alarm(call, own, code):
    client = MlflowClient(Environment().tracking_uri)
    first = call("run", *own)
    assert first["regression"]["verdict"] == "too few runs"
    repeat(client, first["run_id"], 7)
    spoil(code)
    worse = call("run", *own)
    judged = worse["regression"]
    assert judged["verdict"] == "regression", judged
    change = next(change for change in judged["changes"] if change["name"] == "val_loss")
    assert change["value"] > change["limit"] > change["expected"]
    assert "above the" in judged["text"]
    assert "packages directory (code " in judged["text"], "it names what has changed"
    tags = [client.get_run(run["run_id"]).data.tags for run in (first, worse)]
    assert tags[0]["paceline.series"] == tags[1]["paceline.series"]
    assert "val_loss" in tags[1]["paceline.regression"]
    assert tags[0]["paceline.workload"] != tags[1]["paceline.workload"]
    copied = client.search_runs([client.get_run(first["run_id"]).info.experiment_id], "attributes.run_name = 'night 2'")
    runs = [first["run_id"], copied[0].info.run_id, worse["run_id"]]
    _, same, other = compare_runs(Environment(), runs, None, None).runs
    assert same.match.matches, same.match
    assert "packages" in other.why_no_ratio
