"""From axes to arms: the full grid, or a ladder that adds one factor at a time. Nothing is run here."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from paceline.conf.config import Config
from paceline.conf.lightning import SECTIONS
from paceline.conf.load import ConfigError, field_paths, setting_hint, split_values
from paceline.tasks.errors import InputError
from paceline.tasks.speedup.comparability import is_execution
from paceline.tasks.speedup.study.records import StudyArm

NOT_AXES = ("name", "seed", "track.", "cluster.", "speedup.")
MIN_VALUES = 2

Axes = Mapping[str, Sequence[str]]


def parse_axes(texts: Sequence[str], *, is_own: bool = False) -> dict[str, list[str]]:
    """Read `field=a,b,c`, one text per axis; the first value is the baseline's. Raises InputError, as `expand` does.

    `is_own`: whether own Lightning code is trained, so that fields may be settings of LightningCLI.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        chosen = split_values(values)
        if not equals or len(chosen) < MIN_VALUES:
            raise InputError(
                f"--axis {text} gives fewer than {MIN_VALUES} values",
                hint="write the baseline's value first, for example --axis execution.precision=32-true,bf16-mixed",
                setting="--axis",
            )
        _check_axis(field, chosen, axes, is_own=is_own)
        axes[field] = chosen
    if not axes:
        raise InputError(
            "a study has no axis; give at least one, for example --axis execution.num_devices=1,2", setting="--axis"
        )
    return axes


def _check_axis(field: str, values: list[str], axes: Axes, *, is_own: bool) -> None:
    if field not in field_paths() and not (is_own and field.partition(".")[0] in SECTIONS):
        raise InputError(f"--axis {field} is not a setting", hint=setting_hint(field), setting="--axis")
    if field.startswith(NOT_AXES):
        raise InputError(
            f"--axis {field} changes neither the work nor how it is run; choose among data, model, recipe and execution"
        )
    if field in axes:
        raise InputError(f"--axis {field} is given twice; put all its values into one: {field}=a,b,c")
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise InputError(f"--axis {field} names {twice[0]} twice; each value is an arm of its own: name it once")


def expand(
    make: Callable[[list[str]], Config],
    axes: Axes,
    *,
    ladder: bool = False,
    is_own: bool = False,
    same_work: Collection[str] = (),
) -> tuple[StudyArm, ...]:
    """The arms of a study, baselines first in their groups.

    A grid has every combination; axes that are not `is_execution` change the work, so each of their combinations is a
    group with a baseline of its own. A ladder starts from the first value of every axis and adds the further values one
    by one, in the order given; each factor beyond the first is also tried alone, so that interactions show.

    Raises InputError: a setting cannot be an axis, an arm cannot be configured, or a ladder's axis changes the work.
    """
    for field, values in axes.items():  # a form's, or those of a stored study
        _check_axis(field, list(values), {}, is_own=is_own)
    work = [field for field in axes if not is_execution(field, same_work)]
    arms = _ladder(axes, work) if ladder else _grid(axes, work)
    for arm in arms:
        try:
            make(list(arm.overrides))
        except ConfigError as error:
            raise InputError(f"arm {arm.name}: {error}") from error
    return tuple(arms)


def _grid(axes: Axes, work: Sequence[str]) -> list[StudyArm]:
    execution = [field for field in axes if field not in work]
    arms = []
    for group in itertools.product(*(axes[field] for field in work)):
        for number, values in enumerate(itertools.product(*(axes[field] for field in execution))):
            chosen = dict(zip([*work, *execution], [*group, *values], strict=True))
            shared = ", ".join(f"{field}={chosen[field]}" for field in work)
            arms.append(_arm(chosen, axes, shared, is_baseline=number == 0))
    return arms


def _ladder(axes: Axes, work: Sequence[str]) -> list[StudyArm]:
    if work:
        raise InputError(
            f"--ladder with --axis {work[0]}, which changes the work itself; "
            "a ladder adds factors of execution: drop that axis or --ladder"
        )
    base = {field: values[0] for field, values in axes.items()}
    factors = [(field, value) for field, values in axes.items() for value in values[1:]]
    arms = [_arm(base, axes, is_baseline=True, rung=0)]
    reached = dict(base)
    for number, (field, value) in enumerate(factors, start=1):
        reached |= {field: value}
        arms.append(_arm(reached, axes, rung=number, factor=f"{_short(field, axes)}={value}"))
    for field, value in factors[1:]:
        arms.append(_arm(base | {field: value}, axes, factor=f"{_short(field, axes)}={value}"))
    return arms


def _arm(
    chosen: Mapping[str, str], axes: Axes, group: str = "", *, is_baseline: bool = False, **ladder: Any
) -> StudyArm:
    name = ", ".join(f"{_short(field, axes)}={value}" for field, value in chosen.items())
    overrides = tuple(f"{field}={chosen[field]}" for field in axes)
    return StudyArm(name=name, overrides=overrides, group=group, is_baseline=is_baseline, **ladder)


def _short(field: str, axes: Axes) -> str:
    """The last part of a dotted path, or all of it where two axes would read the same."""
    last = field.rpartition(".")[2]
    return field if sum(other.rpartition(".")[2] == last for other in axes) > 1 else last


def balanced_order(names: Sequence[str], num_repeats: int, seed: int) -> list[list[str]]:
    """The order of the arms in each repeat.

    Row after row of a Williams square, each row followed by its reverse: a linear drift within a pair of repeats falls
    on all arms alike, and over as many repeats as there are rows every arm stands at every place, and before every
    other arm, equally often. Source: Williams, "Experimental designs balanced for the estimation of residual effects
    of treatments" (1949).
    """
    count = len(names)
    first = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    orders = []
    for repeat in range(num_repeats):
        shift = (seed + repeat // 2) % count
        row = [(number + shift) % count for number in first]
        orders.append([names[number] for number in (row if repeat % 2 == 0 else row[::-1])])
    return orders
