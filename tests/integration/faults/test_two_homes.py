"""Two hosts that share a home whose locks do not reach the other host, as on an NFS mount with `nolock`."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from mlflow.tracking import MlflowClient

from paceline.tasks.files import load_result
from paceline.tasks.records.training import TrainResult
from paceline.tasks.train.rank.checkpoint import step_of
from tests.integration.conftest import SMALL
from tests.support.mounts import mounted
from tests.support.patience import until

RUN = [*SMALL, "recipe.num_epochs=60", "execution.checkpoint_steps=4", "execution.num_threads=1"]
EXIT_SECONDS = 300

pytestmark = pytest.mark.slow


@pytest.fixture
def homes(tmp_path):
    """One directory, mounted twice; each mount has locks of its own."""
    if shutil.which("bindfs") is None or os.geteuid() != 0:
        pytest.skip("mounts need bindfs and the rights of root")
    (tmp_path / "export").mkdir()
    with ExitStack() as stack:
        for name in ("one", "two"):
            stack.enter_context(mounted(tmp_path / name, "bindfs", tmp_path / "export"))
        yield tmp_path / "one", tmp_path / "two"


@pytest.fixture
def on_host(prefect_url):
    """Starts the program with a home, on a host of that name."""

    def start(home, *arguments):
        words = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec paceline "$@"', home.name, *arguments]
        places = {"PACELINE_HOME": str(home), "PACELINE_LEASES": f"{home}-leases", "PREFECT_API_URL": prefect_url}
        places["MLFLOW_TRACKING_URI"] = store_of(home)
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | places
        )

    return start


def store_of(home):
    """MLflow's store of both hosts, which SQLite locks."""
    return f"sqlite:///{home.parent}/mlflow.db"


def result_of(run):
    return load_result(run / "trained.json", TrainResult)


def test_a_run_that_another_host_has_resumed_publishes_nothing_more(homes, on_host):
    first_home, second_home = homes
    whole = on_host(first_home, "run", "digits", *RUN)
    said, _ = whole.communicate(timeout=EXIT_SECONDS)
    assert whole.returncode == 0, said
    (undisturbed,) = first_home.glob("runs/*")

    first = on_host(first_home, "run", "digits", *RUN)

    def newest():
        runs = [run for run in first_home.glob("runs/*") if run.name != undisturbed.name]
        return [path for run in runs for path in run.glob("checkpoints/step-*.ckpt")]

    run = until(newest, "checkpoint", process=first)[0].parents[1]
    second = on_host(second_home, "run", "--resume", run.name)
    first_said, _ = first.communicate(timeout=EXIT_SECONDS)
    second_said, _ = second.communicate(timeout=EXIT_SECONDS)
    for line in f"{first_said}{second_said}".splitlines():
        if "WARNING" in line or "ERROR" in line:
            sys.stdout.write(f"{line}\n")

    assert second.returncode == 0, second_said
    assert first.returncode != 0, first_said
    assert re.search("was superseded by attempt-|another process has started attempt-", first_said)
    assert result_of(run).losses == result_of(undisturbed).losses
    assert result_of(run).first_step >= 4
    assert step_of(max(run.glob("checkpoints/step-*.ckpt"))) == result_of(run).num_steps
    assert MlflowClient(store_of(first_home)).get_run(run.name).info.status == "FINISHED"
