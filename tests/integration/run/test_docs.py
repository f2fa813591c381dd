"""Runs the commands of the documents as written; tests/support/treatments.py says what makes them small."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import pytest
from mlflow.tracking import MlflowClient

from infra.services.home import free_port
from tests.support.documents import ROOT, commands, fences
from tests.support.patience import listens
from tests.support.pictures import make_pictures
from tests.support.treatments import LEARNS, NO_PROBE, SMALL, of_story

LINKED = ("infra", "conf", "flows", "tasks", "tests", "pyproject.toml")
PLACES = ("RUN_ID RUN_ID", "RUN_ID", "DIR", "NAME", "SET", "PORT", "ID", "host:8786", "paceline serve ...")
"""What the documents leave to the reader; the longer before what it contains."""
SECONDS = 800
UP_SECONDS = 120

pytestmark = pytest.mark.timeout(SECONDS + UP_SECONDS)


class Clone:
    """A directory that looks like a clone with its environment, and keeps its own state.

    Args:
        directory: empty.
        prefect_url: of a server that its commands use.
    """

    def __init__(self, directory, prefect_url):
        self.directory = directory
        self.places = {}
        """What stands in place of which word of the documents."""
        for name in LINKED:
            (directory / name).symlink_to(ROOT / name)
        (directory / ".venv").symlink_to(sys.prefix)
        self.environment = {name: value for name, value in os.environ.items() if name != "PACELINE_HOME"} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": prefect_url,
        }

    def changed(self, places, **environment):
        """The same directory with other places and another environment."""
        other = copy.copy(self)
        other.places = self.places | places
        other.environment = self.environment | environment
        return other

    def filled_in(self, command):
        """The command with everything in its place."""
        for place in PLACES:
            if place in self.places:
                command = re.sub(rf"(?<!\w){re.escape(place)}(?!\w)", self._filling(place), command)
        return command

    def _filling(self, place):
        return str(self.places[place]).replace("\\", r"\\")

    def shell(self, commands):
        """Run commands in a row, in one shell; what they said."""
        with self._begun("\n".join(map(self.filled_in, commands))) as (process, said):
            status = process.wait(SECONDS)
            assert status == 0, f"{process.args[-1]}\nended with {status}:\n{_all_of(said)[-6000:]}"
            return _all_of(said)

    @contextmanager
    def running(self, command, is_up):
        """A command that does not end by itself, from when it is up to the end of the body.

        Args:
            command: one or more lines.
            is_up: tells it from what was said so far.
        """
        with self._begun(self.filled_in(command)) as (process, said):
            deadline = time.monotonic() + UP_SECONDS
            while not is_up(_all_of(said)):
                assert process.poll() is None, f"{process.args[-1]}\nended:\n{_all_of(said)}"
                assert time.monotonic() < deadline, f"{process.args[-1]}\nis not up:\n{_all_of(said)}"
                time.sleep(0.2)
            yield

    @contextmanager
    def _begun(self, script):
        """The process of a script and the file that takes what it says; SIGTERM ends all that is left of it."""
        with TemporaryFile() as said:
            process = subprocess.Popen(
                ["bash", "-c", f"set -euo pipefail\n{script}"],
                cwd=self.directory,
                env=self.environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                yield process, said
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(UP_SECONDS)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def _all_of(said):
    return os.pread(said.fileno(), 1_000_000, 0).decode()


@pytest.fixture(scope="module")
def clone(tmp_path_factory, prefect_url):
    """With images for DIR."""
    made = Clone(tmp_path_factory.mktemp("clone"), prefect_url)
    pictures = tmp_path_factory.mktemp("pictures")
    for damaged in make_pictures(pictures):
        (pictures / damaged).unlink()
    made.places |= {"DIR": pictures, "NAME": "pictures"}
    return made


@pytest.fixture(scope="module")
def trained(clone):
    """The clone after the first run on one's own images: RUN_ID is that run, SET what it was trained on."""
    clone.shell([f"{command} --json > summary.json" for command in of_story("trained")])
    summary = json.loads((clone.directory / "summary.json").read_text().splitlines()[-1])
    (prepared,) = (clone.directory / ".paceline" / "prepared").iterdir()
    clone.places |= {"RUN_ID": summary["run_id"], "SET": prepared.relative_to(clone.directory)}
    assert summary["registered"]["alias"] == "champion"
    return clone


@pytest.mark.slow
def test_the_tutorial_of_own_code(clone):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    tutorial = ROOT / "infra/docs/tutorials/own-lightning-code.md"
    blocks = [commands(fence) for fence in fences(tutorial) if fence.language == "bash"]
    (copied, entered), (script,), (run,), (devices,), (own,) = blocks
    small = ("data.init_args.num_bytes=40000", "model.init_args.width=16")
    runs = [run, devices, own.replace("CONFIG.yaml", "config.yaml").replace("DIR", ".")]
    clone.shell(
        [copied, entered, f"{script} {' '.join(f'--{setting}' for setting in small)}"]
        + [f"{one} {' '.join(small)} --json > ../own-{number}.json" for number, one in enumerate(runs)]
    )
    logged = (clone.directory / "text/lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("val_loss")
    losses = [float(value) for line in logged[1:] if (value := line.split(",")[column])]
    first, two, again = (json.loads((clone.directory / f"own-{number}.json").read_text()) for number in range(3))
    assert first["metrics"]["val_loss"] == again["metrics"]["val_loss"] == losses[-1]
    assert first["workload"] == again["workload"], "data in the directory of the code are no code"
    assert two["train"]["world_size"] == 2
    assert two["speedup"]["efficiency"] > 0
    assert two["speedup"]["shares"].keys() >= {"input", "communication", "update"}


def test_settings_of_the_shell(clone):
    said = clone.shell([*of_story("settings"), "command -v paceline", "env"])
    assert said.splitlines()[0] == f"{clone.directory}/.venv/bin/paceline"
    assert {f"PACELINE_HOME={clone.directory}/.paceline", "PREFECT_API_URL=http://127.0.0.1:4200/api"} <= set(
        said.splitlines()
    )


@pytest.mark.parametrize("command", of_story("help"))
def test_help_and_show(clone, command):
    said = clone.shell([command])
    assert "  num_epochs: " in said or "recipe.num_epochs" in said
    assert ("#SBATCH" in said) == ("slurm" in command)


@pytest.mark.slow
def test_a_model_predicts_pictures(trained):
    said = trained.shell(of_story("predictions"))
    assert said.count("predicted ") == 2
    assert list((trained.directory / "predictions").glob("part-*.parquet"))


@pytest.mark.slow
def test_a_set_by_hand(trained):
    said = trained.shell(of_story("a set by hand"))
    assert "class_names=('dark', 'light')" in said
    assert '"class_counts"' in said
    assert "sound" in said.splitlines()
    assert re.search(r"^\(\d+, 16, 16, 3\)$", said, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_by_hand(trained):
    store = MlflowClient(f"sqlite:///{trained.directory}/.paceline/mlflow.db")

    def left_by_the_run():
        history = store.get_metric_history(trained.places["RUN_ID"], "train/loss")
        files = trained.directory.glob(".paceline/runs/**/*")
        return [(metric.step, metric.value) for metric in history], {path: path.stat().st_mtime_ns for path in files}

    before = left_by_the_run()
    trained.shell(of_story("a rank by hand"))
    again = json.loads((trained.directory / "replay" / "result.json").read_text())
    (first,) = trained.directory.glob(".paceline/runs/*/attempt-0/rank-0/result.json")
    assert again["losses"] == json.loads(first.read_text())["losses"]
    assert left_by_the_run() == before


@pytest.mark.slow
def test_a_probe_by_hand(trained):
    summary = json.loads((trained.directory / "summary.json").read_text().splitlines()[-1])
    (said,) = trained.shell(of_story("a probe by hand")).splitlines()
    assert said.split()[0] == summary["speedup"]["verdict"].split()[0]


@pytest.mark.slow
def test_the_doctor(clone):
    assert "nothing is wrong" in clone.shell(of_story("doctor"))


@pytest.mark.slow
def test_runs_are_compared(trained):
    trained.shell([f"paceline run digits {SMALL} {LEARNS} {NO_PROBE} --json > second.json"])
    second = json.loads((trained.directory / "second.json").read_text().splitlines()[-1])["run_id"]
    site = trained.changed({"RUN_ID RUN_ID": f"{trained.places['RUN_ID']} {second}"})
    commands = of_story("comparisons")
    # A model predicts what it knows: the second run has learned the digits.
    said = site.shell([command.replace("RUN_ID digits", f"{second} digits") for command in commands])
    assert re.search("predicted +359 images", said)
    assert "recipe.optimizer (adamw against sgd)" in said, "what keeps the two apart"
    assert "<html" in (trained.directory / "compared.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", of_story("studies"))
def test_a_study(clone, command):
    assert "in experiment paceline" in clone.shell([command])


@pytest.mark.slow
@pytest.mark.parametrize("command", of_story("sweeps"))
def test_a_sweep(clone, command):
    assert "Best: `paceline run digits" in clone.shell([command])


@pytest.mark.slow
@pytest.mark.parametrize("command", of_story("advice"))
def test_advice(clone, command):
    assert "8 devices" in clone.shell([command])


@pytest.mark.slow
def test_nights(clone):
    start, serve, *asked, again = of_story("nights")
    port = free_port()
    deployment = f"http://127.0.0.1:{port}/api/deployments/name/paceline-run/cifar10"
    site = clone.changed(
        {"PORT": port, "paceline serve ...": clone.filled_in(serve)},
        PREFECT_API_URL=f"http://127.0.0.1:{port}/api",
        PREFECT_RUNNER_POLL_FREQUENCY="600",  # nobody is to train for sixty epochs here
    )

    def schedule():
        (found,) = httpx.get(deployment).json()["schedules"]
        return found

    with site.running(f"unset PREFECT_API_URL\n{start}", lambda said: listens(port)):
        with site.running(serve, lambda said: httpx.get(deployment).status_code == httpx.codes.OK):
            assert schedule()["schedule"]["timezone"] == "Europe/Zurich"
            assert schedule()["active"]
            assert "0 2 * * *" in site.changed({"ID": schedule()["id"]}).shell(asked)
            assert not schedule()["active"]
        before = httpx.get(deployment).json()["last_polled"]
        # Ended before it looks for runs for the first time, it would not hear of it.
        with site.running(again, lambda said: httpx.get(deployment).json()["last_polled"] != before):
            assert schedule()["active"]
        assert not httpx.get(deployment).json()["paused"], "what comes due meanwhile is to be caught up with"


@pytest.mark.slow
def test_a_scheduler_of_ones_own(clone):
    certificates, run, *settings, scheduler, worker = of_story("own scheduler")
    port = free_port()
    site = clone.changed({"PORT": port, "host:8786": f"127.0.0.1:{port}"})  # nothing that the page does not set
    site.shell([certificates])
    with (
        site.running("\n".join([*settings, scheduler]), lambda said: listens(port)),
        site.running("\n".join([*settings, worker]), lambda said: "Registered to" in said),
    ):
        assert "in experiment paceline" in site.shell([run])


@pytest.mark.slow
@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="would install into .venv; run by infra/test, nothing is left to install"
)
def test_the_scripts_of_a_clone(clone):
    said = clone.shell(of_story("clone"))
    assert "in experiment paceline" in said
    assert "test_house.py" in said
