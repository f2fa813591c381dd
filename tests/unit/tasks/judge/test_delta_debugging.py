"""Delta debugging finds what is needed, and spends no more than its level."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.judge.delta_debugging import minimize


@given(st.data(), st.integers(1, 40))
def test_what_is_needed_remains(data, number):
    needed = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=4))
    levels, asked = [], []

    def is_slow(chosen, level):
        levels.append(level)
        asked.append(chosen)
        return needed <= set(chosen)

    assert set(minimize(range(number), is_slow, 0.05)) == needed
    assert sum(levels) <= 0.05
    assert len(set(asked)) == len(asked) <= number**2 + 3 * number, "no test is repeated"


def test_one_of_many_takes_few_tests():
    asked = []

    def is_slow(chosen, level):
        asked.append(chosen)
        return 700 in chosen

    assert minimize(range(1000), is_slow, 0.05) == (700,)
    assert len(asked) <= 20


def test_changes_that_need_each_other_stay_together():
    """Of a pair that fits only together, 2 and 3, the one is slow."""
    fits = lambda chosen: (2 in chosen) == (3 in chosen)  # noqa: E731
    found = minimize(range(8), lambda chosen, level: 3 in chosen if fits(chosen) else None, 0.05)
    assert found == (2, 3)
