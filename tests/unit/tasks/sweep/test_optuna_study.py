"""What Optuna proposes and prunes, and what its journal remembers after a crash. No training here."""

import threading

import pytest

from paceline.tasks.sweep.optuna_study import AGAIN, Search, TrialStore
from paceline.tasks.sweep.records import Trial
from paceline.tasks.sweep.space import parse_parameters

RATE = "recipe.learning_rate"


@pytest.fixture
def open_sweep(tmp_path):
    """Opens the same sweep, anew as another process would."""

    def opened(*texts, sampler="random", pruner="none", num_trials=8, num_epochs=9, seed=1):
        parameters = parse_parameters(texts or [f"{RATE}=log(1e-3,1)"])
        search = Search(
            parameters=parameters,
            sampler=sampler,
            pruner=pruner,
            num_trials=num_trials,
            num_epochs=num_epochs,
            seed=seed,
        )
        return TrialStore(tmp_path / "run" / "trials.journal", search)

    return opened


def record(proposal, status="done", score=0.5):
    score = score if status == "done" else None
    return Trial(
        number=proposal.number, values=proposal.values, status=status, score=score, seconds=1.0, started=1_000_000.0
    )


def run_all(proposer, score_of):
    """One trial after the other."""
    proposals = list(iter(proposer.propose, None))
    for proposal in proposals:
        proposer.mark_ended(record(proposal, score=score_of(proposal.values)))
    return proposals


def test_a_grid_has_every_combination_once(open_sweep):
    proposer = open_sweep("model.width=int(8,32,8)", "recipe.optimizer=[sgd,adamw]", sampler="grid")
    found = {tuple(proposal.values.values()) for proposal in run_all(proposer, lambda values: 0.5)}
    assert len(proposer.trials()) == 8
    assert found == {(width, name) for width in (8, 16, 24, 32) for name in ("sgd", "adamw")}


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_same_seed_proposes_the_same_and_within_the_range(open_sweep, tmp_path, sampler):
    values = [proposal.values[RATE] for proposal in run_all(open_sweep(sampler=sampler), lambda values: 0.5)]
    assert all(0.001 <= value <= 1 for value in values)
    assert len(set(values)) == len(values)
    (tmp_path / "run").rename(tmp_path / "first")
    assert [proposal.values[RATE] for proposal in run_all(open_sweep(sampler=sampler), lambda values: 0.5)] == values
    (tmp_path / "run").rename(tmp_path / "second")
    other = run_all(open_sweep(sampler=sampler, seed=2), lambda values: 0.5)
    assert [proposal.values[RATE] for proposal in other] != values


def test_tpe_learns_where_the_best_is(open_sweep):
    proposer = open_sweep(f"{RATE}=lin(0.001,1)", sampler="tpe", num_trials=60)
    near = []
    while (proposal := proposer.propose()) is not None:
        distance = abs(proposal.values[RATE] - 0.7)
        near.append(distance < 0.1)
        proposer.mark_ended(record(proposal, score=1 - distance))
    assert sum(near[-20:]) >= 12, "by chance 4 of 20 would be"


def test_trials_that_run_at_the_same_time_are_not_alike(open_sweep):
    proposer = open_sweep(sampler="tpe", num_trials=30)
    for _ in range(12):
        proposal = proposer.propose()
        proposer.mark_ended(record(proposal, score=proposal.values[RATE]))
    beside = [proposer.propose().values[RATE] for _ in range(4)]
    assert len(set(beside)) == 4


def test_asha_ends_what_is_worse_at_its_rungs(open_sweep):
    proposer = open_sweep(pruner="asha")
    good, bad, better = (proposer.propose().number for _ in range(3))
    assert not any(proposer.report(good, epoch, 0.5 + epoch / 100) for epoch in range(1, 10))
    assert proposer.report(bad, 1, 0.4)
    assert not any(proposer.report(better, epoch, 0.6 + epoch / 100) for epoch in range(1, 10))


def test_the_median_needs_five_trials_before_it_ends_one(open_sweep):
    proposer = open_sweep(pruner="median")
    for score in (0.1, 0.2, 0.3, 0.4, 0.5):
        proposal = proposer.propose()
        assert not proposer.report(proposal.number, 1, score)
        proposer.mark_ended(record(proposal, score=score))
    low, high = proposer.propose(), proposer.propose()
    assert proposer.report(low.number, 1, 0.25)
    assert not proposer.report(high.number, 1, 0.35)


def test_hyperband_ends_some_and_none_without_a_pruner(open_sweep, tmp_path):
    def num_ended(pruner):
        proposer, ended = open_sweep(pruner=pruner, num_trials=20), 0
        for number in range(20):
            proposal = proposer.propose()
            worse = any(proposer.report(proposal.number, epoch, 0.9 - number / 100) for epoch in range(1, 10))
            proposer.mark_ended(record(proposal, "pruned" if worse else "done"))
            ended += worse
        (tmp_path / "run").rename(tmp_path / pruner)
        return ended

    assert num_ended("hyperband") > 5
    assert num_ended("none") == 0


def test_a_sweep_goes_on_where_a_crash_left_it(open_sweep, tmp_path):
    first = open_sweep(num_trials=4)
    done, running, unborn = (first.propose() for _ in range(3))
    first.mark_started(done.number, "run0")
    first.mark_ended(record(done))
    first.mark_started(running.number, "run1")
    first.report(running.number, 1, 0.3)
    journal = tmp_path / "run" / "trials.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 5, "wor')  # the disk was full
    (tmp_path / "run" / "trials.journal.lock").symlink_to(journal)

    again = open_sweep(num_trials=4)
    assert [(left.number, left.values, left.run_id) for left in again.resumable_trials()] == [
        (1, running.values, "run1"),
        (2, unborn.values, None),
    ]
    assert again.count_reported(1) == 1
    assert [trial.number for trial in again.trials()] == [0]
    last = again.propose()
    assert last.number == 3
    assert last.values not in (done.values, running.values, unborn.values), "no random number comes twice"
    assert again.propose() is None
    for proposal in (running, unborn, last):
        again.mark_ended(record(proposal, score=0.7))
    assert open_sweep(num_trials=4).resumable_trials() == []
    assert [trial.score for trial in open_sweep(num_trials=4).trials()] == [0.5, 0.7, 0.7, 0.7]


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_a_trial_that_was_cut_off_before_it_had_values_gets_them(open_sweep, sampler):
    texts = [f"{RATE}=[0.1,0.2,0.3]", "recipe.batch_size=[32,64]"]
    first = open_sweep(*texts, sampler=sampler, num_trials=6)
    begun = first.propose()
    study = first._study
    study._storage.create_new_trial(study._study_id)  # and then nothing more was written
    again = open_sweep(*texts, sampler=sampler, num_trials=6)
    kept, cut = again.resumable_trials()
    assert kept == begun
    assert cut.number == 1
    assert set(cut.values) == {RATE, "recipe.batch_size"}
    assert [one.values for one in open_sweep(*texts, sampler=sampler, num_trials=6).resumable_trials()] == [
        kept.values,
        cut.values,
    ]
    rest = [one.values for one in iter(again.propose, None)]
    assert len(rest) == 4
    if sampler == "grid":
        assert len({tuple(sorted(values.items())) for values in [kept.values, cut.values, *rest]}) == 6


def test_what_was_queued_for_another_try_is_not_forgotten(open_sweep):
    first = open_sweep(num_trials=2)
    failed = first.propose()
    first.mark_ended(record(failed, "failed"), final=False)
    first._study.enqueue_trial(failed.values, user_attrs={AGAIN: failed.number})  # and then the process was killed
    again = open_sweep(num_trials=2)
    assert [one.values for one in again.resumable_trials()] == [failed.values]
    assert len(list(iter(again.propose, None))) == 1


def test_what_failed_from_outside_is_tried_again_once_and_what_diverged_is_not(open_sweep):
    first = open_sweep(num_trials=2)
    outside, diverged = first.propose(), first.propose()
    first.mark_ended(record(outside, "failed"), final=False)
    first.mark_ended(record(diverged, "failed"), final=True)
    assert [trial.status for trial in first.trials()] == ["failed", "failed"]

    second = open_sweep(num_trials=2)
    (again,) = second.resumable_trials()
    assert again.values == outside.values
    assert again.number == 2
    assert second.propose() is None, "what is tried again is none of the new ones"
    second.mark_ended(record(again))
    assert [(trial.number, trial.status) for trial in second.trials()] == [(1, "failed"), (2, "done")]
    assert open_sweep(num_trials=2).resumable_trials() == []


def test_many_threads_may_use_it(open_sweep):
    proposer = open_sweep(num_trials=24, sampler="tpe", pruner="asha")
    errors = []

    def work():
        try:
            while (proposal := proposer.propose()) is not None:
                proposer.report(proposal.number, 1, proposal.values[RATE])
                proposer.mark_ended(record(proposal, score=proposal.values[RATE]))
        except Exception as error:  # noqa: BLE001  told by the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [trial.number for trial in proposer.trials()] == list(range(24))


def test_a_loss_is_minimized(tmp_path):
    parameters = parse_parameters(["recipe.batch_size=int(1,100)"])
    search = {
        "parameters": parameters,
        "sampler": "tpe",
        "pruner": "none",
        "num_trials": 40,
        "num_epochs": 1,
        "seed": 1,
    }
    store = TrialStore(tmp_path / "trials.journal", Search(**search, goal="minimize"))
    while (proposal := store.propose()) is not None:
        score = float(proposal.values["recipe.batch_size"])
        ended = {"number": proposal.number, "values": proposal.values, "score": score, "seconds": 1.0, "started": 0.0}
        store.mark_ended(Trial(**ended, status="done"))
    last = [trial.score for trial in store.trials()[20:]]
    assert sum(last) / len(last) < 30, "the middle of the range is 50"
