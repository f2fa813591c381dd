"""`SpeedAccount` in a script of Lightning: the same losses, a card, and a run in MLflow."""

import os
import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from mlflow.tracking import MlflowClient
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.conf.environment import QUIET_ENVIRONMENT, Environment
from paceline.lightning import SpeedAccount
from paceline.tasks.measure import step_marks
from paceline.tasks.watch import account as module
from tests.support.documents import ROOT, fences

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
INPUTS = torch.linspace(-1, 1, 960).reshape(240, 4)


class Module(LightningModule):
    """A net with dropout, a metric and a schedule; optimized by hand or by Lightning."""

    def __init__(self, *, by_hand=False, fails_at=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.automatic_optimization = not by_hand
        self.fails_at, self.losses = fails_at, []

    def training_step(self, batch, batch_idx):
        if len(self.losses) == self.fails_at:
            raise ValueError("planted")
        loss = (self.net(batch[0]) - batch[0].sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss, on_epoch=True)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.net(batch[0]).mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(*callbacks, directory, settings, **options):
    seed_everything(7, verbose=False)
    model = Module(**options)
    trainer = Trainer(
        callbacks=list(callbacks),
        default_root_dir=directory,
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
        **settings,
    )
    loader = DataLoader(TensorDataset(INPUTS), 4, shuffle=True)
    trainer.fit(model, loader, DataLoader(TensorDataset(INPUTS), 60))
    return model, trainer


@pytest.fixture
def _short_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.0)


SETTINGS = {
    "epochs": {"max_epochs": 3},
    "in the middle": {
        "max_epochs": 2,
        "val_check_interval": 17,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.1,
    },
    "steps": {"max_steps": 70, "limit_train_batches": 33},
}


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_stay_the_same(tmp_path, monkeypatch, settings, by_hand):
    options = dict(SETTINGS[settings])
    if by_hand:
        options.pop("gradient_clip_val", None)
        options.pop("accumulate_grad_batches", None)
    monkeypatch.setattr("paceline.tasks.watch.card._record", lambda *_: "")
    plain, _ = fit(directory=tmp_path, settings=options, by_hand=by_hand)
    watch = SpeedAccount()
    watched, _ = fit(watch, directory=tmp_path, settings=options, by_hand=by_hand)
    assert watched.losses == plain.losses
    for first, second in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(first, second)
    assert watch.result.num_steps == len(plain.losses)
    assert watch.result.num_rounds > 0
    assert watch.result.time_budget["validation"] > 0
    assert all(watch.result.parts[part] > 0 for part in ("data_wait", "forward", "backward", "optimizer", "rest"))


def test_a_training_is_a_run_and_a_failed_one_has_failed(tmp_path, capsys):
    watch = SpeedAccount(replay=False)
    fit(watch, directory=tmp_path, settings={"max_epochs": 1, "limit_val_batches": 0})
    with pytest.raises(ValueError, match="planted"):
        fit(SpeedAccount(), directory=tmp_path, settings={"max_epochs": 1}, fails_at=20)
    client = MlflowClient(Environment().tracking_uri)
    experiment = client.get_experiment_by_name("paceline-watch")
    failed, done = client.search_runs([experiment.experiment_id])[:2]
    assert (done.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert done.data.tags["paceline.role"] == "watch"
    assert done.data.tags["paceline.cause"] == watch.result.cause
    assert done.data.metrics["watch/step_seconds"] == pytest.approx(watch.result.step_seconds)
    assert done.data.metrics["speedup/share_input"] == pytest.approx(watch.result.shares["input"].value)
    assert [artifact.path for artifact in client.list_artifacts(done.info.run_id)] == ["summary.json"]
    text = capsys.readouterr().err
    assert f"run      {done.info.run_id} in experiment paceline-watch" in text
    assert "Paceline: Module, 60 steps" in text
    assert watch.result.why_not_measured == "replay=False"


def test_the_script_keeps_its_stdout_and_its_variables(tmp_path, monkeypatch, capsys):
    for name in QUIET_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    seen = []

    def set_terminated(client, *_):
        seen.append(os.environ["MLFLOW_DISABLE_TELEMETRY"])
        print("View run at http://127.0.0.1:5000/")  # noqa: T201  as the client of a server does

    monkeypatch.setattr(MlflowClient, "set_terminated", set_terminated)
    variables = dict(os.environ)
    fit(SpeedAccount(), directory=tmp_path, settings={"max_epochs": 1, "limit_val_batches": 0})
    assert seen == ["true"]
    assert os.environ == variables
    output = capsys.readouterr()
    assert "View run" not in output.out
    assert "View run" in output.err
    assert "  run      " in output.err


def test_a_judged_training_marks_its_steps(tmp_path, monkeypatch):
    monkeypatch.setenv(step_marks.VARIABLE, str(tmp_path / "marks"))
    step_marks._open_marks.cache_clear()
    watch = SpeedAccount()
    model, _ = fit(watch, directory=tmp_path, settings={"max_epochs": 1})
    step_marks._open_marks.cache_clear()
    times = [float(line) for line in (tmp_path / "marks").read_text().split()]
    assert len(times) == len(model.losses)
    assert times == sorted(times)
    assert watch.result.why_not_measured == "under paceline judge"


def test_a_store_that_does_not_answer_leaves_the_training_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    model, _ = fit(SpeedAccount(), directory=tmp_path, settings={"max_epochs": 1, "limit_val_batches": 0})
    assert len(model.losses) == 60
    text = capsys.readouterr().err
    assert "Paceline: Module, 60 steps" in text
    assert "error: " in text.partition("next  ")[2]
    assert "127.0.0.1:9" in text


def test_the_example_of_the_guide():
    (example, *_) = [one for one in fences(ROOT / "infra/docs/guides/watch.md") if "SpeedAccount" in one.body]
    names = {}
    exec(example.body, names)
    assert names["account"] in names["trainer"].callbacks
    assert pickle.loads(pickle.dumps(names["account"])).result is None  # Lightning spawns ranks
