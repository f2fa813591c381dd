"""Search space of a sweep: settings and their values, read from text."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from paceline.conf.config import Config
from paceline.conf.lightning import SECTIONS
from paceline.conf.load import ConfigError, apply, plain_value
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Record

Scalar = bool | int | float | str | None
SWEPT = ("recipe.", "model.", "seed")  # beginnings of settings in which trials on equal data and devices may differ
FORM = "write log(a,b), lin(a,b), int(a,b[,step]) or x,y,z"
INSIDE = 1 / math.pi
"""Where between its ends a range is tried as well, so that a setting of whole numbers refuses one of real numbers."""
MIN_CHOICES = 2
NUM_TRIALS = 20  # default; a grid has its own number
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_RANGE = re.compile(r"(?P<kind>log|lin|int)\((?P<numbers>[^()]*)\)")


class Parameter(Record):
    """One setting and its values."""

    setting: str  # its dotted path
    kind: Literal["log", "lin", "int", "list"]
    """`log`: even on a logarithmic scale; `lin`: even; `int`: whole numbers; `list`: choices without an order."""
    low: float = 0.0
    high: float = 0.0
    step: int = 1  # `int` alone
    choices: tuple[Scalar, ...] = ()  # `list` alone

    @property
    def short(self) -> str:
        """The last part of its path."""
        return self.setting.rpartition(".")[2]

    def test_values(self) -> tuple[Scalar, ...]:
        """Values that a configuration must take for this parameter to be accepted."""
        match self.kind:
            case "list":
                return self.choices
            case "int":
                return int(self.low), int(self.high)
            case _:
                return self.low, self.low + (self.high - self.low) * INSIDE, self.high

    def all_values(self) -> tuple[Scalar, ...]:
        """All of them, for a grid. Raises InputError: they cannot be counted."""
        if self.kind == "list":
            return self.choices
        if self.kind == "int":
            return tuple(range(int(self.low), int(self.high) + 1, self.step))
        raise InputError(
            f"--param {self.setting}={self.kind}(...) has no end of values, and --sampler grid tries them all; "
            "name them, as in [0.01,0.1,1], or use --sampler tpe or random"
        )

    def override(self, value: Scalar) -> str:
        """`key=value` for one of its values."""
        return f"{self.setting}={text_of(value)}"


def text_of(value: Scalar) -> str:
    """A value as a configuration reads it, digits and all."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, float) else str(value)


def most_epochs(config: Config, parameters: Iterable[Parameter]) -> int:
    """Epochs of the longest trial."""
    swept = [parameter.test_values() for parameter in parameters if parameter.setting == "recipe.num_epochs"]
    return max((int(value or 0) for values in swept for value in values), default=config.recipe.num_epochs)


def num_proposals(num_trials: int | None, is_grid: bool, parameters: Iterable[Parameter]) -> int:
    """Number of trials: the requested number, at most the size of a grid. Raises InputError: a grid has no end."""
    if not is_grid:
        return NUM_TRIALS if num_trials is None else num_trials
    size = math.prod(len(parameter.all_values()) for parameter in parameters)
    return size if num_trials is None else min(size, num_trials)


def parse_parameters(texts: Sequence[str], *, is_own: bool = False) -> tuple[Parameter, ...]:
    """Read `setting=log(1e-3,1)`, `setting=a,b` or `setting=[a,b]`, one text for each; raise as `parse_parameter`."""
    parameters = tuple(parse_parameter(*split_parameter(text), is_own=is_own) for text in texts)
    if not parameters:
        fault = "a sweep varies nothing; give at least one, as in --param 'recipe.learning_rate=log(1e-3,1)'"
        raise InputError(fault, setting="--param")
    for first, second in itertools.combinations(parameters, 2):
        if first.setting == second.setting:
            raise InputError(f"--param {first.setting} is given twice; put all its values into one")
    return parameters


def split_parameter(text: str) -> tuple[str, str]:
    """Setting and values of `setting=values`. Raises InputError: it has another form."""
    setting, equals, values = text.partition("=")
    if not equals:
        raise InputError(f"--param {text} names no values; {FORM}, as in --param 'recipe.learning_rate=log(1e-3,1)'")
    return setting.strip(), values.strip()


def parse_parameter(setting: str, values: str, *, is_own: bool = False) -> Parameter:
    """Read one parameter, of own Lightning code a setting of LightningCLI.

    Raises InputError: no setting that can be swept, or values that cannot be read.
    """
    if not (is_own and setting.partition(".")[0] in SECTIONS):
        try:
            apply({}, f"{setting}=0")
        except ConfigError as error:
            raise InputError(f"--param: {error}") from error
        if is_own or not setting.startswith(SWEPT):
            choice = ", ".join(SECTIONS) if is_own else "recipe.*, model.* and seed"
            raise InputError(
                f"--param {setting}: the trials of a sweep share their data and are executed alike; choose among "
                f"{choice}, and compare executions with paceline study"
            )
    if (range_match := _RANGE.fullmatch(values)) is not None:
        return _range(setting, values, range_match)
    if "," in values and "(" not in values and not (values.startswith("[") and values.endswith("]")):
        values = f"[{values}]"
    if values.startswith("[") and values.endswith("]"):
        return Parameter(setting=setting, kind="list", choices=_choices(setting, values))
    raise InputError(f"--param {setting}={values} is not understood; {FORM}")


def _range(setting: str, values: str, found: re.Match[str]) -> Parameter:
    kind, given = found["kind"], f"--param {setting}={values}"
    try:
        numbers = [float(number) for number in found["numbers"].split(",")]
    except ValueError as error:
        raise InputError(f"{given}: {found['numbers']!r} is not a list of numbers; {FORM}") from error
    if len(numbers) not in ((2, 3) if kind == "int" else (2,)) or not all(map(math.isfinite, numbers)):
        raise InputError(f"{given} is not understood; {FORM}")
    low, high = numbers[:2]
    if low >= high:
        raise InputError(f"{given}: {low:g} is not below {high:g}; give the lower end first")
    if kind == "log" and low <= 0:
        raise InputError(f"{given}: a logarithmic scale has no {low:g}; start above 0 or use lin(...)")
    if kind != "int":
        return Parameter(setting=setting, kind="log" if kind == "log" else "lin", low=low, high=high)
    if any(number != int(number) for number in numbers):
        raise InputError(f"{given}: int(...) takes whole numbers; use lin(...) for others")
    low, high, step = (*map(int, numbers), 1)[:3]
    if step < 1 or (high - low) % step:
        raise InputError(
            f"{given}: steps of {step} do not lead from {low} to {high}; "
            + (f"end at {low + (high - low) // step * step}" if step > 0 else "use a step of 1 or more")
        )
    return Parameter(setting=setting, kind="int", low=low, high=high, step=step)


def _choices(setting: str, values: str) -> tuple[Scalar, ...]:
    try:
        parsed = plain_value(setting, values)
    except ConfigError as error:
        raise InputError(f"--param {error}") from error
    if not isinstance(parsed, list) or not all(isinstance(value, Scalar) for value in parsed):
        raise InputError(f"--param {setting}={values} is not a list of plain values; {FORM}")
    # YAML takes 1e-3 for a text, for want of a point.
    choices = tuple(
        float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value for value in parsed
    )
    if len(choices) < MIN_CHOICES or len({text_of(value) for value in choices}) < len(choices):
        raise InputError(f"--param {setting}={values} needs {MIN_CHOICES} or more values, each named once; {FORM}")
    return choices
