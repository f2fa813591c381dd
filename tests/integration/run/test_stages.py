"""The Python interface: a run as a function, and the flow of guides/compose.md with a user's own steps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
import torch
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

import paceline
from paceline.tasks.errors import InputError
from tests.support.documents import ROOT, fences
from tests.support.own_lightning import PACKAGE

SHORT = ["recipe.num_epochs=1", "speedup.baseline=none", "model.width=4"]
BLOCKS = [fence.body for fence in fences(ROOT / "infra/docs/guides/compose.md") if fence.language == "python"]


def test_public_names_are_imported_on_their_first_use():
    code = "import sys, paceline; print([name for name in ('prefect', 'torch', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {name: getattr(paceline, name).__name__ for name in paceline.__all__} == dict(
        zip(paceline.__all__, paceline.__all__, strict=True)
    )
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = paceline.missing


def test_own_lightning_code_is_no_preset():
    config = paceline.load("digits").model_copy(
        update={"lightning": paceline.load("digits").lightning.model_copy(update={"settings": {"model": {}}})}
    )
    with pytest.raises(InputError, match="takes presets") as refusal:
        paceline.run(config)
    assert "run_own" in refusal.value.hint
    with pytest.raises(InputError, match="takes presets") as refusal, paceline.session(config):
        pass
    assert "own_session" in refusal.value.hint


SHOW_RESULTS = """
import asyncio
from paceline.flows.lifecycle.mlflow_views import link
from paceline.flows.lifecycle.outage import publish
from prefect import flow
from prefect.runtime import flow_run

@flow
async def show_results():
    publish([("accuracy", "0.9")], "summary", "What the run achieved")
    link("http://127.0.0.1:5000", "Similar runs")
    print(flow_run.get_id())

asyncio.run(show_results())
"""


def test_an_asynchronous_flow_shows_its_results_in_prefect(prefect_url, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    script = tmp_path / "show_results.py"
    script.write_text(SHOW_RESULTS)
    done = start(script, home=tmp_path)
    assert done.returncode == 0, done.stderr
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(done.stdout.strip())]))
        artifacts = client.read_artifacts(flow_run_filter=mine)
    assert {one.key: one.description for one in artifacts} == {
        "summary": "What the run achieved",
        "mlflow-view": "Similar runs",
    }


@pytest.mark.slow
def test_own_lightning_code_as_a_function(tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    (body,) = [block for block in BLOCKS if "run_own(" in block]
    home = Path(shutil.copytree(PACKAGE.parent / "shapes", tmp_path / "code"))
    shutil.copy(home / "configs" / "perceptron.yaml", home / "config.yaml")
    script = tmp_path / "own_run.py"
    script.write_text(body.replace("max_epochs=1", 'max_epochs=1", "speedup.baseline=none'))
    done = start(script, home=home)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(home)
    assert run.info.status == "FINISHED"
    assert f"{run.data.metrics['test/loss']}" in done.stdout
    assert "not measured: the run had no probe" in done.stdout


@pytest.fixture
def own_flow(tmp_path):
    """The flow of the guide for own Lightning code, and the directory of a small project of LightningCLI."""
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    home = Path(shutil.copytree(PACKAGE.parent / "shapes", tmp_path / "code"))
    shutil.copy(home / "configs" / "perceptron.yaml", home / "config.yaml")
    (body,) = [block for block in BLOCKS if "def copy_checkpoint" in block]
    script = tmp_path / "flow_of_mine.py"  # not in the directory of code, which must stay the same for a resume
    script.write_text(body)
    return script, home


OWN_SHORT = ["trainer.max_epochs=1", "speedup.baseline=none"]


@pytest.mark.slow
def test_a_flow_of_own_code_has_a_step_of_the_user(own_flow):
    script, home = own_flow
    done = start(script, home / "copied.ckpt", *OWN_SHORT, home=home)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(home)
    assert run.info.status == "FINISHED"
    assert torch.load(home / "copied.ckpt", weights_only=True)["state_dict"]
    assert f"copied.ckpt has a loss of {run.data.metrics['test/loss']:.3f}. not measured" in done.stdout


@pytest.mark.slow
def test_an_own_step_that_fails_fails_the_run_of_own_code_and_a_resume_repeats_no_training(own_flow):
    script, home = own_flow
    done = start(script, home / "missing" / "copied.ckpt", *OWN_SHORT, home=home)
    assert done.returncode == 1
    (run,) = runs_of(home)
    assert run.info.status == "FAILED"
    script.write_text(script.read_text().replace('code="."', f'code=".", resume="{run.info.run_id}"'))
    done = start(script, home / "copied.ckpt", *OWN_SHORT, home=home)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(home)
    assert run.info.status == "FINISHED"
    assert "The training has finished before" in done.stderr


def start(script, *arguments, home):
    environment = os.environ | {"PACELINE_HOME": str(home / "state")}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)


def runs_of(home):
    client = MlflowClient(f"sqlite:///{home / 'state' / 'mlflow.db'}")
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


@pytest.mark.slow
def test_the_flow_of_the_guide_exports_and_notifies(tmp_path):
    (body,) = [block for block in BLOCKS if "def export" in block]
    script = tmp_path / "own_flow.py"
    script.write_text(body)
    done = start(script, tmp_path / "exported.pt", *SHORT, home=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert (tmp_path / "exported.pt").stat().st_size > 1000
    assert f"has an accuracy of {run.data.metrics['test/accuracy']:.3f}. not measured" in done.stdout


@pytest.mark.slow
def test_an_own_step_that_fails_fails_the_run(tmp_path):
    (body,) = [block for block in BLOCKS if "def export" in block]
    script = tmp_path / "own_flow.py"
    script.write_text(body)
    done = start(script, tmp_path / "missing" / "exported.pt", *SHORT, home=tmp_path)
    assert done.returncode == 1
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FAILED"
    assert "test/accuracy" in run.data.metrics


@pytest.mark.slow
def test_a_run_as_a_function(tmp_path):
    (body,) = [block for block in BLOCKS if "summary = run(" in block]
    script = tmp_path / "own_run.py"
    settings = repr(["recipe.num_epochs=1", *SHORT[1:]])
    code = body.replace('["recipe.num_epochs=2"]', settings)
    script.write_text(code + "    print(type(summary).__name__, summary.run_id, summary.speedup.cause)\n")
    done = start(script, home=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(tmp_path)
    assert done.stdout.splitlines()[-1] == f"Summary {run.info.run_id} not measured"
