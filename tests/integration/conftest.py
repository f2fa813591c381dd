import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import new_job, two_workers
from tests.support.mlflow_server import MlflowServer
from tests.support.outputs import told_by
from tests.support.own_lightning import PACKAGE
from tests.support.own_lightning import SMALL as SMALL_OWN
from tests.support.prefect_server import prefect_server
from tests.support.services import started

SMALL = [
    "data.image_size=16",
    "model.width=4",
    "model.depth=1",
    "recipe.batch_size=64",
    "recipe.batch_scaling=strong",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "execution.precision=32-true",
    "speedup.baseline=none",
]


@pytest.fixture(scope="session")
def cluster_address():
    """A cluster of two workers, joined by address."""
    with two_workers() as address:
        yield address


@pytest.fixture(scope="session")
def make_job(cluster_address):
    """Builds a small training job on the digits, with a real MLflow run of its own."""

    def make(*overrides, preset="digits", address=cluster_address):
        return new_job(address, preset, [*SMALL, *overrides])

    return make


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory):
    """A real Prefect server on a free port."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    """A real MLflow server, running."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def program():
    """Starts the program `paceline` in a process of its own. It takes Ctrl-C also where the tests do not, as in a
    shell's background.
    """
    path = str(Path(sys.executable).with_name("paceline"))

    def start(*arguments, start_new_session=False, output=subprocess.PIPE, **environment):
        return subprocess.Popen(
            ["env", "--default-signal=INT", path, *arguments],
            stdout=output,
            stderr=output,
            text=True,
            env=os.environ | environment,
            start_new_session=start_new_session,
        )

    return start


@pytest.fixture(scope="session")
def paceline(program, prefect_url):
    """The same, against the Prefect server."""

    def start(*arguments, **options):
        return program(*arguments, **{"PREFECT_API_URL": prefect_url} | options)

    return start


@pytest.fixture(scope="session")
def call(paceline):
    """Calls the program, which must succeed; the JSON on its stdout."""

    def to_the_end(*arguments, **environment):
        process = paceline(*map(str, arguments), "--json", **environment)
        out, said = process.communicate(timeout=280)
        assert process.returncode == 0, said
        return told_by(arguments[0], out)

    return to_the_end


@pytest.fixture
def call_own(paceline, mlflow_server, tmp_path):
    """Calls the program with a copy of the example of own Lightning code; the JSON on its stdout, and what it said."""
    code = shutil.copytree(PACKAGE, tmp_path / "code")

    def to_the_end(command, *arguments, status=0):
        data = f"data.init_args.directory={tmp_path / 'data'}"
        own = [str(code / "config.yaml"), "--code", str(code), *SMALL_OWN, data]
        process = paceline(command, *own, *arguments, "--json", MLFLOW_TRACKING_URI=mlflow_server.url)
        out, said = process.communicate(timeout=280)
        assert process.returncode == status, said
        return told_by(command, out), said

    return to_the_end


@pytest.fixture(scope="session")
def service_set():
    """All that infra/up starts."""
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def services(service_set):
    """The same, running, whatever another module has done to it."""
    again = service_set.up()
    assert again.returncode == 0, again.stderr
    return service_set
