"""Confirmation of an alarm: the last good run, rebuilt, is timed against the new run on one node.

Both are timed in fresh processes in the order old, new, new, old, so that a drift of the machine falls on both, and the
ratio is estimated over the pairs of neighbours (the process is the unit of repetition: Kalibera and Jones, "Rigorous
Benchmarking in Reasonable Time", 2013, section 9). What was lost since then is the product of this ratio and of the
machine's part: the old run now over the old run then.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from paceline.tasks.formatting import format_interval
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, Interval, estimate_ratio
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.compare import ratio_across

ORDER = ("old", "new", "new", "old")
MIN_PAIRS = 3  # fewest that have an interval
Verdict = Literal["confirmed", "not confirmed", "undecided", "same execution", "not timed"]


class Confirmation(Record):
    """Whether an alarm is confirmed. None where not measured."""

    verdict: Verdict  # `same execution`: nothing that differs could be rebuilt, so that only the machine was compared
    ratio: Interval | None = None  # throughput of the new run over that of the last good one, both now
    machine: Interval | None = None  # throughput of the last good run now over what it reached then
    machine_share: float | None = None  # of the loss since then; None where nothing was lost
    num_pairs: int = 0
    causes: tuple[str, ...] = ()  # changes since the last good run that make this one slower, if they were searched
    earlier_run_id: str | None = None
    text: str


def not_timed(reason: str) -> Confirmation:
    """Confirmation of an alarm that was not timed."""
    return Confirmation(verdict="not timed", text=f"not checked: {reason}")


def confirm(old: Sequence[float], new: Sequence[float], then: float | None, loss: float) -> Confirmation:
    """Judge an alarm by samples per second of the last good run now (`old`), one for each process.

    `new` are those of the new run, in pairs with `old`; empty where both are executed in the same way. `then` is the
    last good run's in its own probe; None if unknown. `loss` is the smallest share that matters.
    """
    number = min(len(old), len(new)) if new else len(old)
    if number < MIN_PAIRS:
        return not_timed(f"{number} of at least {MIN_PAIRS} processes of each run could be timed")
    logs = np.log(new[:number]) - np.log(old[:number]) if new else np.empty(0)
    ratio, machine, share = estimate_ratio(logs, FIXED_CONFIDENCE), None, None
    text = "the machine's part is unknown, because the last good run has timed no probe"
    if then:
        machine = ratio_across([rate / then for rate in old])  # the rate then is that of one process
        text = f"the last good run reaches {_format(machine)} of what it reached then"
        total = math.log(machine.value * (ratio.value if ratio else 1.0))
        if total < 0:
            share = min(1.0, max(0.0, math.log(machine.value) / total))
            text += f": {share:.0%} of the loss is due to the machine"
    verdict, judged = _judge(ratio, loss)
    return Confirmation(
        verdict=verdict,
        ratio=ratio,
        machine=machine,
        machine_share=share,
        num_pairs=len(logs),
        text=f"{judged}; {text}",
    )


def _judge(ratio: Interval | None, loss: float) -> tuple[Verdict, str]:
    if ratio is None or ratio.low is None or ratio.high is None:
        text = "nothing that differs from the last good run could be executed again: this is about the machine alone"
        return "same execution", f"neither confirmed nor excluded: {text}"
    finding = f"the new run reaches {_format(ratio)} of the last good run's throughput when both are timed now"
    if ratio.high < 1:
        return "confirmed", f"confirmed: {finding}"
    if ratio.low > 1 - loss:
        return "not confirmed", f"not confirmed: {finding}, which excludes a loss of {loss:.0%}"
    return "undecided", f"neither confirmed nor excluded: {finding}"


def _format(ratio: Interval) -> str:
    return format_interval(ratio.value, ratio.low, ratio.high, form=".3f")
