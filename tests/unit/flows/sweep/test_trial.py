"""What a trial's watch makes of its scores. Real samplers, pruners and files; no training."""

import json
import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from paceline.flows.sweep import trial as sweep_trial
from paceline.flows.sweep.trial import _RunningTrial, run_trial
from paceline.tasks.errors import InputError, RankError, RunError
from paceline.tasks.sweep.optuna_study import Search, TrialStore
from paceline.tasks.sweep.records import Proposal
from paceline.tasks.sweep.space import parse_parameters


@pytest.fixture
def work(tmp_path):
    search = Search(
        parameters=parse_parameters(["recipe.learning_rate=log(1e-3,1)"]),
        sampler="random",
        pruner="asha",
        num_trials=4,
        num_epochs=9,
        seed=1,
    )
    return SimpleNamespace(
        proposer=TrialStore(tmp_path / "trials.journal", search),
        stopped=threading.Event(),
        parent=SimpleNamespace(run_id="0123"),
    )


def tell(directory, scores, attempt=0):
    """As rank 0 does at the end of an epoch."""
    place = directory / f"attempt-{attempt}" / "rank-0"
    place.mkdir(parents=True, exist_ok=True)
    (place / "progress.json").write_text(json.dumps({"validation_scores": scores}))


def test_a_trial_ends_when_others_were_better_at_that_epoch(work, tmp_path):
    good = _RunningTrial(work, work.proposer.propose())
    stop_reason = good.watch(tmp_path / "good")
    assert stop_reason() is None
    tell(tmp_path / "good", [0.5])
    assert stop_reason() is None
    tell(tmp_path / "good", [0.5, 0.6, 0.7, 0.8])
    assert stop_reason() is None
    assert good.scores == (0.5, 0.6, 0.7, 0.8)

    proposal = work.proposer.propose()
    stop_reason = _RunningTrial(work, proposal).watch(tmp_path / "poor")
    tell(tmp_path / "poor", [0.4, 0.9])
    assert stop_reason() == "pruned after epoch 1, at 0.4000: others were better by then"
    assert work.proposer.count_reported(proposal.number) == 1


def test_scores_of_a_former_process_are_reported_once(work, tmp_path):
    proposal = work.proposer.propose()
    tell(tmp_path, [0.5, 0.6])
    assert _RunningTrial(work, proposal).watch(tmp_path)() is None
    stop_reason = _RunningTrial(work, proposal).watch(tmp_path)
    tell(tmp_path, [0.5, 0.6, 0.7], attempt=1)
    assert stop_reason() is None
    assert work.proposer.count_reported(proposal.number) == 3


def test_a_sweep_that_ends_says_how_to_go_on(work, tmp_path):
    stop_reason = _RunningTrial(work, work.proposer.propose()).watch(tmp_path)
    work.stopped.set()
    assert stop_reason() == "interrupted; resume with: paceline sweep --resume 0123"


def test_a_failed_trial_has_no_score_but_its_course(work):
    running = _RunningTrial(work, Proposal(number=3, values={"seed": 1}))
    running.scores = (0.1, 0.2)
    assert running.record("pruned", "why").score == 0.2
    failed = running.record("failed", "lost")
    assert (failed.score, failed.scores, failed.error) == (None, (0.1, 0.2), "lost")


@pytest.fixture
def refusing(work, monkeypatch):
    """A store that has no room for another run."""

    @contextmanager
    def nested(*_):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(sweep_trial, "nested_run", nested)
    monkeypatch.setattr(sweep_trial, "get_run_logger", logging.getLogger)
    work.configure = lambda _: (SimpleNamespace(name="trial"), None)
    return work


def test_what_a_store_raises_is_one_trials_failure_and_is_tried_again(refusing):
    trial = run_trial(refusing, refusing.proposer.propose())
    assert (trial.status, trial.error) == ("failed", "[Errno 28] No space left on device")
    assert [one.values for one in refusing.proposer.resumable_trials()] == [trial.values]


def test_what_is_raised_because_a_sweep_ends_is_nobodys_failure(refusing):
    refusing.stopped.set()
    assert run_trial(refusing, refusing.proposer.propose()) is None


@pytest.mark.parametrize(("error", "is_repeated"), [(RunError("killed"), True), (InputError("no"), False)])
def test_settings_that_cannot_be_read_are_one_trials_failure(refusing, error, is_repeated):
    def configure(_):
        raise error

    refusing.configure = configure
    trial = run_trial(refusing, refusing.proposer.propose())
    assert (trial.status, trial.error) == ("failed", str(error))
    assert bool(refusing.proposer.resumable_trials()) is is_repeated


def test_a_loss_that_is_not_finite_fails_the_first_trial_for_good(refusing, monkeypatch):
    @contextmanager
    def nested(*_):
        yield SimpleNamespace(run_id="4567")

    def train(*_):
        raise RankError("val_loss is not finite", final=True)

    monkeypatch.setattr(sweep_trial, "nested_run", nested)
    monkeypatch.setattr(sweep_trial, "_train", train)
    refusing.request = SimpleNamespace(is_own=True)
    assert run_trial(refusing, refusing.proposer.propose()).status == "failed"
    assert refusing.proposer.resumable_trials() == []
