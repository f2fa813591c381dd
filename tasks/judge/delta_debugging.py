"""Delta debugging: the changes that a program needs to be slow, among many that were made at once.

The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002): parts of the
changes are tried alone, then everything but a part, and then smaller parts. What remains is minimal: without any one of
its changes, the program is not shown to be slow. With one guilty change among n it takes about 2 log2(n) tests, and at
most n^2 + 3 n. Their number is not known beforehand. So the level is not divided evenly: test number j spends the
share `lord.weight(j)`, and all shares together are 1 however many tests there are (union bound).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from paceline.tasks.judge.lord import weight

Change = TypeVar("Change")


def minimize(
    changes: Sequence[Change], is_slow: Callable[[tuple[Change, ...], float], bool | None], level: float
) -> tuple[Change, ...]:
    """The changes that are needed.

    Args:
        changes: all together make the program slow, and none of them does not.
        is_slow: whether some changes alone make it slow, at a level; None where these cannot be made without others.
        level: of all tests together.
    """
    remaining, num_parts = tuple(changes), 2
    tested: dict[tuple[Change, ...], bool] = {}

    def test(chosen: tuple[Change, ...]) -> bool:
        if chosen not in tested:
            tested[chosen] = bool(is_slow(chosen, level * weight(len(tested) + 1)))
        return tested[chosen]

    while len(remaining) > 1:
        ends = [len(remaining) * number // num_parts for number in range(num_parts + 1)]
        spans = list(pairwise(ends))
        parts = [remaining[start:end] for start, end in spans]
        others = [remaining[:start] + remaining[end:] for start, end in spans]
        if (part := next(filter(test, parts), None)) is not None:
            remaining, num_parts = part, 2
        elif (other := next(filter(test, others), None)) is not None:
            remaining, num_parts = other, max(2, num_parts - 1)
        elif num_parts < len(remaining):
            num_parts = min(len(remaining), 2 * num_parts)
        else:
            break
    return remaining
