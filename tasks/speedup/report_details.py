"""What stands below the answers in the report of a run: quality, data, choices, and everything in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.config import Config
from tasks.scores import class_scores, quality_facts
from tasks.records import EvaluateResult, Plan, PreparedSet, Pretrained, SpeedupResult, TrainResult, Validity
from tasks.report.run_charts import format_seconds
from tasks.report.html import Html, bars, columns, folded, join, paragraph, table, tag, text
from tasks.speedup.payback import break_even_steps

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
        ("Begun with", Pretrained.model_validate(begun).told if begun else "random weights"),
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
