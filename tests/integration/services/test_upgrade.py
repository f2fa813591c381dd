"""An upgrade from an older commit with older databases, which carries over all that it can and names the rest."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from mlflow.tracking import MlflowClient

from infra.services.site import Site
from tests.integration.conftest import SMALL
from tests.support.patience import until
from tests.support.services import PORTS, ROOT, Services, passable_directory

OLD = "c72c08145c31"
"""A commit before services were declared, whose set infra/upgrade takes over."""
PORTS_OF_OLD = PORTS[:-1]
LONG = ["recipe.num_epochs=400", "recipe.schedule=constant", "recipe.warmup_epochs=0", "execution.loading=resident"]


class OldSet(Services):
    """The services of an older commit, by its own scripts."""

    def __init__(self, home, code):
        super().__init__(home, 1, PORTS_OF_OLD)
        self.code = code

    def command(self, name, *arguments):
        return subprocess.run(
            [self.code / "infra" / name, "--home", self.home.root, *arguments],
            env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": f"{self.code}/infra/src"},
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, *arguments):
        """`paceline` of the older commit."""
        path = {"PYTHONPATH": f"{self.code}/infra/src:{self.code}"}
        command = [sys.executable, "-m", "paceline.flows.cli", *arguments]
        with (self.code / "run.log").open("ab") as log:
            return subprocess.Popen(
                command, env=os.environ | path | self.environment(), stdout=log, stderr=log, start_new_session=True
            )


@pytest.fixture
def old(monkeypatch):
    """A set of the older commit, running."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", OLD], capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the clone has no commit {OLD}")
    with passable_directory() as place:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as file:
            file.extractall(place / "old", filter="data")
        monkeypatch.setenv("PACELINE_HOME", str(place / "paceline"))
        made = OldSet(place / "paceline" / "services", place / "old")
        try:
            started = made.up()
            assert started.returncode == 0, started.stderr
            yield made
        finally:
            made.down()


def downgrade(site):
    """Databases as one revision of their schemas before; their servers do not run."""
    one_back = ["-m", "prefect", "server", "database", "downgrade", "-y", "-r", "-1"]
    environment = site.environment(site["prefect"])
    subprocess.run([sys.executable, *one_back], env=environment, check=True, capture_output=True)
    script = "import os, mlflow.store.db.utils as u; from alembic import command; "
    script += "command.downgrade(u._get_alembic_config(os.environ['MLFLOW_BACKEND_STORE_URI']), '-1')"
    environment = site.environment(site["mlflow"])
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    site.home.keep(site.settings.model_copy(update={"versions": {"prefect": "3.8.0", "mlflow": "3.17.0"}}))


def deploy(known, name, parameters):
    """A deployment of a run, as an older version has left it."""
    user = tuple(known["PREFECT_API_AUTH_STRING"].split(":"))
    with httpx.Client(base_url=known["PREFECT_API_URL"], auth=user, timeout=30) as client:
        flow = client.post("/flows/", json={"name": "paceline-run"}).raise_for_status().json()
        entrypoint = "paceline.flows.run.flow.run_pipeline"
        body = {"name": name, "flow_id": flow["id"], "entrypoint": entrypoint, "parameters": parameters}
        client.post("/deployments/", json=body).raise_for_status()


def newest_step(home, run_id):
    """The step of a run's newest checkpoint."""
    return max(int(path.stem.partition("-")[2]) for path in home.glob(f"runs/{run_id}/checkpoints/step-*.ckpt"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_older_set_is_carried_over_and_what_is_not_is_named(old, program, monkeypatch):
    home = Path(os.environ["PACELINE_HOME"])
    known = old.environment()
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    whole = old.start("run", "digits", *SMALL)
    assert whole.wait(280) == 0, (old.code / "run.log").read_text()[-3000:]
    finished = {path.name for path in home.glob("runs/*")}
    killed = old.start("run", "digits", *SMALL, *LONG)

    def begun():
        return {path.parents[1].name for path in home.glob("runs/*/checkpoints/step-*.ckpt")} - finished

    (unfinished,) = until(begun, "checkpoint", process=killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(30)
    deploy(known, "good", {"config": {"name": "digits"}})
    deploy(known, "bad", {"config": {"name": "digits", "recipe": {"gone": 1}}})
    client = MlflowClient(known["MLFLOW_TRACKING_URI"])
    lost = client.create_run(client.get_run(unfinished).info.experiment_id, tags={"paceline.role": "run"})
    client.log_text(lost.info.run_id, "recipe: {gone: 1}\n", "config.yaml")
    (prepared,) = home.glob("prepared/[!.]*")
    (home / "prepared" / "0123456789abcdef").mkdir()
    for name in ("prefect", "mlflow"):
        old.daemon(name).end(signal.SIGTERM, 30)
    downgrade(Site(old.home, old.home.settings(), home))

    new = Services(old.home.root)
    upgraded = new.command("upgrade")
    assert upgraded.returncode == 0, upgraded.stderr
    said = upgraded.stderr
    assert "the databases are of prefect-3.8.0-mlflow-3.17.0, and are migrated" in said
    assert "not carried over: prepared set 0123456789abcdef" in said
    assert f"not carried over: unfinished run {lost.info.run_id}" in said
    assert "not carried over: deployment bad" in said
    assert said.count("not carried over") == 3, said
    assert list((old.home.root / "backups").glob("before-upgrade-*.tar"))

    before = newest_step(home, unfinished)
    resumed = program("run", "--resume", unfinished)
    until(lambda: newest_step(home, unfinished) > before, "newer checkpoint", process=resumed)
    resumed.terminate()
    resumed.communicate(timeout=120)
    again = program("run", "digits", *SMALL, "--json")
    stdout, stderr = again.communicate(timeout=280)
    assert again.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["dataset"]["reused"] is True
    assert prepared.is_dir()
