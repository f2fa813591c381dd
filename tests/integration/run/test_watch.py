"""`paceline watch` on unchanged scripts with a planted cause: the same losses and exit status, the right cause."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.artifacts import load_dict
from mlflow.tracking import MlflowClient

SCRIPTS = Path(__file__).parents[2] / "packages" / "scripts"
CAUSES = {
    "plain_slow_samples": "data-bound",
    "plain_waiting_model": "wait-bound",
    "plain_large_update": "update-bound",
    "plain_logging_loop": "loop-bound",
    "plain_convolutions": "compute-bound",
    "lightning_slow_samples": "data-bound",
    "lightning_slow_workers": "data-bound",
    "lightning_waiting_step": "wait-bound",
    "lightning_slow_callback": "loop-bound",
    "lightning_gan": "data-bound",
}
"""Scripts, and the cause that is planted in each."""
WATCH = (sys.executable, "-m", "paceline.flows.cli", "watch")


def start(*command, home, **variables):
    environment = os.environ | {"PACELINE_HOME": str(home), **variables}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def account_of(home):
    uri = f"sqlite:///{home / 'mlflow.db'}"
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("paceline-watch").experiment_id])
    return run, load_dict(f"{run.info.artifact_uri}/summary.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
def test_a_script_with_a_planted_cause(name, tmp_path):
    script = str(SCRIPTS / f"{name}.py")
    plain = start(sys.executable, script, home=tmp_path)
    done = start(*WATCH, script, home=tmp_path)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    run, account = account_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert account["num_steps"] == 300
    assert sum(account["parts"].values()) == pytest.approx(account["step_seconds"])
    assert account["why_not_measured"] == ""
    if account["cause"] == "contaminated machine":
        assert "refused" in done.stderr
        shares = {name: f"{share['value']:.0%}" for name, share in account["shares"].items()}
        pytest.skip(f"the machine is busy: {account['validity']['reasons']}; {CAUSES[name]} was planted in {shares}")
    assert account["cause"] == CAUSES[name], json.dumps(account, indent=1)
    assert f"verdict  {CAUSES[name]}: " in done.stderr
    if account["cause"] == "data-bound":
        assert account["gain_source"] == "measured"
        assert account["gain"]["low"] > 1.5


TWO_FITS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
for number in range(2):
    Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(BoringModel())
    print("fit", number)
"""


@pytest.mark.slow
def test_the_standard_output_stays_that_of_the_script_with_a_server(mlflow_server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_FITS)
    environment = os.environ | {"MLFLOW_TRACKING_URI": mlflow_server.url, "PACELINE_HOME": str(tmp_path)}
    done = subprocess.run([*WATCH, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if "View run" in line or "fit" in line] == ["fit 0", "fit 1"]
    assert done.stderr.count("see it with: paceline ui") == 2


TWO_RANKS = """
import torch
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (inputs,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(9600, 256)), 32):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
if rank == 0:
    from paceline.tasks.watch.ranks import own_pids
    print("trained by", len(own_pids()))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_one_of_two_ranks_of_torchrun_reports(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_RANKS)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = start(*launcher, *WATCH[1:], str(script), home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained by 2\n"), done.stderr
    assert done.stderr.count("Paceline: train.py, 300 steps") == 1
    _, account = account_of(tmp_path)
    assert account["why_not_measured"] == "the training has several ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("print('no loop')\nraise SystemExit(3)", 3, "ran no training loop that Paceline can see"),
        ("import torch\nw = torch.ones(1, requires_grad=True)\n(2 * w).backward()", 0, "ran 1 backward pass"),
        ("def fail():\n    raise ValueError('planted')\nfail()", 1, "ValueError: planted"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import sys\nprint(sys.argv[1:], __name__, __file__ == sys.argv[0])", 0, ""),
        ("import sys\nfrom beside import word\nprint(word, '' in sys.path)", 0, ""),
    ],
    ids=["no loop", "no loader", "an error", "a signal", "arguments", "a module beside it"],
)
def test_a_script_ends_as_without_paceline(text, status, says, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    (tmp_path / "beside.py").write_text("word = 'beside'")
    plain = start(sys.executable, str(script), "--json", "-q", "a=b", home=tmp_path)
    done = start(*WATCH, str(script), "--json", "-q", "a=b", home=tmp_path)
    assert done.returncode == plain.returncode == status, done.stderr
    assert done.stdout == plain.stdout
    assert says in done.stderr
    assert plain.stderr.strip() in done.stderr
