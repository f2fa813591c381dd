"""The benchmark of candidates through one ledger, in a short form, and its rules on times that are known."""

import pytest

from tests.benchmarks import judge_candidates as benchmark


def test_candidates_are_those_that_are_announced():
    ratios = benchmark.candidates(200)
    assert [sum(ratio > 1 for ratio in ratios), ratios.count(1.0), len(ratios)] == [50, 100, 200]
    assert all(0.02 <= abs(ratio - 1) <= 0.05 or 0.95 < ratio < 0.981 for ratio in ratios if ratio != 1)


def test_usual_rules_keep_what_lies_apart_and_one_keeps_too_much():
    old, apart = [1.0, 1.01, 0.99, 1.0] * 5, [0.9, 0.91, 0.89, 0.9] * 5
    assert benchmark.hyperfine_keeps(old, apart)
    assert benchmark.t_test_keeps(old, apart)
    assert not benchmark.hyperfine_keeps(apart, old)
    assert not benchmark.t_test_keeps(apart, old)
    near = [second - 0.008 for second in old]
    assert (benchmark.hyperfine_keeps(old, near), benchmark.t_test_keeps(old, near)) == (False, True)


@pytest.mark.slow
def test_twenty_candidates_leave_a_ledger_and_few_false_keeps(tmp_path):
    lines = benchmark.run(tmp_path, 20, 30)
    again = benchmark.run(tmp_path, 20, 30)
    assert again == lines, "nothing is judged twice"
    if sum(line["outcome"] is None or not line["num_rounds"] for line in lines) > 2:
        pytest.skip("the machine is busy")
    found = benchmark.summarise(lines)
    assert found["judge"]["false"] <= 1
    assert (tmp_path / "home" / "judge").exists()
