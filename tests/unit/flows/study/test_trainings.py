"""A resumed study refuses trainings on changed conditions."""

from types import SimpleNamespace

import pytest

from paceline.conf.load import load
from paceline.flows.run.outcome import run_comparison_facts
from paceline.flows.study.trainings import PlannedArm, _check_conditions
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
    request = SimpleNamespace(config=CONFIG, repeats=3)
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
