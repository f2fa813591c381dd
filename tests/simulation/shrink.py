"""Shortens a failing history: fewer faults, then shorter and earlier ones (Zeller's delta debugging)."""

from dataclasses import replace

from tests.simulation import world


def kind_of(violation):
    """The invariant that a violation names."""
    return violation.partition(":")[0]


def shorten(outcome, run=world.run):
    """The fewest faults with which the history still violates the same invariant."""
    kind = kind_of(outcome.violation)

    def fails(chosen):
        violation = run(outcome.seed, chosen).violation
        return violation is not None and kind_of(violation) == kind

    left = list(outcome.faults)
    size = max(1, len(left) // 2)
    while left:
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left = fewer
                size = max(1, min(size, len(left) // 2))
                break
        else:
            if size == 1:
                break
            size //= 2
    for index, fault in enumerate(left):
        for seconds in (1.0, fault.seconds / 2):
            shorter = [*left[:index], replace(fault, seconds=seconds), *left[index + 1 :]]
            if fails(shorter):
                left = shorter
                break
    return tuple(left)
