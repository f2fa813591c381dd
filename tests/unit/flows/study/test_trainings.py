"""A resumed study refuses trainings on changed conditions."""

from types import SimpleNamespace

import pytest

from paceline.conf.load import load
from paceline.flows.run.outcome import run_comparison_facts
from paceline.flows.study import trainings
from paceline.flows.study.trainings import PlannedArm, _check_conditions, confirm
from paceline.tasks.records.data import Pretrained
from paceline.tasks.speedup.study.ledger import Ledger
from paceline.tasks.train.plan import resolve
from tests.support.refusals import refused
from tests.support.studies import HARDWARE, PRECISION, arms_of, training

CONFIG = load("digits", ["seed=5"])
PLAN = resolve(CONFIG, HARDWARE, 1293)
PREPARED = SimpleNamespace(fingerprint="0123")
WEIGHTS = Pretrained(reference="weights.pt", path="/weights.pt", sha256="a" * 64, num_tensors=9)


def ready(plan=PLAN, weights=None):
    checked = SimpleNamespace(plan=plan, pretrained=weights)
    return [PlannedArm(arm, CONFIG, checked, None) for arm in arms_of(PRECISION)[:1]]


@pytest.fixture
def ledger(tmp_path):
    """A training of repeat 0 and one of repeat 1, which began with weights; a failed one counts for nothing."""
    ledger = Ledger(tmp_path / "arms.jsonl")
    (arm,) = ready()
    for repeat in range(2):
        config = CONFIG.model_copy(update={"seed": 5 + repeat})
        facts = run_comparison_facts(config, PREPARED, PLAN, WEIGHTS)
        ledger.add(training(arm.arm, repeat, 100.0, facts=facts))
    ledger.add(training(arm.arm, 2, 100.0, facts={}, status="failed", error="torn"))
    return ledger


def check(ledger, arms):
    request = SimpleNamespace(config=CONFIG, repeats=3, same_work=())
    _check_conditions("abc", ledger, request, arms, {CONFIG.data: PREPARED})


def test_it_goes_on_where_all_is_as_it_was(ledger):
    check(ledger, ready(weights=WEIGHTS))
    moved = WEIGHTS.model_copy(update={"path": "/elsewhere.pt"})
    check(ledger, ready(weights=moved))


@pytest.mark.parametrize(
    ("arms", "changed"),
    [
        (ready(weights=WEIGHTS.model_copy(update={"sha256": "b" * 64})), ["weights", "a" * 12, "b" * 12]),
        (ready(PLAN.model_copy(update={"device_name": "another"}), WEIGHTS), ["device", "another"]),
        (ready(PLAN.model_copy(update={"precision": "64-true"}), WEIGHTS), ["execution.precision", "64-true"]),
    ],
)
def test_it_does_not_where_something_has_changed(ledger, arms, changed):
    with refused("--resume", "abc", 1, *changed):
        check(ledger, arms)


def test_a_winner_and_its_baseline_are_trained_again_as_often_as_before(ledger, monkeypatch):
    base, arm = arms_of(PRECISION)
    config = CONFIG.model_copy(update={"seed": 5})
    trained = []

    def train(work, planned, repeat):
        trained.append((planned.arm.name, repeat))
        return training(planned.arm, repeat, 100.0)

    monkeypatch.setattr(trainings, "_run_one", train)
    monkeypatch.setattr(trainings, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))
    work = SimpleNamespace(request=SimpleNamespace(config=config, repeats=2), ledger=ledger)
    planned = [PlannedArm(one, config, None, None) for one in (base, arm)]
    ledger.add(training(base, 3, 100.0, is_fresh=True))
    confirm(work, planned, [arm])
    assert trained == [(arm.name, 2), (base.name, 2), (arm.name, 3)], "what is there is not trained again"
    assert {(run.arm, run.repeat) for run in ledger.runs() if run.is_fresh} == {
        (one.name, repeat) for one in (base, arm) for repeat in (2, 3)
    }
