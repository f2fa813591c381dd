"""Own Lightning code: the losses of `python main.py fit`, names in MLflow, a killed rank, and what is refused."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from tests.conftest import RANK_MODULE

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

PACKAGE = Path(__file__).parents[2] / "packages" / "text"
SMALL = ["model.init_args.width=16", "data.init_args.num_bytes=40000", "trainer.accelerator=cpu"]
NUM_BATCHES = {1: 2 * 18, 2: 2 * 9}
PLAIN_LOGS = "lightning_logs/version_0/metrics.csv"


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A copy of the directory of the package, as its author has it."""
    directory = tmp_path_factory.mktemp("text") / "prose"
    shutil.copytree(PACKAGE, directory)
    return directory


def train_plainly(code, directory, *options):
    """Losses and validation losses of the plain script, by step."""
    data = f"--data.init_args.directory={directory / 'data'}"
    small = [f"--{override}" for override in SMALL]
    command = [sys.executable, "main.py", "fit", "--config", "config.yaml", *small, data, *options]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, f"--trainer.default_root_dir={directory}"],
        cwd=code,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with (directory / PLAIN_LOGS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row.get(name)] for name in ("train_loss", "val_loss")}


def curves(run_id):
    client = MlflowClient(Environment().tracking_uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    histories = {name: client.get_metric_history(run_id, name) for name in ("train_loss", "val_loss", "lr-AdamW")}
    return {
        name: [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        for name, history in histories.items()
    }


@pytest.fixture
def run(paceline, code, tmp_path):
    """Starts the program on the package's own file."""

    def start(*overrides, config="config.yaml"):
        data = f"data.init_args.directory={tmp_path / 'data'}"
        return paceline("run", str(code / config), "--code", str(code), "--json", *SMALL, data, *overrides)

    return start


def summary_of(process):
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_one_rank_has_the_losses_of_the_script_and_an_account_of_its_time(run, code, tmp_path):
    plain = train_plainly(code, tmp_path)
    summary = summary_of(run())
    own = curves(summary["run_id"])
    assert own["train_loss"] == plain["train_loss"]
    assert own["val_loss"] == plain["val_loss"]
    assert len(own["train_loss"]) == NUM_BATCHES[1] == len(own["lr-AdamW"])
    budget = summary["time_budget"]
    assert {"data_wait", "forward", "backward", "optimizer", "validation", "checkpoint"} <= budget.keys()
    assert abs(summary["train"]["clock_difference"]) < 0.05
    assert summary["train"]["samples_per_second"] > 0
    assert summary["packages"][0].startswith("directory (code ")
    assert "speedup" in summary["not_measured"]


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_ddp_though_one_is_killed(run, code, tmp_path):
    plain = train_plainly(code, tmp_path, "--trainer.devices=2", "--trainer.strategy=ddp")
    process = run("execution.num_devices=2", "execution.checkpoint_steps=4", "trainer.max_epochs=2")
    kill_a_rank_after(process, "step-0000000004.ckpt")
    summary = summary_of(process)
    own = curves(summary["run_id"])
    assert len(summary["train"]["restarts"]) == 1
    assert own["train_loss"] == plain["train_loss"]
    assert len(own["train_loss"]) == NUM_BATCHES[2]
    assert own["val_loss"] == plain["val_loss"]


def kill_a_rank_after(process, name):
    deadline = time.monotonic() + 120
    before = set(Environment().root.glob(f"runs/*/checkpoints/{name}"))
    while not set(Environment().root.glob(f"runs/*/checkpoints/{name}")) - before:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if RANK_MODULE in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
    ]
    ranks[-1].send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_plain_script_resumes_from_its_checkpoint(run, code, tmp_path):
    whole = train_plainly(code, tmp_path)
    half = summary_of(run("trainer.max_epochs=1"))
    again = tmp_path / "again"
    resumed = train_plainly(code, again, f"--ckpt_path={half['train']['checkpoint']}", "--weights_only=true")
    assert len(resumed["train_loss"]) == len(whole["train_loss"]) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "overrides", "fault", "hint"),
    [
        ({}, ["model.class_path=prose.gpt.GTP"], "model.class_path=prose.gpt.GTP cannot be imported", "--code DIR"),
        ({}, ["model.init_args.widht=8"], "model.init_args.widht is not an argument of prose.gpt.GPT", "width"),
        ({}, ["model.init_args.width=wide"], "model.init_args.width=wide must be of type int", "another value"),
        ({}, ["trainer.max_epoch=2"], "trainer.max_epoch", "trainer.max_epoch"),
        ({}, ["trainer.devices=2", "execution.num_devices=1"], "trainer.devices=2 conflicts with", "trainer.devices"),
        ({}, ["trainer.strategy=fsdp"], "trainer.strategy=fsdp cannot be used", "trainer.strategy=ddp"),
        ({}, ["recipe.num_epochs=2"], "recipe.num_epochs is not a setting of your own", "trainer.max_epochs"),
        ({"prose/gpt.py": ('return {"loss": loss}', "return None")}, [], "training_step of GPT returned None", "loss"),
        ({"prose/gpt.py": ("def training_step", "def train_step")}, [], "has no training_step", "define training_step"),
        (
            {"prose/corpus.py": ("class Windows(Dataset)", "class Windows(torch.utils.data.IterableDataset)")},
            [],
            "shuffle",
            "corpus.py",
        ),
    ],
)
def test_wrong_input_is_refused(paceline, tmp_path, change, overrides, fault, hint):
    code = tmp_path / "prose"
    shutil.copytree(PACKAGE, code)
    for name, (before, after) in change.items():
        assert before in (code / name).read_text()
        (code / name).write_text((code / name).read_text().replace(before, after))
    data = f"data.init_args.directory={tmp_path / 'data'}"
    process = paceline("run", str(code / "config.yaml"), "--code", str(code), *SMALL, data, *overrides)
    _, said = process.communicate(timeout=120)
    lines = [line for line in said.splitlines() if line.startswith(("error: ", "hint: "))]
    assert process.returncode == 2, said
    assert fault in lines[0]
    assert hint in lines[1]


@pytest.mark.slow
def test_classes_on_the_command_line_need_no_file(paceline, code, tmp_path):
    settings = yaml.safe_load((code / "config.yaml").read_text())
    overrides = [f"model.class_path={settings['model']['class_path']}", "data.class_path=prose.corpus.Corpus"]
    data = f"data.init_args.directory={tmp_path / 'data'}"
    small = [*SMALL, data, "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    process = paceline("run", "lightning", "--code", str(code), "--json", *overrides, *small)
    assert summary_of(process)["train"]["num_batches"] == 2
