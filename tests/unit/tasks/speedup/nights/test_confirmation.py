"""Confirmation of an alarm: its verdict, the machine's part, and how often noise alone confirms one."""

import numpy as np
import pytest

from paceline.tasks.speedup.nights.confirmation import confirm

THEN = 1000.0


def rates(old, new, num_pairs=6, sd=0.01, seed=3):
    rng = np.random.default_rng(seed)
    return tuple(tuple(rate * np.exp(rng.normal(0, sd, num_pairs))) for rate in (old, new))


def test_a_loss_of_the_run_itself_is_confirmed():
    found = confirm(*rates(1000, 880), THEN, 0.05)
    assert (found.verdict, found.num_pairs) == ("confirmed", 6)
    assert found.ratio.low < 0.88 < found.ratio.high < 1
    assert found.machine_share < 0.1
    assert found.text.startswith("confirmed: the new run reaches 0.8")


def test_a_slower_machine_is_named_as_the_cause():
    found = confirm(*rates(900, 900), THEN, 0.05)
    assert found.verdict == "not confirmed"
    assert "excludes a loss of 5%" in found.text
    assert found.machine.value == pytest.approx(0.9, rel=0.02)
    assert found.machine_share > 0.9
    assert f"{found.machine_share:.0%} of the loss is due to the machine" in found.text


def test_a_loss_is_divided_between_run_and_machine():
    found = confirm(*rates(900, 810, sd=0.001), THEN, 0.05)
    assert found.verdict == "confirmed"
    assert found.machine_share == pytest.approx(0.5, abs=0.02)


def test_noise_that_hides_the_loss_is_undecided():
    found = confirm(*rates(1000, 960, sd=0.08), THEN, 0.05)
    assert found.verdict == "undecided"
    assert found.text.startswith("neither confirmed nor excluded")


def test_the_same_execution_is_about_the_machine_alone():
    found = confirm((950.0, 955.0, 945.0), (), THEN, 0.05)
    assert (found.verdict, found.ratio, found.num_pairs) == ("same execution", None, 0)
    assert "this is about the machine alone" in found.text
    assert "the last good run reaches 0.950 [" in found.text


def test_too_few_processes_and_an_unknown_rate_give_no_number():
    found = confirm((1.0, 1.0), (1.0,), THEN, 0.05)
    assert (found.verdict, found.ratio, found.machine) == ("not timed", None, None)
    assert found.text == "not checked: 1 of at least 3 processes of each run could be timed"
    found = confirm(*rates(1000, 880), None, 0.05)
    assert (found.verdict, found.machine, found.machine_share) == ("confirmed", None, None)
    assert "the machine's part is unknown" in found.text


@pytest.mark.parametrize("sd", [0.005, 0.02])
def test_equal_runs_are_rarely_confirmed_as_slower(sd):
    """One-sided, so in 2.5 % with processes that differ by `sd`."""
    found = [confirm(*rates(900, 900, sd=sd, seed=seed), THEN, 0.05).verdict for seed in range(400)]
    assert found.count("confirmed") <= 18
