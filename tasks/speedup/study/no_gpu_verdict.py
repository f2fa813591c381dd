"""The verdict of the study "no GPU?": one sentence by rule, and its limits.

By rule, in this order:

1. Something trained from scratch on this machine undisturbed, or there is nothing to divide by.
2. A GPU, if other runs of exactly the same work show that training from scratch takes at most half the time there that
   the quickest way takes here. A bound by a data sheet is not enough.
3. The way that is as good as training from scratch on the validation split the soonest, if it was ever so in each
   repeat, the ratio of the times is above 1 with all of its interval (where it has one), and the test split shows it
   to be on par or better.
4. The way that keeps nine tenths of the accuracy in half of the time.
5. Training from scratch.
"""

from collections.abc import Iterator
from typing import Literal

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import MIN_INTERVAL_ROUNDS, Interval
from paceline.tasks.speedup.study.inference import holds_parity, parity_text
from paceline.tasks.speedup.study.no_gpu import FEATURES, SCRATCH, TUNED, Approach, NoGpuResult

MIN_SHARE = 0.9  # of the accuracy of training from scratch, with which something cheaper is still worth a mention
MAX_TIME = 0.5  # of its time
MIN_GAIN_OF_GPU = 2.0

Choice = Literal["features", "fine-tune", "from scratch", "gpu", "undecided"]
TAKE: dict[str, Choice] = {TUNED: "fine-tune", FEATURES: "features", SCRATCH: "from scratch"}
WORDS = {TUNED: "fine-tune", FEATURES: "take features and a classifier", SCRATCH: "train from scratch"}


def judge(result: NoGpuResult) -> tuple[Choice, str]:
    """The recommendation without a GPU, and its reasons."""
    scratch = result.way(SCRATCH)
    approaches = [result.way(name) for name in (TUNED, FEATURES) if result.way(name).num_done]
    if doubt := _nothing_to_divide_by(scratch, approaches):
        return "undecided", doubt
    sooner = [way for way in approaches if _is_certain(way.target_ratio) and holds_parity(way.parity)]
    best = max(sooner, key=lambda way: _value(way.target_ratio), default=None)
    if rented := _rental_sentence(result, best or scratch):
        return "gpu", rented
    if best is not None:
        seconds, scratch_seconds = (format_seconds(way.target_seconds.value or 0.0) for way in (best, scratch))
        return TAKE[best.name], (
            f"Without a GPU, {WORDS[best.name]}: on the validation split it is as good as training from scratch in "
            f"{_times(best.target_ratio, best.num_pairs)} of the time ({seconds} against {scratch_seconds}), with "
            f"{_score(best)} against {_score(scratch)} of the test split right "
            f"({parity_text(best.parity, best.difference)})."
        )
    quick = [way for way in approaches if _is_certain(way.whole_ratio) and _value(way.whole_ratio) >= 1 / MAX_TIME]
    good = [way for way in quick if (way.score or 0.0) >= MIN_SHARE * (scratch.score or 0.0)]
    cheap = max(good, key=lambda way: way.score or 0.0, default=None)
    if cheap is not None:
        share = (cheap.score or 0.0) / (scratch.score or 1.0)
        return TAKE[cheap.name], (
            f"Without a GPU, {WORDS[cheap.name]}: {share:.2f} of the accuracy of training from scratch "
            f"({_score(cheap)} against {_score(scratch)}) in {_times(cheap.whole_ratio, cheap.num_pairs)} of its time, "
            f"though {_reach_sentence(cheap)}."
        )
    why = "; ".join(_why_not(way, scratch) for way in approaches) or "neither of the other ways was done"
    return "from scratch", f"Without a GPU, train from scratch: the weights do not help: {why}."


def _nothing_to_divide_by(scratch: Approach, others: list[Approach]) -> str:
    if not scratch.num_done:
        return f"No verdict: training from scratch failed ({scratch.error or 'it was not tried'})."
    if others and not any(way.num_pairs for way in others):
        return (
            "No verdict: other work disturbed the machine in every training from scratch, and what is disturbed is "
            "never divided by; repeat the study on a quiet machine."
        )
    if not scratch.num_reached:
        return "No verdict: training from scratch never reaches the target; train it longer, or lower --target."
    return ""


def _value(ratio: Interval | None) -> float:
    return ratio.value if ratio else 0.0


def _is_certain(ratio: Interval | None) -> bool:
    """Above 1, and so the whole of its interval where it has one."""
    return ratio is not None and ratio.value > 1 and (ratio.low is None or ratio.low > 1)


def _times(ratio: Interval | None, num_pairs: int) -> str:
    """Of the time of training from scratch, with its interval."""
    if ratio is None:
        return "an unknown share"
    if ratio.low is None or ratio.high is None:
        return f"{1 / ratio.value:.2f} (of {num_pairs} {'pair' if num_pairs == 1 else 'pairs'}: no interval)"
    return f"{1 / ratio.value:.2f} [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"


def _score(way: Approach) -> str:
    return "an unknown share" if way.score is None else f"{way.score:.2%}"


def _reach_sentence(way: Approach) -> str:
    if not way.num_reached:
        return "never as good on the validation split"
    return f"as good on the validation split in {way.num_reached} of {way.num_judged} repeats"


def _why_not(way: Approach, scratch: Approach) -> str:
    share = (way.score or 0.0) / (scratch.score or 1.0)
    time = f", in {_times(way.target_ratio, way.num_pairs)} of the time to the target" if way.target_ratio else ""
    accuracy = f"{share:.2f} of its accuracy ({parity_text(way.parity, way.difference)})"
    return f"{way.name} has {accuracy}, {_reach_sentence(way)}{time}"


def _rental_sentence(result: NoGpuResult, best: Approach) -> str:
    rented = next((way for way in result.ways if not way.is_measured and way.name == SCRATCH), None)
    if rented is None or rented.target_seconds.kind != "about":
        return ""
    seconds, ours = rented.target_seconds.value or 0.0, best.target_seconds.value
    if not seconds or ours is None or ours < MIN_GAIN_OF_GPU * seconds:
        return ""
    return (
        f"Rent a GPU: by {rented.basis.removeprefix('estimate: ')}, training from scratch reaches the target on "
        f"{rented.device} in about {format_seconds(seconds)}, and the quickest way here ({best.name}) takes "
        f"{format_seconds(ours)}."
    )


def notes_of(result: NoGpuResult) -> Iterator[str]:
    """Notes on the meaning of the figures and the limits of the study."""
    if result.target is not None:
        yield f"The target is {result.target:.2%} of the validation split right, as asked for."
    else:
        ends = ", ".join(f"{target:.2%}" for target in result.targets) or "none"
        yield f"The target is what training from scratch ends with on the validation split in the same repeat: {ends}."
    yield (
        "Time to the target runs from the first sample: of trainings to the end of the first epoch that is as good, "
        "of features over their extraction and the fit, all or nothing. Whole: from the start of a fresh process to "
        "the end of training. Neither has the preparation of the data, which all share, nor what the weights to begin "
        "with have cost."
    )
    yield from _doubts(result)
    if any(not way.is_measured for way in result.ways):
        yield (
            "Nothing was trained on a GPU: its rows are estimates, and say by what. A bound by a data sheet is never "
            "reached; it is not a forecast, and the verdict does not use it."
        )


def _doubts(result: NoGpuResult) -> Iterator[str]:
    ways = [way for way in result.ways if way.is_measured]
    for way in ways:
        if way.num_failed:
            yield f"{way.name}: {way.num_failed} trainings failed, the last one with: {way.error}"
        if 0 < way.num_reached < way.num_judged:
            yield (
                f"{way.name} reached the target in {way.num_reached} of {way.num_judged} repeats: its time is of those "
                "alone, and is not divided."
            )
    if disturbed := sum(way.contaminated for way in ways):
        yield (
            f"{disturbed} trainings were disturbed by other work; times are of the others where a way has any. Repeat "
            "the study on a quiet machine."
        )
    if result.prediction_disturbed:
        reasons = ", ".join(result.prediction_disturbed)
        yield (
            f"Predictions were timed on a machine that other work disturbed ({reasons}): "
            "take their rates for too low, and repeat the study on a quiet one."
        )
    if any(way.target_ratio or way.whole_ratio for way in ways) and any(
        way.num_pairs < MIN_INTERVAL_ROUNDS for way in ways if way.name != SCRATCH
    ):
        yield (
            f"Ratios of fewer than {MIN_INTERVAL_ROUNDS} repeats have no 95 % interval: repeat {MIN_INTERVAL_ROUNDS} "
            "times or more for one."
        )
