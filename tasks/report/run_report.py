"""The report of a run: one page that opens anywhere, answering first how much faster and how certain.

Pure text out of records; the looks are in `page`, the pictures in `charts`. The pictures of quality come in as markup,
since the stages do not import each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.conf.config import Config
from paceline.tasks.formatting import format_seconds
from paceline.tasks.records import Arm, EvaluateResult, Plan, PreparedSet, Pretrained, TrainResult, Validity
from paceline.tasks.redact import redact
from paceline.tasks.report.html import (
    Html,
    bars,
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
from paceline.tasks.report.run_charts import budget_items, draw_speed
from paceline.tasks.report.summary import prediction_text
from paceline.tasks.scores import class_scores, quality_facts
from paceline.tasks.speedup.advice import next_steps
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import break_even_steps, format_ratio


def render_report(report: ReportInput) -> str:
    """The page as HTML."""
    figures = draw_speed(report.speedup, report.train, {})
    labels = {"speedup": "speedup with its interval and rounds", "training": "loss and score over training"}
    svgs = {name: Html(svg_text(figure, labels[name])) for name, figure in figures.items()}
    body = join(
        [
            _head(report),
            section("How much faster, and is that certain?", _certainty(report, svgs.get("speedup", Html("")))),
            section("Compared with what?", _arms(report)),
            section("Where did the time go?", _budget(report)),
            section("What limits it?", _limits(report)),
            section("What to do next", _advice(report)),
            section("How good is the model?", quality(report, svgs.get("training", Html("")))),
            section("What data?", data(report)),
            section("Choices made for you", choices(report)),
            details(report),
        ]
    )
    return redact(page(f"{report.config.name}: {_headline(report.speedup)}", body))


def _headline(speedup: SpeedupResult) -> str:
    return "speedup not measured" if speedup.ratio is None else f"{format_ratio(speedup.ratio)} x"


def _head(report: ReportInput) -> Html:
    summary, speedup = report.summary, report.speedup
    origin = (f"run {summary.get('run_id')}", f"workload {summary.get('workload')}", report.plan.device_name)
    name = f"{summary.get('experiment')} / {report.config.name}"
    header = tag("header", join([tag("h1", text(name)), paragraph(" · ".join(origin))]))
    interval = ""
    if speedup.low is not None and speedup.high is not None:
        interval = f"{format_ratio(speedup.low)} to {format_ratio(speedup.high)} with 95 % confidence"
    big = text(_headline(speedup)) + tag("small", text(interval)) if interval else text(_headline(speedup))
    css = "big unknown" if speedup.ratio is None else "big"
    hero = [tag("div", Html(big), css), paragraph(_sentence(speedup.verdict), "verdict"), _badge(speedup)]
    return join([header, tag("div", join([*hero, tiles(_tiles(report))]), "hero")])


def _sentence(value: str) -> str:
    return (value[:1].upper() + value[1:]).rstrip(".") + "."


def _badge(speedup: SpeedupResult) -> Html:
    if speedup.ratio is None:
        label, css = ("not divided" if speedup.cause == "not divided" else "not measured"), "plain"
    elif speedup.contaminated:
        label, css = "measured on a busy machine", "warn"
    elif speedup.significant is None:
        label, css = f"too few {'runs' if speedup.baseline_runs else 'rounds'} to be certain", "warn"
    elif not speedup.significant:
        label, css = "no certain difference", "plain"
    else:
        label, css = ("certainly faster", "good") if speedup.ratio > 1 else ("certainly slower", "warn")
    return tag("span", text(label), f"badge {css}")


def _tiles(report: ReportInput) -> list[tuple[str, str]]:
    items = []
    if report.evaluate:
        name, value = quality_facts(report.evaluate)[0]
        items.append((f"test {name}", value))
    if report.train.samples_per_second is not None:
        items.append(("samples per second in training", f"{report.train.samples_per_second:,.0f}"))
    if report.speedup.efficiency is not None:
        items.append((f"efficiency of {report.train.world_size} devices", f"{report.speedup.efficiency:.0%}"))
    items.append((f"training, {report.train.num_epochs} epochs", format_seconds(report.train.seconds)))
    if report.summary.get("seconds") is not None:
        items.append(("whole run", format_seconds(report.summary["seconds"])))
    return items


def _certainty(report: ReportInput, picture: Html) -> Html:
    probe = report.train.probe
    if report.speedup.baseline_runs:
        return columns(picture, _runs_behind(report.speedup))
    if probe is None or report.speedup.ratio is None:
        return paragraph("This run had no probe. A speedup needs a baseline on the same hardware in the same run.")
    rows = [
        ("Paired rounds", f"{report.speedup.num_blocks}, stopped because: {probe.stopped_because}"),
        ("Steps per block", max(block.num_steps for blocks in probe.rounds for block in blocks)),
        ("Probe", f"{format_seconds(probe.seconds)}, warm-up included"),
        *validity_rows(probe.validity, probe.num_repeats),
    ]
    if report.summary.get("prediction"):
        rows.append(("Predicted before", prediction_text(report.summary["prediction"])))
    method = paragraph(
        "Blocks of both arms alternated (A B, B A, ...) on the same hardware; warm-up was thrown away. The ratio is "
        "the Hodges-Lehmann location of the rounds' ratios, the interval an exact signed-rank one, wide enough to hold "
        "under early stopping.",
        "note",
    )
    return columns(picture, join([table(("", ""), rows), method]))


def _runs_behind(speedup: SpeedupResult) -> Html:
    rows = [("Trainings of the baseline", "; ".join(speedup.baseline_runs))]
    method = paragraph(
        "Whole trainings of the same work, one after the other: what lay between them is in the ratio. It is the ratio "
        "to their geometric mean; the interval is a prediction interval by Student's t from how the trainings of the "
        "baseline scatter, and needs three of them. `speedup.baseline=probe` measures both at the same time.",
        "note",
    )
    return join([table(("", ""), rows), method])


def _arms(report: ReportInput) -> Html:
    probe, speedup = report.train.probe, report.speedup
    if speedup.baseline_runs:
        rates = (speedup.baseline_samples_per_second, speedup.candidate_samples_per_second)
        executed: list[tuple[object, ...]] = [
            ("Throughput", *(f"{rate:,.0f} samples/s" for rate in rates if rate is not None)),
            ("Execution", speedup.baseline, speedup.candidate),
        ]
        note = paragraph("Same data, model, batch and model of hardware; after warm-up.", "note")
        return join([table(("", "baseline", "this run"), executed), note])
    if probe is None:
        return paragraph("With nothing: the run was not measured against a baseline.")
    arms = {"baseline": probe.baseline, "this run": probe.candidate}
    throughputs = (speedup.baseline_samples_per_second, speedup.candidate_samples_per_second)
    rows: list[tuple[object, ...]] = [
        ("Throughput", *(None if value is None else f"{value:,.0f} samples/s" for value in throughputs)),
        *_execution_rows(tuple(arms.values())),
        ("Samples per step", *(probe.samples_per_step.get(role) for role in ("baseline", "candidate"))),
    ]
    return join([table(("", *arms), rows), paragraph("Same data, model, batch and hardware; steady state.", "note")])


def _execution_rows(arms: tuple[Arm, ...]) -> list[tuple[object, ...]]:
    """What each arm is; without the settings that none of them uses, such as those of several devices."""
    unused = [name for name in _IF_USED if all(getattr(arm, name) == Arm.model_fields[name].default for arm in arms)]
    return [(label, *(getattr(arm, name) for arm in arms)) for label, name in _ARM_FIELDS if name not in unused]


_IF_USED = ("strategy", "gradient_compression", "loads", "micro_batch")
_ARM_FIELDS = (
    ("Devices", "num_devices"),
    ("Precision", "precision"),
    ("Compile", "compile"),
    ("Memory format", "memory_format"),
    ("Loading", "loading"),
    ("Strategy", "strategy"),
    ("Gradients exchanged in", "gradient_compression"),
    ("Shares of a batch", "loads"),
    ("Samples at once", "micro_batch"),
    ("Threads of a rank", "num_threads"),
)
_SHOWN_OTHERWISE = {"batch_size", "variant"}  # as samples per step, and in the diagnosis
if {name for _, name in _ARM_FIELDS} != set(Arm.model_fields) - _SHOWN_OTHERWISE:
    raise TypeError("the report does not show every field of an Arm; add the missing one to _ARM_FIELDS")


def _budget(report: ReportInput) -> Html:
    items = budget_items(report.summary.get("time_budget") or {})
    if not items:
        return paragraph("Not recorded.")
    largest = max(share for _, _, share in items)
    total = sum(seconds for _, seconds, _ in items)
    rows = [
        (name.replace("_", " "), share / largest, (format_seconds(seconds), f"{share:.1%}"))
        for name, seconds, share in items
    ]
    note = f"The items add up to {format_seconds(total)}."
    return join([bars(rows), paragraph(note, "note")])


def _limits(report: ReportInput) -> Html:
    waited = report.train.data_wait_fraction
    waiting = "unknown" if waited is None else f"{waited:.1%}"
    rows: list[tuple[object, object]] = [
        ("Cause", report.speedup.cause or "unknown"),
        ("Waiting for data", f"{waiting} of the training steps' time"),
    ]
    if report.speedup.efficiency is not None:
        low, high = report.speedup.efficiency_low, report.speedup.efficiency_high
        interval = f", 95 % interval {low:.2f} to {high:.2f}" if low is not None and high is not None else ""
        rows.append(("Parallel efficiency", f"{report.speedup.efficiency:.2f}{interval}"))
    for name, share in (
        ("Exchanging gradients", report.train.communication_fraction if report.train.world_size > 1 else None),
        ("Device idle", report.train.idle_fraction),
    ):
        if share is not None:
            rows.append((name, f"{share:.1%} of the training's time"))
    if report.train.peak_memory_bytes is not None:
        rows.append(("Largest memory of a rank", f"{report.train.peak_memory_bytes / 2**20:,.0f} MiB"))
    return columns(join([paragraph(_sentence(report.speedup.verdict)), table(("", ""), rows)]), _diagnosis(report))


def _diagnosis(report: ReportInput) -> Html:
    """Measured shares of a step, where the probe had the arms for it."""
    speedup = report.speedup
    if not speedup.diagnosis:
        return paragraph(
            "Not diagnosed: run with --diagnose to measure what input, exchange, contention and overhead cost.", "note"
        )
    rows = []
    for name, (share, low, high) in sorted(speedup.shares.items(), key=lambda item: -item[1][0]):
        interval = f"{low:.0%} to {high:.0%}" if low is not None and high is not None else ""
        rows.append((name, share, (f"{share:.0%}", interval)))
    return join([bars(rows), bullets(speedup.diagnosis)])


def _advice(report: ReportInput) -> Html:
    results = (report.speedup, report.evaluate)
    return bullets(next_steps(report.config, report.plan, report.prepared, report.train, results))


MAX_CLASSES = 20
"""Classes that are listed; of more, the worst."""


@dataclass(frozen=True)
class ReportInput:
    """All that a report tells."""

    summary: Mapping[str, Any]
    """The JSON of the run."""
    config: Config
    plan: Plan
    prepared: PreparedSet
    train: TrainResult
    speedup: SpeedupResult
    evaluate: EvaluateResult | None = None
    quality_svgs: Mapping[str, str] = field(default_factory=dict)
    """<svg> elements by name, trusted markup: `confusion`."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, hosts, commit: anything that JSON can hold."""


def validity_rows(validity: Validity, num_repeats: int) -> list[tuple[str, object]]:
    """What else went on on the machine during a measurement; None is unknown."""
    steal, foreign = validity.steal_fraction, validity.foreign_load
    rows: list[tuple[str, object]] = [
        ("CPU time stolen", None if steal is None else f"{steal:.1%}"),
        ("Other processes", None if foreign is None else f"{foreign:.2f} cores"),
    ]
    if validity.min_cpu_mhz is not None and validity.max_cpu_mhz is not None:
        rows.append(("CPU clock", f"{validity.min_cpu_mhz:,.0f} to {validity.max_cpu_mhz:,.0f} MHz"))
    if validity.foreign_device_processes is not None:
        rows.append(("Others on the GPU", validity.foreign_device_processes))
    if validity.throttled:
        rows.append(("Slowed by", ", ".join(validity.throttled)))
    if validity.cached_fraction is not None:
        rows.append(("Data in the page cache", f"{validity.cached_fraction:.0%} at the start"))
    if num_repeats:
        rows.append(("Begun again", f"{num_repeats} times, because the machine was busy"))
    if validity.reasons:
        rows.append(("Contaminated", "; ".join(validity.reasons)))
    return rows


def quality(report: ReportInput, training: Html) -> Html:
    """The score, confusion, and the course of training."""
    evaluate = report.evaluate
    if evaluate is None:
        return columns(paragraph("Not evaluated."), training)
    begun = report.summary.get("pretrained")
    facts: list[tuple[object, object]] = [
        ("Test samples", f"{evaluate.num_samples:,}"),
        *((f"{name[0].upper()}{name[1:]}", value) for name, value in quality_facts(evaluate)),
        ("Begun with", Pretrained.model_validate(begun).summary if begun else "random weights"),
        ("Final training loss", f"{report.train.final_loss:.4g}"),
        ("Prediction", f"{evaluate.samples_per_second:,.0f} samples/s"),
    ]
    drawn = ("confusion", "examples", "mistakes")
    pictures = [Html(report.quality_svgs[name]) for name in drawn if name in report.quality_svgs]
    classes = [_classes(evaluate)] if class_scores(evaluate)[1] else []
    return join([columns(table(("", ""), facts), training), columns(*classes, *pictures)])


def _classes(evaluate: EvaluateResult) -> Html:
    word, scores = class_scores(evaluate)
    known = [(name, value) for name, value in scores.items() if value is not None]
    shown = sorted(known, key=lambda item: item[1])[:MAX_CLASSES]
    num_unknown = len(scores) - len(known)
    notes = []
    if len(shown) < len(known):
        notes.append(f"The {len(shown)} worst of {len(known)} classes.")
    if num_unknown:
        notes.append(f"{num_unknown} classes have no test sample.")
    rows = [(name, value, (f"{value:.1%}",)) for name, value in shown]
    title = tag("p", tag("b", text(f"{word[0].upper()}{word[1:]} per class, least first")))
    return join([title, bars(rows), paragraph(" ".join(notes), "note") if notes else Html("")])


def data(report: ReportInput) -> Html:
    """What was learned from."""
    prepared = report.prepared
    height, width, channels = prepared.picture_shape
    masks = " of pixels" if prepared.num_planes else ""
    ignored = ", ".join(f"{count:,} {suffix or 'without suffix'}" for suffix, count in prepared.ignored.items())
    origin = "reused, unchanged since it was prepared" if prepared.reused else "prepared in this run"
    signal = report.config.data.used_signal
    counts = (prepared.num_train, prepared.num_validation, prepared.num_test)
    rows: list[tuple[object, object]] = [
        ("Source", " ".join(filter(None, (report.config.data.source, report.config.data.root)))),
        ("Samples", "{:,} train, {:,} validation, {:,} test".format(*counts)),
        ("Rejected", f"{prepared.num_rejected:,} could not be used"),
        ("Ignored files", ignored or "none"),
        ("Images", f"{height} x {width} x {channels}, {len(prepared.class_names)} classes{masks}"),
        *([] if signal is None else [("Signals", signal.axes)]),
        ("Fingerprint", f"{prepared.fingerprint} ({origin}, {format_seconds(prepared.seconds)})"),
    ]
    return table(("", ""), rows)


def choices(report: ReportInput) -> Html:
    """Every `auto` with its reason, what the search for them took, and what compiling did."""
    plan, search = report.plan, report.train.search
    parts = [paragraph("None: every setting was given.")]
    if plan.reasons:
        rows = [(name.replace("_", " "), choice.value, choice.reason) for name, choice in plan.reasons.items()]
        parts = [table(("Setting", "Chosen", "Because"), rows)]
    if search is not None:
        spent = f"{format_seconds(search.seconds)} of the {format_seconds(search.budget_seconds)} it might take"
        slower = "; ".join(f"{slow.arm.label}: {slow.times:.1f} x the time" for slow in search.slower)
        parts.append(paragraph(f"Executions were timed before training, or before one alike, for {spent}."))
        parts += [paragraph(f"Left out after their first steps: {slower}.")] if slower else []
        parts += [paragraph(f"{label} failed, and was left out: {why}.") for label, why in search.failed.items()]
    return join([*parts, _compiling(report.train)])


def _compiling(train: TrainResult) -> Html:
    stats = train.compile
    if stats is None:
        return Html("")
    graphs = f"{stats.num_graphs} graph" + ("s" if stats.num_graphs > 1 else "")
    steps = break_even_steps(train)
    paid = "; it is not known to save time" if steps is None else f", won back after {steps:,.0f} steps"
    again = "".join(f" Made again: {reason}." for reason in stats.recompile_reasons)
    found = " (found in the cache)" if stats.is_warm else ""
    return paragraph(
        f"Compiled to {graphs} in {format_seconds(stats.seconds)}{found}{paid}. "
        f"{stats.hit_rate:.2%} of {stats.num_calls:,} calls found theirs ready.{again}"
    )


def details(report: ReportInput) -> Html:
    """Configuration, plan, environment and summary, folded."""
    parts = {
        "Configuration": report.config.model_dump(mode="json"),
        "Plan": report.plan.model_dump(mode="json", exclude={"reasons"}),
        "Environment": {**report.environment, "hosts": report.train.hosts, "devices": report.train.devices},
        "Summary": dict(report.summary),
    }
    return join(folded(title, json.dumps(part, indent=2, default=str)) for title, part in parts.items() if part)
