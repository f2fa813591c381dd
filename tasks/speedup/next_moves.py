"""What to do next, ranked by the gain that was measured for it on one device."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.speedup.forecast.records import Advice
from tasks.speedup.study.records import Interval

FASTER_INPUT = "faster input"
"""The move that stands for all that could be done about loading."""

_WHY: dict[str, str] = {
    "recipe.batch_size": "a larger batch spreads what a step costs whatever its size; the recipe changes with it",
    "execution.precision": "reduced precision does the same arithmetic with fewer bits",
    "execution.compile": "compiling fuses operators; its first step takes seconds to minutes",
    "execution.memory_format": "the layout of images decides which convolution kernels are used",
    "execution.loading": "how batches reach the device",
    FASTER_INPUT: "the most that more loader threads or faster storage could give, measured on a batch that is there",
}


def rank_moves(measured: Mapping[str, Interval], unmeasured: Mapping[str, str]) -> tuple[Advice, ...]:
    """Certain gains first, the largest at the top; then what was not measured; then what does not pay.

    Args:
        measured: `key=value` -> throughput over that of the present execution.
        unmeasured: `key=value` -> why it was not measured.
    """
    gains: list[Advice] = []
    rest: list[Advice] = []
    for setting, ratio in sorted(measured.items(), key=lambda item: -item[1].value):
        (gains if ratio.low is not None and ratio.low > 1 else rest).append(_advice(setting, ratio))
    unknown = [Advice(setting=name, ratio=None, low=None, high=None, reason=why) for name, why in unmeasured.items()]
    return (*gains, *unknown, *rest)


def _advice(setting: str, ratio: Interval) -> Advice:
    why = _WHY.get(setting.partition("=")[0], "a single change of the present execution")
    if ratio.low is None or ratio.high is None:
        verdict = "too few rounds to be certain"
    elif ratio.low > 1:
        verdict = "certainly faster"
    elif ratio.high < 1:
        verdict = "certainly slower, leave it"
    else:
        verdict = "no measurable gain"
    return Advice(setting=setting, ratio=ratio.value, low=ratio.low, high=ratio.high, reason=f"{verdict}: {why}")
