"""The report of a study: one page that answers how much faster, against what, why, and what to do next.

What the page shows follows Hoefler and Belli, "Scientific benchmarking of parallel computing systems" (2015): the base
case with its absolute times, an interval beside every ratio, bounds in the charts, nothing where nothing was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.redact import redact
from paceline.tasks.report.html import (
    Html,
    bullets,
    columns,
    folded,
    join,
    page,
    paragraph,
    section,
    table,
    tag,
    text,
    tiles,
)
from paceline.tasks.report.plotting import svg_text
from paceline.tasks.report.study_charts import draw_study, execution_name, why_no_ratio, winner
from paceline.tasks.scores import SCORE, score_word
from paceline.tasks.speedup.comparability import explain
from paceline.tasks.speedup.study.records import ArmSummary, StudyResult

DASH = "\N{EN DASH}"
FASTER = "faster"
"""The verdict on an arm that certainly beats its baseline and learns as much."""
CERTAIN_REPEATS = 6
"""Repeats from which on an interval needs no assumption on the shape of the noise."""


def render_study(result: StudyResult, environment: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        result: What the study found.
        environment: Versions, hosts, commit: anything that JSON can hold.
    """
    svgs = {name: Html(svg_text(figure, name)) for name, figure in draw_study(result).items()}
    body = join(
        [
            _head(result),
            section("How much faster, and is that certain?", _answer(result, svgs)),
            section("Compared with what?", _baselines(result)),
            section("Where did the time go?", _differences(result, svgs)),
            section("What limits it?", _limits(result)),
            section("What to do next", bullets(study_notes(result))),
            section("What does it cost?", _costs(result)),
            section("Every training", _runs(result)),
            folded("Environment", json.dumps(dict(environment), indent=2, default=str)),
        ]
    )
    return redact(page(f"study of {result.preset}: {len(result.arms)} arms", body))


def _head(result: StudyResult) -> Html:
    name = f"{result.experiment} / study of {result.preset}"
    facts = f"run {result.run_id} · {result.hardware}"
    header = tag("header", join([tag("h1", text(name)), paragraph(facts)]))
    failed = sum(arm.num_failed for arm in result.arms)
    items = [
        ("arms, each trained " + str(result.num_repeats) + " times", str(len(result.arms))),
        ("whole study", format_seconds(result.seconds)),
        ("trainings on a busy machine", str(result.contaminated)),
        ("failed trainings", str(failed)),
    ]
    return join([header, tag("div", join([_hero(result), tiles(items)]), "hero")])


def _hero(result: StudyResult) -> Html:
    """The ratio of the best arm that certainly beats its baseline; never that of one that does not."""
    best = max((arm for arm in result.arms if _verdict(arm) == FASTER), key=_value, default=None)
    if best is not None and best.ratio is not None:
        label = f"{best.arm.name}, {_interval_words(best.ratio)}"
        return tag("div", Html(text(f"{best.ratio.value:.2f} x") + tag("small", text(label))), "big")
    closest = nearest(result.arms)
    if closest is None or closest.ratio is None:
        return tag("div", text("no ratio"), "big unknown")
    words = f"nearest: {closest.arm.name}, {closest.ratio.value:.2f} x, {_verdict(closest)}"
    label = f"{words}; {_interval_words(closest.ratio)}"
    return tag("div", Html(text(_none_won(result.arms)) + tag("small", text(label))), "big unknown")


def nearest(arms: Iterable[ArmSummary]) -> ArmSummary | None:
    """The arm with the highest ratio, of those that learned as much as the baseline where there are any."""
    divided = (arm for arm in arms if arm.ratio is not None)
    return max(divided, key=lambda arm: (arm.parity != "worse", _value(arm)), default=None)


def _none_won(arms: Iterable[ArmSummary]) -> str:
    decided = all(_verdict(arm) == "slower" for arm in arms if arm.ratio is not None)
    return "no arm beats the baseline" if decided else "no arm certainly beats the baseline"


def _value(arm: ArmSummary) -> float:
    return arm.ratio.value if arm.ratio else 0.0


def _interval_words(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "too few repeats for an interval"
    return f"{interval.low:.2f} to {interval.high:.2f} with 95 % confidence"


def ratio_text(interval: Interval | None) -> str:
    """A ratio with its interval; a dash for unknown."""
    if interval is None:
        return DASH
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _number(value: float | None, form: str = ",.0f") -> str:
    return DASH if value is None else format(value, form)


def _percent(value: float | None, digits: int = 1) -> str:
    return DASH if value is None else f"{value:.{digits}%}"


def _seconds(value: float | None) -> str:
    return DASH if value is None else format_seconds(value)


def _verdict(arm: ArmSummary) -> str:
    if arm.ratio is None:
        return why_no_ratio(arm)
    if arm.significant is None:
        return "too few repeats"
    if not arm.significant:
        return "not significant"
    if arm.ratio.value < 1:
        return "slower"
    return "faster but worse" if arm.parity == "worse" else FASTER


def _score(arm: ArmSummary, word: str) -> str:
    if arm.score is None:
        return DASH
    name = f"{score_word([arm.score_name])} " if word == SCORE else ""
    return f"{name}{arm.score:.2%}" + ("" if arm.arm.is_baseline else f", {arm.parity}")


def _score_word(result: StudyResult) -> str:
    """Of what all arms are judged by."""
    return score_word(arm.score_name for arm in result.arms)


def _answer(result: StudyResult, svgs: Mapping[str, Html]) -> Html:
    word = _score_word(result)
    head = ("", "verdict", "steady state", "end to end", "pays after", "efficiency", word, "to target")
    rows = [
        (
            arm.arm.name,
            _verdict(arm),
            ratio_text(arm.ratio),
            ratio_text(arm.end_to_end_ratio),
            DASH if arm.break_even_epochs is None else f"{arm.break_even_epochs:.1f} epochs",
            ratio_text(arm.efficiency),
            _score(arm, word),
            _seconds(arm.seconds_to_target),
        )
        for arm in result.arms
    ]
    target = "each group's own baseline" if result.target_accuracy is None else f"{result.target_accuracy:.2%}"
    note = paragraph(
        "Steady state: samples per second after warm-up; end to end: process start to the end of training. Ratios are "
        "taken between trainings of the same repeat, with the same seed; 95 % intervals over the repeats. Efficiency: "
        f"against the same execution on the fewest devices. {word[0].upper()}{word[1:]} on the test split, judged "
        f"against the baseline. Target: validation {word} of {target}.",
        "note",
    )
    names = [
        name for name in svgs if name.partition("-")[0] in ("ratios", "prediction", "scaling", "ladder", "winners")
    ]
    return join([table(head, rows), note, columns(*(svgs[name] for name in names)), _acceleration(result)])


def _acceleration(result: StudyResult) -> Html:
    """Prediction beside training, and what compiling cost, where something was compiled."""
    if not any(arm.hit_rate is not None for arm in result.arms):
        return Html("")
    head = ("", "training", "prediction", "hit rate", "compiling")
    rows = [
        (
            arm.arm.name,
            ratio_text(arm.ratio),
            ratio_text(arm.prediction_ratio),
            _percent(arm.hit_rate, 2),
            _seconds(arm.compile_seconds),
        )
        for arm in result.arms
    ]
    note = paragraph(
        "Hit rate: share of the network's calls in training, validation and prediction that found their graph ready; "
        "every training began with empty caches.",
        "note",
    )
    return join([table(head, rows), note])


def _baselines(result: StudyResult) -> Html:
    rows = [
        (
            arm.arm.name,
            f"{_number(arm.samples_per_second)} samples/s",
            _seconds(arm.epoch_seconds),
            _seconds(arm.end_to_end_seconds),
            arm.num_done,
        )
        for arm in result.arms
        if arm.arm.is_baseline
    ]
    parts = [table(("baseline", "throughput", "epoch", "end to end", "trainings"), rows)]
    foreign = [arm for arm in result.arms if arm.match is not None and not arm.match.matches]
    if foreign:
        parts.append(paragraph("These arms did other work than their baseline, so no ratio is given:"))
        parts.append(bullets(f"{arm.arm.name}: {explain(arm.match)}" for arm in foreign if arm.match))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    parts.append(paragraph(f"On {result.hardware}; {versions}.", "note"))
    return join(parts)


def _differences(result: StudyResult, svgs: Mapping[str, Html]) -> Html:
    if not result.differences:
        return paragraph("No two arms could be compared.")
    rows = []
    for difference in result.differences:
        largest = ", ".join(f"{item.item.replace('_', ' ')} {item.difference:+.1f} s" for item in difference.items[:4])
        rows.append((difference.arm, f"{difference.difference:+.1f} s", largest))
    pictures = columns(*(svg for name, svg in svgs.items() if name.startswith("budget-")))
    note = paragraph("Seconds per item of rank 0's time, mean over the trainings; the items add up.", "note")
    return join([table(("arm", "against its baseline", "largest items"), rows), note, pictures])


def _limits(result: StudyResult) -> Html:
    head = ("", "limited by", "waiting for data", "exchanging gradients", "device idle", "largest memory")
    rows = [
        (
            arm.arm.name,
            arm.cause or DASH,
            _percent(arm.data_wait_fraction),
            _percent(arm.communication_fraction),
            _percent(arm.idle_fraction),
            DASH if arm.peak_memory_bytes is None else f"{arm.peak_memory_bytes / 2**20:,.0f} MiB",
        )
        for arm in result.arms
    ]
    return join([table(head, rows), _shares(result), bullets(_scaling_notes(result))])


def _shares(result: StudyResult) -> Html:
    """What a step is made of, where that was measured."""
    names = list(dict.fromkeys(name for arm in result.arms for name in arm.shares))
    if not names:
        return paragraph("What limits a step was not measured: run the study with --diagnose.", "note")
    rows = [(arm.arm.name, *(_share(arm.shares.get(name)) for name in names)) for arm in result.arms]
    note = paragraph(
        "Shares of a step, measured on the same ranks with one thing left out: the input there already, no exchange "
        "of gradients, one device alone, half the batch; 95 % intervals.",
        "note",
    )
    return join([table(("share of a step", *names), rows), note])


def _share(share: tuple[float, float | None, float | None] | None) -> str:
    if share is None:
        return DASH
    value, low, high = share
    return f"{value:.0%}" if low is None or high is None else f"{value:.0%} [{low:.0%}, {high:.0%}]"


def _scaling_notes(result: StudyResult) -> Iterator[str]:
    for scaling in result.scalings:
        where = f" ({scaling.group})" if scaling.group else ""
        for point in scaling.points:
            if point.karp_flatt is not None:
                serial = _small(point.karp_flatt)
                yield f"{point.num_devices} devices{where}: experimentally determined serial fraction {serial}."
        for fit in scaling.fits:
            found = ", ".join(f"{name.replace('_', ' ')} {_small(value)}" for name, value in fit.parameters.items())
            peak = "" if fit.peak_devices is None else f"; fastest on {fit.peak_devices:.0f} devices by this law"
            yield f"{fit.law}, {scaling.kind} scaling{where}: {found}; residual {fit.residual:.1%}{peak}."
        if scaling.refused:
            yield f"{scaling.kind.capitalize()} scaling{where}: {scaling.refused}."


def _small(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.4f}"
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _costs(result: StudyResult) -> Html:
    head = ("", "epoch", "devices", "energy per epoch", "cost per epoch")
    rows = [
        (
            arm.arm.name,
            _seconds(arm.epoch_seconds),
            arm.num_devices,
            DASH if arm.energy_joules_per_epoch is None else f"{arm.energy_joules_per_epoch / 3600:.3g} Wh",
            _number(arm.cost_per_epoch, ".3g"),
        )
        for arm in result.arms
    ]
    notes = []
    if result.price_per_device_hour is None:
        notes.append("No price was given: set speedup.price_per_device_hour.")
    if all(arm.energy_joules_per_epoch is None for arm in result.arms):
        notes.append("Neither NVML nor RAPL could be read: the energy is unknown.")
    return join([table(head, rows), paragraph(" ".join(notes), "note") if notes else Html("")])


def _runs(result: StudyResult) -> Html:
    head = ("", "done", "failed", "contaminated", "pairs", "runs", "last error")
    rows = [
        (
            arm.arm.name,
            arm.num_done,
            arm.num_failed,
            arm.contaminated,
            arm.num_pairs,
            ", ".join(run_id[:8] for run_id in arm.run_ids),
            arm.error or DASH,
        )
        for arm in result.arms
    ]
    return table(head, rows)


def study_table(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """Head and rows for the terminal."""
    word = _score_word(result)
    head = ["arm", "verdict", "steady state", "end to end", "efficiency", "samples/s", word]
    rows = [
        [
            arm.arm.name,
            _verdict(arm),
            ratio_text(arm.ratio),
            ratio_text(arm.end_to_end_ratio),
            ratio_text(arm.efficiency),
            _number(arm.samples_per_second),
            _score(arm, word),
        ]
        for arm in result.arms
    ]
    return head, rows


def study_notes(result: StudyResult) -> list[str]:
    """A handful of sentences: what to take, what did not pay, and what the study cannot say."""
    return [*_winners(result), *_losers(result), *_ladder_notes(result), *_doubts(result)]


def _winners(result: StudyResult) -> Iterator[str]:
    for group in dict.fromkeys(arm.arm.group for arm in result.arms):
        members = [arm for arm in result.arms if arm.arm.group == group and arm.parity != "worse"]
        best = winner(members, group)
        where = f"For {group}: " if group else ""
        if best is None:
            yield f"{where}the baseline did not run, so nothing can be said."
        elif best.arm.is_baseline:
            yield f"{where}{_none_won(members)}, {execution_name(best)}: keep it.{_nearest_words(members)}"
        else:
            word = score_word([best.score_name])
            settings = " ".join(f"`{key}={value}`" for key, value in best.execution.items() if "execution." in key)
            yield f"{where}take {settings}: {ratio_text(best.ratio)} x its baseline, {word} {best.parity}."


def _nearest_words(arms: Iterable[ArmSummary]) -> str:
    closest = nearest(arms)
    return (
        "" if closest is None else f" Nearest: {closest.arm.name}, {ratio_text(closest.ratio)} x ({_verdict(closest)})."
    )


def _losers(result: StudyResult) -> Iterator[str]:
    undecided = [arm.arm.name for arm in result.arms if arm.ratio is not None and not arm.significant]
    slower = [arm.arm.name for arm in result.arms if arm.ratio and arm.significant and arm.ratio.value < 1]
    worse = [arm.arm.name for arm in result.arms if arm.parity == "worse"]
    if slower:
        yield f"Certainly slower: {'; '.join(slower)}."
    if undecided:
        yield f"No certain difference: {'; '.join(undecided)}."
    if worse:
        yield f"Learned less than the baseline ({_score_word(result)}): {'; '.join(worse)}."


def _ladder_notes(result: StudyResult) -> Iterator[str]:
    if result.interaction is not None:
        yield (
            f"All factors together give {ratio_text(result.interaction)} times what the product of their single gains "
            "would: 1 means that they do not interact."
        )


def _doubts(result: StudyResult) -> Iterator[str]:
    failed = [arm.arm.name for arm in result.arms if arm.num_failed]
    if failed:
        yield f"Failed, and left out: {'; '.join(failed)}. The error stands with each of their runs."
    if result.contaminated:
        yield f"{result.contaminated} trainings were disturbed by other work; repeat the study on a quiet machine."
    if result.num_repeats < CERTAIN_REPEATS and any(arm.ratio for arm in result.arms):
        yield (
            f"With {result.num_repeats} repeats the intervals are wide and assume normal noise; "
            f"`--repeats {CERTAIN_REPEATS}` needs no such assumption."
        )
