"""Report of a run: one page that opens anywhere, answering first how much faster and how certain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paceline.conf.config import Config
from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import round_ratios
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.training import EvaluateResult, ScoreName, TrainResult
from paceline.tasks.report import plotting as plot
from paceline.tasks.report.page import render_page, upper_first
from paceline.tasks.report.summary import budget_items, clock_text, energy_text, prediction_text
from paceline.tasks.scores import SCORE_WORDS, class_scores, quality_facts
from paceline.tasks.speedup.advice import next_steps
from paceline.tasks.speedup.baselines.ratios import HEADLINES
from paceline.tasks.speedup.data_sheet import sheet_of
from paceline.tasks.speedup.limit_share import LimitShare, format_flops, format_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import break_even_steps
from paceline.tasks.speedup.verdict import format_ends, format_ratio

MAX_CLASSES = 20  # classes that are listed; of more, the worst
MAX_REACH = 1.25  # rounds with a larger ratio, relative to the interval's end, lie outside of the picture
MAX_POINTS = 2000  # points of a curve that are drawn; longer curves are thinned
MAX_MARKED_EPOCHS = 40  # more epochs have no room for a mark each
ARM_FIELDS = (
    ("Devices", "num_devices"),
    ("Precision", "precision"),
    ("Compile", "compile"),
    ("Memory format", "memory_format"),
    ("Loading", "loading"),
    ("Strategy", "strategy"),
    ("Gradients exchanged in", "gradient_compression"),
    ("Shares of a batch", "loads"),
    ("Samples at once", "micro_batch"),
    ("Activation checkpointing", "activation_checkpointing"),
    ("Threads of a rank", "num_threads"),
)
FIELDS_IF_USED = ("strategy", "gradient_compression", "loads", "micro_batch", "activation_checkpointing")
"""Left out where every arm has the default, such as settings of several devices."""
ROLES = ("baseline", "candidate")
FIELDS_ELSEWHERE = {"batch_size", "variant"}  # as samples per step, and in the diagnosis
if {name for _, name in ARM_FIELDS} != set(Arm.model_fields) - FIELDS_ELSEWHERE:
    raise TypeError("the report does not show every field of an Arm; add the missing one to ARM_FIELDS")


@dataclass(frozen=True)
class ReportInput:
    """Everything that a report shows."""

    summary: Mapping[str, Any]  # the JSON of the run
    config: Config
    plan: Plan
    prepared: PreparedSet
    train: TrainResult
    speedup: SpeedupResult
    share: LimitShare = field(default_factory=LimitShare)
    evaluate: EvaluateResult | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)  # pictures of quality by name
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, hosts, commit: anything that JSON can hold


def render_report(report: ReportInput) -> str:
    """Render the page as HTML."""
    speedup, train, summary = report.speedup, report.train, report.summary
    shown = _shown(speedup)
    quality = {name: report.figures[name] for name in ("confusion", "examples", "mistakes") if name in report.figures}
    pretrained = summary.get("pretrained")
    details = {
        "Configuration": report.config.model_dump(mode="json"),
        "Plan": report.plan.model_dump(mode="json", exclude={"reasons"}),
        "Environment": {**report.environment, "hosts": train.hosts, "devices": train.devices},
        "Summary": dict(summary),
    }
    return render_page(
        "run",
        draw_speed(speedup, train, {}) | quality,
        report=report,
        headline="speedup not measured" if shown.ratio is None else f"{format_ratio(shown.ratio)} x",
        interval=_interval(shown),
        headlines=HEADLINES,
        badge=_badge(shown),
        verdict=upper_first(speedup.verdict).rstrip(".") + ".",
        prediction=prediction_text(summary.get("prediction")),
        arms=_arms(report),
        budget=budget_items(summary.get("time_budget") or {}),
        clock=clock_text(train.clock_difference),
        energy=energy_text(summary.get("train", {}).get("energy")),
        sheet=sheet_of(train.limit.device_name) if train.limit else None,
        flops=format_flops,
        percent=format_share,
        shares=sorted(speedup.shares.items(), key=lambda item: -item[1][0]),
        next_steps=next_steps(report.config, report.plan, report.prepared, train, speedup, report.evaluate),
        quality=quality_facts(report.evaluate) if report.evaluate else [],
        quality_pictures=list(quality),
        classes=_classes(report.evaluate) if report.evaluate else None,
        initial_weights=Pretrained.model_validate(pretrained).summary if pretrained else "random weights",
        ignored=", ".join(
            f"{count:,} {suffix or 'without suffix'}" for suffix, count in report.prepared.ignored.items()
        ),
        break_even=break_even_steps(train),
        details=details,
    )


def _shown(speedup: SpeedupResult) -> SpeedupResult:
    """The speedup with the ratio of the headline in place of the one over the naive baseline."""
    if speedup.headline is None:
        return speedup
    ratio = speedup.ratios[speedup.headline]
    scope = {"naive": speedup.scope, "competent": "within this process"}.get(speedup.headline)
    excludes_one = None if ratio.low is None or ratio.high is None else ratio.low > 1 or ratio.high < 1
    significance = {
        "significant": excludes_one if scope == "across starts" else None,
        "significant_within_process": excludes_one,
    }
    ends = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "scope": scope}
    return speedup.model_copy(update=ends | significance)


def _interval(speedup: SpeedupResult) -> str:
    of = HEADLINES[speedup.headline] if speedup.headline else None
    if speedup.ratio is None or speedup.low is None or speedup.high is None:
        return of or ""
    ends = format_ends(speedup.low, speedup.high, speedup.ratio)
    return " ".join(filter(None, (f"{ends} with 95 % confidence", speedup.scope, of)))


def _badge(speedup: SpeedupResult) -> tuple[str, str]:
    if speedup.ratio is None:
        return ("not divided" if speedup.cause == "not divided" else "not measured"), "plain"
    if speedup.contaminated:
        return "measured on a busy machine", "warn"
    if speedup.headline == "of_limit":
        return "share of the limit", "plain"
    is_across = speedup.significant is not None
    differs = speedup.significant if is_across else speedup.significant_within_process
    where = "" if is_across else " within this process"
    if differs is None:
        return f"too few {'runs' if speedup.baseline_runs else 'rounds'} for an interval", "warn"
    if differs and speedup.ratio > 1:
        return f"faster{where} (95 % CI above 1)", "good" if is_across else "plain"
    return (f"slower{where} (95 % CI below 1)", "warn") if differs else (f"no measurable difference{where}", "plain")


def _arms(report: ReportInput) -> list[tuple[object, ...]]:
    """List what each arm is, without the settings that none of them uses; empty without a baseline."""
    probe, speedup = report.train.probe, report.speedup
    rates = (speedup.baseline_samples_per_second, speedup.candidate_samples_per_second)
    throughput = ("Throughput", *(None if rate is None else f"{rate:,.0f} samples/s" for rate in rates))
    if speedup.baseline_runs:
        return [throughput, ("Execution", speedup.baseline, speedup.candidate)]
    if probe is None:
        return []
    arms = (probe.baseline, probe.candidate)
    defaults = {name: Arm.model_fields[name].default for name in FIELDS_IF_USED}
    unused = [name for name, default in defaults.items() if all(getattr(arm, name) == default for arm in arms)]
    return [
        throughput,
        *((label, *(getattr(arm, name) for arm in arms)) for label, name in ARM_FIELDS if name not in unused),
        *([("Arithmetic", *map(probe.arithmetic.get, ROLES))] if probe.arithmetic else []),
        ("Samples per step", *(probe.samples_per_step.get(role) for role in ROLES)),
    ]


def _classes(evaluate: EvaluateResult) -> dict[str, Any] | None:
    """Choose the classes to list, the worst first, and say which are left out."""
    word, scores = class_scores(evaluate)
    if not scores:
        return None
    measured = sorted(((name, value) for name, value in scores.items() if value is not None), key=lambda item: item[1])
    notes = []
    if len(measured) > MAX_CLASSES:
        notes.append(f"The {MAX_CLASSES} worst of {len(measured)} classes.")
    if len(measured) < len(scores):
        notes.append(f"{len(scores) - len(measured)} classes have no test sample.")
    return {"word": word, "scores": measured[:MAX_CLASSES], "note": " ".join(notes)}


def draw_speed(speedup: SpeedupResult, train: TrainResult, time_budget: Mapping[str, float]) -> dict[str, Figure]:
    """Draw all pictures of speed by name; those without data are left out."""
    rounds = round_ratios(train.probe.rounds) if train.probe else ()
    figures = {
        "speedup": draw_speedup(speedup, rounds),
        "training": draw_training(train.losses, train.first_step, train.validation_scores, train.score_name),
        "time_budget": draw_time_budget(time_budget),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_speedup(result: SpeedupResult, rounds: Sequence[float]) -> Figure | None:
    """Draw the baseline (1) and the candidate with its 95 % interval, a dot for each round; None if not measured."""
    if result.ratio is None:
        return None
    figure, (axis,) = plot.new_figure(1.75, "Throughput against the baseline")
    figure.set_label("speedup with its interval and rounds")
    axis.barh([1, 0], [1.0, result.ratio], height=0.62, color=[plot.GREY, plot.BLUE])
    spread = np.linspace(-0.2, 0.2, num=len(rounds)) if len(rounds) > 1 else np.zeros(len(rounds))
    axis.scatter(rounds, spread, s=14, color=plot.ORANGE, edgecolors=plot.PAPER, linewidths=0.5, zorder=3)
    if result.low is not None and result.high is not None:
        reach = [[result.ratio - result.low], [result.high - result.ratio]]
        axis.errorbar([result.ratio], [0], xerr=reach, color=plot.INK, capsize=4, linewidth=1.6, zorder=4)
    axis.axvline(1.0, **plot.DASHED)
    axis.set_yticks([1, 0], ["baseline", "this run"])
    # Room for the interval, for all but outrageous rounds, and for the label at the end of the bar.
    end = max(result.ratio, result.high or 0.0)
    end = max([end, *(ratio for ratio in rounds if ratio < MAX_REACH * end)])
    plot.add_text(axis, end, 0, f"  {format_ratio(result.ratio)} x", fontweight="bold")
    axis.set_xlim(0, 1.2 * max(1.0, end))
    axis.set_xlabel("throughput / baseline's (dots: single rounds)")
    return figure


def draw_training(
    losses: Sequence[float], first_step: int, validation_scores: Sequence[float], score_name: ScoreName = "accuracy"
) -> Figure | None:
    """Draw the loss of every step, smoothed over it, and below it the score after each epoch; None without steps."""
    if not losses:
        return None
    titles = ["Training loss"]
    if validation_scores:
        titles.append(f"Validation {SCORE_WORDS[score_name]} (best {max(validation_scores):.2%})")
    figure, axes = plot.new_figure(4.2 if validation_scores else 2.5, *titles)
    figure.set_label("loss and score over training")
    loss, course = np.asarray(losses, dtype=np.float64), axes[0]
    steps, width = np.arange(first_step, first_step + len(loss)), max(1, len(loss) // 50)
    drawn = np.unique(np.linspace(0, len(loss) - 1, num=min(len(loss), MAX_POINTS)).astype(int))
    course.plot(steps[drawn], loss[drawn], color=plot.GREY, alpha=0.45, linewidth=0.8)
    if width > 1:
        kernel = np.ones(width)
        smooth = np.convolve(loss, kernel, "same") / np.convolve(np.ones(len(loss)), kernel, "same")
        course.plot(steps[drawn], smooth[drawn], color=plot.BLUE, linewidth=1.8)
    course.grid(axis="y", color=plot.FAINT, linewidth=0.7)
    course.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    course.set_xlabel("step")
    if validation_scores:
        axis = axes[1]
        epochs = np.arange(1, len(validation_scores) + 1)
        mark_size = 4 * (len(epochs) <= MAX_MARKED_EPOCHS)
        axis.plot(epochs, validation_scores, color=plot.GREEN, linewidth=1.8, marker="o", markersize=mark_size)
        axis.grid(axis="y", color=plot.FAINT, linewidth=0.7)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_xlabel("epoch")
    return figure


def draw_time_budget(time_budget: Mapping[str, float]) -> Figure | None:
    """Draw sorted bars with their seconds and shares; None if the budget is empty."""
    items = budget_items(time_budget)
    if not items:
        return None
    title = f"Where {format_seconds(sum(time_budget.values()))} went"
    figure, (axis,) = plot.new_figure(0.7 + 0.27 * len(items), title)
    values = [max(seconds, 0.0) for _, seconds, _ in items]
    names = [plot.shorten(name.replace("_", " "), 24) for name, _, _ in items]
    plot.draw_bars(axis, names, values, [f"{format_seconds(seconds)}  {share:.1%}" for _, seconds, share in items])
    axis.set_xlim(0, max(values) * 1.55)
    return figure
