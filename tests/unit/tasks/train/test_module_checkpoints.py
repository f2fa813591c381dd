"""Checkpoints and the result of own Lightning code: when they are written, and whose they are."""

import json
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric
from prefect.logging import disable_run_logger

from paceline.conf.config import Limits, Track
from paceline.flows.run.outcome import ModuleOutcome
from paceline.tasks.errors import SupersededError
from paceline.tasks.metrics_file import FILE
from paceline.tasks.names import metric_name
from paceline.tasks.train import checkpoint_interval, prefect_tasks
from paceline.tasks.train.checkpoint_interval import FailureHistory
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.launch.layout import PROBE_FILE
from paceline.tasks.train.lightning import step_parts
from paceline.tasks.train.lightning.callbacks import SaveCheckpoint, StepAccount
from paceline.tasks.train.lightning.feed import FeedState
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of
from paceline.tasks.train.rank.time_budget import Stopwatch
from tests.support.own_lightning import train
from tests.support.refusals import refused

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice

AUTO = {"checkpoint_steps": "auto"}
NUM_BATCHES = 9


@pytest.fixture
def often(monkeypatch, own_packages):
    """Checkpoints may take all of the time, as closely as a batch of a tenth of a second allows."""
    monkeypatch.setattr(checkpoint_interval, "MIN_SECONDS", 0.15)
    monkeypatch.setattr(checkpoint_interval, "MAX_SHARE", 100.0)
    from prose.gpt import GPT

    step = GPT.training_step
    monkeypatch.setattr(GPT, "training_step", lambda *arguments: (time.sleep(0.1), step(*arguments))[1])


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("log_steps", [0, 1, 1000])
def test_the_interval_is_that_of_young_whatever_the_module_logs(make_spec, settings, monkeypatch, log_steps):
    monkeypatch.setattr(checkpoint_interval, "PRIOR_HOURS", 0.0)
    settings["trainer"] |= {"log_every_n_steps": log_steps}
    for number in range(2):  # a failure in no time: the interval is the least one
        rank = Path(settings["data"]["init_args"]["directory"]).parent / f"runs/before/attempt-{number}/rank-0"
        rank.mkdir(parents=True)
        for name in ("spec.json", "progress.json"):
            (rank / name).touch()
    spec = make_spec(execution=AUTO, baseline="none")
    result = train(spec)
    saved = sorted(map(step_of, Path(spec.checkpoint_directory).glob("*.ckpt")))
    assert len(saved) == 2, "the newest two"
    assert 1 < saved[0] < NUM_BATCHES == saved[1], "one inside the epoch, and the last one"
    choice = result.plan.reasons["checkpoint_steps"]
    assert isinstance(choice.value, int)
    assert "a checkpoint takes " in choice.reason
    assert "(1 in 0.0 recorded, 1 in 0 assumed); Young's interval is " in choice.reason
    progress = json.loads((Path(spec.directory) / "progress.json").read_text())
    assert progress["choices"]["checkpoint_steps"] == choice.model_dump(mode="json")


def test_a_short_training_has_the_rule_alone_and_one_checkpoint(make_spec):
    spec = make_spec(execution=AUTO, baseline="none")
    result = train(spec)
    assert step_of(newest_valid_checkpoint(Path(spec.checkpoint_directory))) == NUM_BATCHES
    assert "checkpoint_steps" not in result.plan.reasons, "its record of failures was not read"


@pytest.mark.parametrize("is_newest", [True, False])
def test_the_result_of_an_older_attempt_is_not_published(make_spec, monkeypatch, is_newest):
    spec = make_spec(baseline="none")
    shared = {name: getattr(spec, name) for name in TrainJob.model_fields if hasattr(spec, name)}
    job = TrainJob(**shared | {"run_id": "run", "tracking_uri": ""})
    run = Path(spec.directory).parents[1]
    run.rename(job.directory.parent.mkdir() or job.directory)
    spec = spec.model_copy(update={"directory": str(job.directory / "attempt-0" / "rank-0")})

    def train_and_be_late(job, address, on_progress):
        result = train(spec)
        if not is_newest:
            (job.directory / "attempt-1").mkdir()
        return result

    monkeypatch.setattr(prefect_tasks, "train_module", train_and_be_late)
    with disable_run_logger():
        if is_newest:
            prefect_tasks.fit_module.fn(job, "")
        else:
            with pytest.raises(SupersededError, match=r"attempt-0 .* attempt-1\b"):
                prefect_tasks.fit_module.fn(job, "")
    assert job.result_path.exists() is is_newest


@pytest.mark.parametrize("name", ["acc@1", "val//loss", "./loss", "/loss", "loss/", "..", ".", "x" * 251])
def test_a_name_that_mlflow_refuses_is_another_one_there(name):
    with pytest.raises(MlflowException):
        _validate_metric(name, 0.5, 0, 0)
    _validate_metric(metric_name(name), 0.5, 0, 0)


@pytest.mark.parametrize("name", ["val/acc.top-1 of 5: b", "perte_été"])
def test_a_name_that_mlflow_accepts_stays(name):
    _validate_metric(name, 0.5, 0, 0)
    assert metric_name(name) == name


def test_names_that_mlflow_would_make_equal_stay_apart_for_the_score_and_in_every_attempt(
    make_spec, settings, own_packages, monkeypatch
):
    from prose.gpt import GPT

    values = {"acc@1": 0.5, "acc#1": 0.25, "acc_1": 0.125}

    def log(self):
        for name in values if self.current_epoch == 0 else reversed(values):
            self.log(name, values[name])

    monkeypatch.setattr(GPT, "on_validation_epoch_end", log, raising=False)
    first = make_spec(baseline="none")
    trained = train(first)
    settings["trainer"] |= {"max_epochs": 2}
    again = make_spec(attempt=1, settings=settings, baseline="none")
    again = again.model_copy(update={"resume_from": trained.checkpoint})
    assert train(again).metrics.items() >= values.items()
    logged = [
        {name: value for name, value, *_ in map(json.loads, (Path(spec.directory) / FILE).read_text().splitlines())}
        for spec in (first, again)
    ]
    for name, value in values.items():
        config = first.config.model_copy(update={"track": Track(maximize=name)})
        outcome = ModuleOutcome(config=config, plan=first.plan, trained=trained, workload="own", hardware=None)
        assert [values[outcome.score_metric] for values in (*logged, outcome.metrics)] == [value] * 3
    assert outcome.score_metric == "acc_1", "MLflow accepts it as it is"
    assert sorted(note.split()[7].strip(":") for note in trained.notes) == ["acc#1", "acc@1"]


def test_a_training_whose_checkpoints_would_fill_the_disk_is_refused_before_its_probe(make_spec):
    spec = make_spec()
    limits = Limits(min_free_gib=1e6)
    spec = spec.model_copy(update={"config": spec.config.model_copy(update={"limits": limits})})
    with refused("limits.min_free_gib", "limits.min_free_gib=1e+06"):
        train(spec)
    assert not (Path(spec.directory) / PROBE_FILE).exists()
    assert not Path(spec.checkpoint_directory).exists()


def test_the_space_is_that_of_the_checkpoints_and_the_weights(make_spec, monkeypatch):
    needs = []
    monkeypatch.setattr(step_parts, "require_space", lambda limits, home, parts: needs.append(parts) or "enough")
    result = train(make_spec(baseline="none"))
    stored = torch.load(result.checkpoint, weights_only=True)
    weights = sum(each.nbytes for each in stored["state_dict"].values())
    states = [state for one in stored["optimizer_states"] for state in one["state"].values()]
    moments = sum(each.nbytes for state in states for each in state.values())
    assert needs == [{"checkpoints": 3 * (weights + moments) + 2 * weights}]
    assert moments > weights
    progress = json.loads((Path(result.directory) / "progress.json").read_text())
    assert progress["reports"] == ["enough"]


def test_code_that_reads_the_checkpoint_callback_of_a_script_finds_its_attributes(tmp_path):
    stopwatch = Stopwatch("setup")
    state = FeedState(stopwatch)
    account = StepAccount(stopwatch, state, None, None, {})
    callbacks = [SaveCheckpoint(account, state, tmp_path, None, 0, FailureHistory)]
    trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
    expected = vars(ModelCheckpoint(dirpath=tmp_path))
    assert {"dirpath", "monitor", "last_model_path", "best_k_models"} <= expected.keys()
    for name in expected:
        if not name.startswith("_"):
            assert getattr(trainer.checkpoint_callback, name) == expected[name]
    for name in ("no_such_attribute", "_no_such_attribute"):
        assert not hasattr(trainer.checkpoint_callback, name)
