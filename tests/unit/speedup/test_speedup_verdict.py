import pytest

from tasks.records import SpeedupResult
from tasks.speedup.verdict import speedup_result
from tests.unit.speedup.conftest import BASELINE, CANDIDATE, make_probe, make_train

TWO = CANDIDATE.model_copy(update={"num_devices": 2})
BF16 = BASELINE.model_copy(update={"precision": "bf16-mixed"})


def test_sentence_in_full():
    result = speedup_result(make_probe(candidate=BF16), make_train(None), num_cores=2)
    assert result.verdict == (
        f"{result.ratio:.2f} x faster than 1 device, 32-true, contiguous, eager, foreground (95 % interval "
        f"{result.low:.2f} to {result.high:.2f}, 12 paired rounds): bf16 arithmetic pays; the step is compute-bound."
    )
    assert result.ratio == pytest.approx(1.5, rel=0.02)
    assert (result.significant, result.contaminated, result.num_blocks) == (True, False, 12)
    assert result.efficiency is None
    assert result.baseline_samples_per_second == pytest.approx(500, rel=0.02)
    assert result.candidate_samples_per_second == pytest.approx(750, rel=0.02)


@pytest.mark.parametrize(
    ("cause", "probe", "wait"),
    [
        ("compute-bound", {}, 0.01),
        ("data-bound", {}, 0.4),
        ("launch-bound", {"samples_per_step": {"baseline": 2, "candidate": 2}}, 0.01),
        ("communication-bound", {"candidate": TWO, "efficiency": 0.6}, 0.01),
        ("compute-bound", {"candidate": TWO, "efficiency": 0.97}, 0.01),
        ("no measurable difference", {"ratio": 1.001}, 0.01),
        ("slower", {"ratio": 0.8}, 0.01),
        ("identical arms", {"ratio": 1.0, "candidate": BASELINE}, 0.01),
        ("too few rounds", {"num_rounds": 2}, 0.01),
        ("contaminated machine", {"foreign_load": 0.9}, 0.01),
        ("contaminated machine", {"steal_fraction": 0.1}, 0.01),
    ],
)
def test_causes(cause, probe, wait):
    result = speedup_result(make_probe(**probe), make_train(None, data_wait_fraction=wait), num_cores=2)
    assert result.cause == cause
    assert result.verdict.endswith(".")
    assert "{" not in result.verdict


def test_foreign_load_is_judged_by_the_size_of_the_machine():
    probe = make_probe(foreign_load=0.9)
    assert speedup_result(probe, num_cores=64).contaminated is False
    assert speedup_result(probe).contaminated is True


def test_unknown_stays_unknown():
    assert speedup_result(None) == SpeedupResult(verdict="not measured: the run had no probe", cause="not measured")
    quiet = speedup_result(make_probe(steal_fraction=None, foreign_load=None))
    assert quiet.contaminated is None
    few = speedup_result(make_probe(num_rounds=1))
    assert few.ratio is not None
    assert (few.low, few.high, few.significant) == (None, None, None)


def test_identical_arms_that_differ_are_distrusted():
    result = speedup_result(make_probe(ratio=1.2, candidate=BASELINE))
    assert result.cause == "identical arms"
    assert "distrust" in result.verdict


def test_efficiency_with_interval():
    result = speedup_result(make_probe(candidate=TWO, efficiency=0.9))
    assert result.efficiency == pytest.approx(0.9, rel=0.02)
    assert result.efficiency_low < result.efficiency < result.efficiency_high
