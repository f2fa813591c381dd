"""Report of a sweep: one page that says which trial is best, what each setting did, and where the time went."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.tasks.formatting import DASH, format_seconds, number_text
from paceline.tasks.report.page import interval_text, render_page
from paceline.tasks.report.sweep_charts import draw_sweep
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import Parameter, Scalar

NEAR_SHARE = 0.05  # distance from an end of a range that is at its end, relative to the range
NEAR_FACTOR = 1.25  # the same on a logarithmic scale


def render_sweep(result: SweepResult, environment: Mapping[str, Any]) -> str:
    """Render the page as HTML; the environment (versions, hosts, commit) is anything that JSON can hold."""
    return render_page(
        "sweep",
        draw_sweep(result),
        result=result,
        word=SCORE_WORDS[result.score_name],
        notes=_setting_notes(result),
        trials=sorted(result.trials, key=lambda trial: (trial.status != "done", -(trial.score or 0.0))),
        values_of=lambda trial: _values(result, trial),
        colocation_notes=list(_colocation_notes(result)),
        environment=dict(environment),
    )


def _value_text(value: Scalar) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _values(result: SweepResult, trial: Trial) -> list[str]:
    settings = [parameter.setting for parameter in result.parameters]
    return [_value_text(trial.values[setting]) if setting in trial.values else DASH for setting in settings]


def _colocation_notes(result: SweepResult) -> Iterator[str]:
    colocation, speedup = result.colocation, result.speedup
    if colocation is None:
        return
    if speedup is not None:
        yield (
            f"{interval_text(speedup)} times as fast as one trial after the other on one such device: the steps' ratio "
            f"{interval_text(colocation.over_alone)} times the {result.occupancy or 0:.0%} of the places that were "
            "taken. That neighbours slow down start-up as much as steps is assumed, not measured."
        )
    best = interval_text(colocation.over_best)
    yield {
        "one model per device": f"One model per device: {best} times the samples of one model on all devices.",
        "one model on all devices": f"One model on all devices is better here: one per device has {best} times its "
        "samples; run the trials with --at-once 1.",
        "no certain difference": f"One model per device, or one on all: no measurable difference ({best}).",
    }[colocation.layout]
    if colocation.contaminated:
        yield f"It was measured while others used the machine ({'; '.join(colocation.reasons)}): do not trust it."


def trial_line(trial: Trial) -> str:
    """Describe the outcome of a trial in a few words."""
    if trial.status == "done":
        return f"{number_text(trial.score, '.2%')} after {len(trial.scores)} epochs, {format_seconds(trial.seconds)}"
    return trial.error or trial.status


def sweep_table(result: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Make the head and rows for the terminal."""
    head = ["trial", *(parameter.short for parameter in result.parameters), "score", "epochs", "time", ""]
    rows = [
        [
            str(trial.number),
            *_values(result, trial),
            number_text(trial.score, ".2%"),
            f"{len(trial.scores)}/{result.num_epochs}",
            format_seconds(trial.seconds),
            "best" if trial == result.best else "" if trial.status == "done" else trial.status,
        ]
        for trial in result.trials
    ]
    return head, rows


def sweep_notes(result: SweepResult) -> list[str]:
    """Write a few sentences: what to take, and what the sweep cannot say."""
    return [*_setting_notes(result), *_colocation_notes(result)]


def _setting_notes(result: SweepResult) -> list[str]:
    best, word = result.best, SCORE_WORDS[result.score_name]
    notes = []
    if best is None or best.score is None:
        notes.append("No trial was done, so nothing can be said.")
    else:
        command = f"paceline run {result.preset} {' '.join(result.overrides(best))}"
        notes.append(f"Best: `{command}`, with the sweep's other settings.")
        if best.test_score is not None:
            notes.append(
                f"Its {word} is {best.score:.2%} on the validation split, by which it was chosen and which flatters "
                f"it, and {best.test_score:.2%} on the test split."
            )
    failed = [f"trial {trial.number}, {trial.error}" for trial in result.trials if trial.status == "failed"]
    if failed:
        notes.append(f"Failed: {'; '.join(failed)}.")
    for parameter in result.parameters if best else ():
        value = best.values.get(parameter.setting) if best else None
        if parameter.kind != "list" and isinstance(value, int | float) and _is_at_an_end(parameter, value):
            notes.append(f"{parameter.setting}={_value_text(value)} lies at an end of the range: try a wider range.")
    return notes


def _is_at_an_end(parameter: Parameter, value: float) -> bool:
    if parameter.kind == "log":
        return value < parameter.low * NEAR_FACTOR or value > parameter.high / NEAR_FACTOR
    near = NEAR_SHARE * (parameter.high - parameter.low)
    return value <= parameter.low + near or value >= parameter.high - near
