"""Several processes that create one store of MLflow, and processes that are killed while they create it."""

import fcntl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.support.paceline_ui import paceline_ui
from tests.support.patience import until

CHECK = "import sys; from paceline.tasks.track.store import check_store; check_store(sys.argv[1], 'many', None)"
MLFLOW_ALONE = "import sys; from mlflow.tracking import MlflowClient; MlflowClient(sys.argv[1])"
WAIT = """
import pathlib, sys, time
{imports}
file = pathlib.Path(sys.argv[1].removeprefix("sqlite:///"))
print("ready", flush=True)
while not file.exists():
    time.sleep(0.001)
time.sleep(0.3)
{work}
"""
SEARCH = WAIT.format(
    imports="from paceline.tasks.track.queries import find_runs",
    work="find_runs(sys.argv[1], 'many')",
)
LOOK = WAIT.format(imports="from paceline.tasks.track.store import server_version", work="server_version(sys.argv[1])")
SECONDS = 120
LOCKS = Path("/proc/locks")


@pytest.fixture
def start():
    """Starts Python code in a process of its own; those still running at the end are killed."""
    processes = []

    def start(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def size_of_all(directory):
    """Bytes of its files, of which some go away again."""
    size = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def end(process):
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said


def waits_for_a_lock(process):
    return any(
        line.split()[1] == "->" and line.split()[5] == str(process.pid) for line in LOCKS.read_text().splitlines()
    )


def test_a_store_is_created_by_one_process_at_a_time(start, tmp_path):
    with (tmp_path / "mlflow.db.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = start(CHECK, f"sqlite:///{tmp_path}/mlflow.db")
        until(lambda: waits_for_a_lock(second), "second process at the lock", process=second)
        assert not (tmp_path / "mlflow.db").exists()
    end(second)


@pytest.mark.slow
def test_readers_never_meet_half_a_store(start, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    readers = [start(code, uri) for code in (SEARCH, LOOK)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for process in [start(CHECK, uri) for _ in range(3)] + readers:
        end(process)
    assert MlflowClient(uri).get_experiment_by_name("many") is not None
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.parametrize(
    ("creator", "num_bytes"),
    [
        pytest.param(CHECK, 1, id="at once", marks=pytest.mark.slow),
        pytest.param(CHECK, 200_000, id="midway"),
        pytest.param(MLFLOW_ALONE, 100_000, id="mlflow", marks=pytest.mark.slow),
        pytest.param(MLFLOW_ALONE, 300_000, id="mlflow, later", marks=pytest.mark.slow),
    ],
)
def test_a_store_whose_creation_was_killed_is_created_again(start, tmp_path, creator, num_bytes):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    killed = start(creator, uri)
    until(lambda: size_of_all(tmp_path) >= num_bytes, "some of the store", every=0.01)
    killed.kill()
    killed.communicate()
    end(start(CHECK, uri))
    assert MlflowClient(uri).get_experiment_by_name("many") is not None


@pytest.mark.slow
def test_the_ui_and_a_run_create_one_store(start, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    processes = [start(CHECK, uri) for _ in range(2)]
    with paceline_ui(tmp_path, tmp_path / "ui.log", MLFLOW_TRACKING_URI=uri):
        for process in processes:
            end(process)
    assert MlflowClient(uri).get_experiment_by_name("many") is not None
