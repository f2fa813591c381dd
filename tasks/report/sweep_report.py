"""The report of a sweep: one page that says which trial is best, what each setting did, and where the time went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.tasks.formatting import format_seconds
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
from paceline.tasks.report.study_report import ratio_text
from paceline.tasks.report.sweep_charts import draw_sweep
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, Scalar

DASH = "\N{EN DASH}"


def render_sweep(result: SweepResult, environment: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        result: What the sweep found.
        environment: Versions, hosts, commit: anything that JSON can hold.
    """
    svgs = {name: Html(svg_text(figure, name)) for name, figure in draw_sweep(result).items()}
    over = [svg for name, svg in svgs.items() if name.startswith("over-")]
    body = join(
        [
            _head(result),
            section("Which settings are best?", bullets(_settings_notes(result)), _pictures(svgs, "scores", "courses")),
            section("What did each setting do?", columns(*over) if over else paragraph("No trial has a score.")),
            section("Every trial", _trials(result)),
            section("What did several at once give?", _colocation(result), _pictures(svgs, "timeline")),
            folded("Environment", json.dumps(dict(environment), indent=2, default=str)),
        ]
    )
    return redact(page(f"sweep of {result.preset}: {len(result.trials)} trials", body))


def _pictures(svgs: Mapping[str, Html], *names: str) -> Html:
    return columns(*(svgs[name] for name in names if name in svgs))


def _head(result: SweepResult) -> Html:
    name = f"{result.experiment} / sweep of {result.preset}"
    facts = f"run {result.run_id} · {result.hardware}"
    header = tag("header", join([tag("h1", text(name)), paragraph(facts)]))
    best = result.best
    if best is None or best.score is None:
        hero = tag("div", text("no trial was done"), "big unknown")
    else:
        label = f"validation {SCORE_WORDS[result.score_name]} of trial {best.number}: {_settings(result, best)}"
        hero = tag("div", Html(text(f"{best.score:.2%}") + tag("small", text(label))), "big")
    items = [
        ("trials done", str(result.num("done"))),
        ("pruned", str(result.num("pruned"))),
        ("failed", str(result.num("failed"))),
        ("at the same time", str(result.at_once.value)),
        ("whole sweep", format_seconds(result.seconds)),
    ]
    return join([header, tag("div", join([hero, tiles(items)]), "hero")])


def _settings(result: SweepResult, trial: Trial) -> str:
    return ", ".join(
        f"{parameter.short} {value_text(trial.values[parameter.setting])}"
        for parameter in result.parameters
        if parameter.setting in trial.values
    )


def value_text(value: Scalar) -> str:
    """A value for people: four digits of a real number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trials(result: SweepResult) -> Html:
    head = (
        "",
        *(parameter.short for parameter in result.parameters),
        "score",
        "epochs",
        "time",
        "run",
        "what became of it",
    )
    ranked = sorted(result.trials, key=lambda trial: (trial.status != "done", -(trial.score or 0.0)))
    rows = [
        (
            f"trial {trial.number}",
            *_values(result.parameters, trial),
            _score(trial.score),
            f"{len(trial.scores)} of {result.num_epochs}",
            format_seconds(trial.seconds),
            (trial.run_id or DASH)[:8],
            trial.error or ("done" + (f", begun again {trial.restarts} times" if trial.restarts else "")),
        )
        for trial in ranked
    ]
    note = paragraph(
        "On the validation split after the last epoch; of a pruned trial after the last one it had.", "note"
    )
    return join([table(head, rows), note])


def _values(parameters: Sequence[Parameter], trial: Trial) -> Iterator[str]:
    for parameter in parameters:
        yield value_text(trial.values[parameter.setting]) if parameter.setting in trial.values else DASH


def _score(score: float | None) -> str:
    return DASH if score is None else f"{score:.2%}"


def _colocation(result: SweepResult) -> Html:
    """Measured, and what follows from it; the line between the two is drawn in words."""
    places = f"{result.at_once.value} trials at once ({result.at_once.reason})."
    if result.occupancy is not None:
        places += (
            f" Trials ran for {format_seconds(result.busy_seconds)}, in which {result.occupancy:.0%} of the places for "
            "them were taken; orange is the best trial, grey ones were pruned, pale ones failed."
        )
    colocation = result.colocation
    if colocation is None:
        return join([paragraph(places), paragraph(f"No speedup is known: {result.no_colocation}.", "note")])
    rows = [
        (name, ratio_text(ratio))
        for name, ratio in (
            ("one model alone on one such device", colocation.over_alone),
            ("one model on all devices, each batch shared", colocation.over_together),
            ("one model on one device of all cores", colocation.over_whole),
        )
        if ratio is not None
    ]
    head = ("one model on each device, side by side, against", "samples per second, times as many")
    note = (
        f"Steps of the sweep's recipe, {colocation.num_rounds} rounds of alternating blocks on these devices before "
        "the trials began; 95 % intervals."
    )
    return join([paragraph(places), table(head, rows), paragraph(note, "note"), bullets(colocation_notes(result))])


def colocation_notes(result: SweepResult) -> Iterator[str]:
    """What trying several at once gave, in sentences."""
    colocation, speedup = result.colocation, result.speedup
    if colocation is None:
        return
    if speedup is not None:
        yield (
            f"{ratio_text(speedup)} times as fast as one trial after the other on one such device: the steps' ratio "
            f"{ratio_text(colocation.over_alone)} times the {result.occupancy or 0:.0%} of the places that were taken. "
            "That start-up is held back by its neighbours as the steps are is assumed, not measured."
        )
    best = ratio_text(colocation.over_best)
    yield {
        "one model per device": f"One model per device: {best} times the samples of one model on all devices.",
        "one model on all devices": f"One model on all devices is better here: one per device has {best} times its "
        "samples; run the trials with --at-once 1.",
        "no certain difference": f"One model per device, or one on all: no certain difference ({best}).",
    }[colocation.layout]
    if colocation.contaminated:
        yield f"It was measured while others used the machine ({'; '.join(colocation.reasons)}): do not trust it."


def trial_line(trial: Trial) -> str:
    """What became of a trial, in a few words."""
    if trial.status == "done":
        return f"{_score(trial.score)} after {len(trial.scores)} epochs, {format_seconds(trial.seconds)}"
    return trial.error or trial.status


def sweep_table(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Head and rows for the terminal."""
    head = ["trial", *(parameter.short for parameter in result.parameters), "score", "epochs", "time", ""]
    rows = [
        [
            str(trial.number),
            *_values(result.parameters, trial),
            _score(trial.score),
            f"{len(trial.scores)}/{result.num_epochs}",
            format_seconds(trial.seconds),
            "best" if trial == result.best else "" if trial.status == "done" else trial.status,
        ]
        for trial in result.trials
    ]
    return head, rows


def sweep_notes(result: SweepResult) -> list[str]:
    """A handful of sentences: what to take, and what the sweep cannot say."""
    return [*_settings_notes(result), *colocation_notes(result)]


def _settings_notes(result: SweepResult) -> list[str]:
    return [*_best_notes(result), *_doubts(result)]


def _best_notes(result: SweepResult) -> Iterator[str]:
    best, words = result.best, SCORE_WORDS[result.score_name]
    if best is None or best.score is None:
        yield "No trial was done, so nothing can be said."
        return
    yield f"Best: `paceline run {result.preset} {' '.join(result.overrides(best))}`, with the sweep's other settings."
    if best.test_score is not None:
        yield (
            f"Its {words} is {best.score:.2%} on the validation split, by which it was chosen and which flatters it, "
            f"and {best.test_score:.2%} on the test split."
        )


def _doubts(result: SweepResult) -> Iterator[str]:
    best = result.best
    failed = [trial for trial in result.trials if trial.status == "failed"]
    if failed:
        yield f"Failed: {'; '.join(f'trial {trial.number}, {trial.error}' for trial in failed)}."
    for parameter in result.parameters if best else ():
        value = best.values.get(parameter.setting) if best else None
        if parameter.kind != "list" and isinstance(value, int | float) and _is_at_an_end(parameter, value):
            yield f"{parameter.setting}={value_text(value)} lies at an end of what was tried: try a wider range."


def _is_at_an_end(parameter: Parameter, value: float) -> bool:
    if parameter.kind == "log":
        return value < parameter.low * NEAR_FACTOR or value > parameter.high / NEAR_FACTOR
    near = NEAR_SHARE * (parameter.high - parameter.low)
    return value <= parameter.low + near or value >= parameter.high - near


NEAR_SHARE = 0.05
"""Of a range."""
NEAR_FACTOR = 1.25
"""On a logarithmic scale."""
