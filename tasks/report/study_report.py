"""Report of a study: one page that answers how much faster, against what, why, and what to do next.

The page follows Hoefler and Belli, "Scientific benchmarking of parallel computing systems" (2015): the base case with
its absolute times, an interval with every ratio, bounds in the charts, nothing where nothing was measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.tasks.formatting import DASH, format_interval, number_text
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.report.page import interval_text, render_page
from paceline.tasks.report.study_charts import draw_study, execution_name, reason_without_ratio
from paceline.tasks.scores import SCORE, is_share, score_text, score_word
from paceline.tasks.speedup.comparability import explain
from paceline.tasks.speedup.limit_share import format_share
from paceline.tasks.speedup.study.analysis import winner
from paceline.tasks.speedup.study.inference import MARGIN, holds_parity, parity_text
from paceline.tasks.speedup.study.records import ArmSummary, StudyResult

FASTER = "faster"  # the verdict on an arm that significantly beats its baseline and learns as much
UNPROVEN = "faster, parity not shown"
UNCONFIRMED = "faster, not confirmed by fresh trainings"
MIN_EXACT_REPEATS = 6  # repeats from which on an interval needs no assumption on the shape of the noise


def render_study(result: StudyResult, environment: Mapping[str, Any]) -> str:
    """Render the page as HTML; the environment (versions, hosts, commit) is anything that JSON can hold."""
    share_names = list(dict.fromkeys(name for arm in result.arms for name in arm.shares))
    return render_page(
        "study",
        draw_study(result),
        result=result,
        hero=_hero(result),
        word=_score_word(result),
        is_own=_unit(result.arms) == " %",
        verdict_of=_verdict,
        format_share=format_share,
        score_of=_score,
        notes=study_notes(result),
        mismatches=[
            f"{arm.arm.name}: {explain(arm.match)}" for arm in result.arms if arm.match and not arm.match.matches
        ],
        share_names=share_names,
        shares_of=lambda arm: [
            format_interval(*arm.shares[name], form=".0%") if name in arm.shares else DASH for name in share_names
        ],
        environment=dict(environment),
    )


def _hero(result: StudyResult) -> tuple[bool, str, str]:
    """Choose the large and the small words: the ratio of the best arm that beats its baseline, never of another."""
    winners = [winner(result.arms, group) for group in dict.fromkeys(arm.arm.group for arm in result.arms)]
    best = max((arm for arm in winners if arm is not None and not arm.arm.is_baseline), key=_value, default=None)
    if best is not None and (ratio := _headline(best)) is not None:
        note = ", measured again" if best.confirmed else ""
        return True, f"{ratio.value:.2f} x", f"{best.arm.name}, {_confidence(ratio)}{note}"
    closest = nearest(result.arms)
    if closest is None or closest.ratio is None:
        return False, "no ratio", ""
    words = f"nearest: {closest.arm.name}, {closest.ratio.value:.2f} x, {_verdict(closest)}"
    return False, _no_winner(result.arms), f"{words}; {_confidence(closest.ratio)}"


def nearest(arms: Iterable[ArmSummary]) -> ArmSummary | None:
    """Find the arm with the highest ratio, if possible among those that learned as much as the baseline."""
    divided = (arm for arm in arms if arm.ratio is not None)
    return max(divided, key=lambda arm: (holds_parity(arm.parity), arm.parity != "worse", _value(arm)), default=None)


def _no_winner(arms: Iterable[ArmSummary]) -> str:
    verdicts = [_verdict(arm) for arm in arms if arm.ratio is not None]
    if UNCONFIRMED in verdicts:
        return "the fastest arm was not confirmed"
    if UNPROVEN in verdicts:
        return "no arm is shown to be faster and on par"
    is_decided = all(verdict == "slower" for verdict in verdicts)
    return "no arm beats the baseline" if is_decided else "no arm significantly beats the baseline"


def _headline(arm: ArmSummary) -> Interval | None:
    """The ratio of fresh trainings, where an arm was chosen among several, else its ratio."""
    return arm.confirmation if arm.confirmed else arm.ratio


def _value(arm: ArmSummary) -> float:
    ratio = _headline(arm)
    return ratio.value if ratio else 0.0


def _confidence(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "too few repeats for an interval"
    return f"{interval.low:.2f} to {interval.high:.2f} with 95 % confidence"


def _verdict(arm: ArmSummary) -> str:
    if arm.ratio is None:
        return reason_without_ratio(arm)
    if arm.significant is None:
        return "too few repeats"
    if not arm.significant:
        return "not significant"
    if arm.ratio.value < 1:
        return "slower"
    if not holds_parity(arm.parity):
        return "faster but worse" if arm.parity == "worse" else UNPROVEN
    return UNCONFIRMED if arm.confirmed is False else FASTER


def _score(arm: ArmSummary, word: str) -> str:
    if arm.score is None:
        return DASH
    name = f"{score_word([arm.score_name])} " if word == SCORE else ""
    return f"{name}{score_text(arm.score_name, arm.score)}" + ("" if arm.arm.is_baseline else f", {_parity(arm)}")


def _parity(arm: ArmSummary) -> str:
    return parity_text(arm.parity, arm.accuracy_difference, _unit([arm]))


def _unit(arms: Iterable[ArmSummary]) -> str:
    """The unit of differences of scores: of a metric of own code, they are shares of the baseline's."""
    return " points" if all(is_share(arm.score_name or "accuracy") for arm in arms) else " %"


def _score_word(result: StudyResult) -> str:
    return score_word(arm.score_name for arm in result.arms)


def study_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """Make the head and rows for the terminal."""
    word = _score_word(result)
    head = ["arm", "verdict", "steady state", "end to end", "efficiency", "samples/s", "of limit", word]
    rows = [
        [
            arm.arm.name,
            _verdict(arm),
            *(interval_text(ratio) for ratio in (arm.ratio, arm.end_to_end_ratio, arm.efficiency)),
            number_text(arm.samples_per_second),
            format_share(arm.of_limit),
            _score(arm, word),
        ]
        for arm in result.arms
    ]
    return head, rows


def study_notes(result: StudyResult) -> list[str]:
    """Write a few sentences: what to take, what did not pay, and what the study cannot say."""
    return [*_winners(result), *_losers(result), *_doubts(result)]


def _winners(result: StudyResult) -> Iterator[str]:
    for group in dict.fromkeys(arm.arm.group for arm in result.arms):
        members = [arm for arm in result.arms if arm.arm.group == group]
        best = winner(members, group)
        where = f"For {group}: " if group else ""
        if best is None:
            yield f"{where}the baseline did not run, so nothing can be said."
        elif best.arm.is_baseline:
            closest = nearest(members)
            if closest is None and len(members) > 1:
                yield f"{where}no arm has a ratio, so nothing can be said."
                continue
            note = ""
            if closest is not None:
                note = f" Nearest: {closest.arm.name}, {interval_text(closest.ratio)} x ({_verdict(closest)})."
            yield f"{where}{_no_winner(members)}, {execution_name(best)}: keep it.{note}"
        else:
            settings = " ".join(f"`{one}`" for one in best.arm.overrides if one not in group)
            word = f"{score_word([best.score_name])} {_parity(best)}"
            note = " in fresh trainings" if best.confirmed else ""
            yield f"{where}take {settings}: {interval_text(_headline(best))} x its baseline{note}, {word}."


def _losers(result: StudyResult) -> Iterator[str]:
    if slower := [arm.arm.name for arm in result.arms if arm.ratio and arm.significant and arm.ratio.value < 1]:
        yield f"Slower (95 % CI below 1): {'; '.join(slower)}."
    chance = [arm.arm.name for arm in result.arms if arm.ratio and not arm.significant and arm.ratio.significant]
    if chance:
        yield (
            f"Among {sum(arm.p_value is not None for arm in result.arms)} arms, the difference of these may be chance, "
            f"though the interval of each alone excludes 1 (Holm): {'; '.join(chance)}."
        )
    if undecided := [arm.arm.name for arm in result.arms if arm.ratio and not arm.significant]:
        yield f"No significant difference: {'; '.join(undecided)}."
    unproven = [f"{arm.arm.name} ({_parity(arm)})" for arm in result.arms if _verdict(arm) == UNPROVEN]
    if unproven:
        yield (
            f"Faster, but not shown to learn as much as the baseline within {100 * MARGIN:g}{_unit(result.arms)}: "
            f"{'; '.join(unproven)}. More repeats or more test samples can show it."
        )
    if worse := [arm.arm.name for arm in result.arms if arm.parity == "worse"]:
        yield f"Learned less than the baseline ({_score_word(result)}): {'; '.join(worse)}."


def _doubts(result: StudyResult) -> Iterator[str]:
    if result.interaction is not None:
        yield (
            f"All factors together give {interval_text(result.interaction)} times what the product of their single "
            "gains would: 1 means that they do not interact."
        )
    if failed := [arm.arm.name for arm in result.arms if arm.num_failed]:
        yield f"Failed, and left out: {'; '.join(failed)}. The error stands with each of their runs."
    if result.contaminated:
        yield f"{result.contaminated} trainings were disturbed by other work; repeat the study on a quiet machine."
    if result.num_repeats < MIN_EXACT_REPEATS and any(arm.ratio for arm in result.arms):
        yield (
            f"With {result.num_repeats} repeats the intervals are wide and assume normal noise; "
            f"`--repeats {MIN_EXACT_REPEATS}` needs no such assumption."
        )
