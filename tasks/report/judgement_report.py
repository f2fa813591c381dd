"""Report of a judgement: its rows in the terminal, its pictures and its page."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from paceline.tasks.formatting import format_interval, format_seconds, seconds_text
from paceline.tasks.judge.decision import log_ratios
from paceline.tasks.judge.records import Judgement, ProcessRun, SideName
from paceline.tasks.report.page import render_page
from paceline.tasks.report.plotting import BLUE, DASHED, GREY, LEGEND, ORANGE, new_figure
from paceline.tasks.speedup.verdict import format_ends, format_ratio

MEBIBYTE = 2**20
MIN_READ_BYTES = MEBIBYTE  # of a process from disks, so that it matters where its files were
COLOURS: dict[SideName, str] = {"old": ORANGE, "new": BLUE}


def judgement_rows(found: Judgement) -> Iterator[tuple[str, str]]:
    """Names and texts of the results; of a training by Paceline, speed is in samples."""
    yield "outcome", f"{found.outcome}: {found.reason}"
    if (ratio := found.ratio) is not None and ratio.low is not None and ratio.high is not None:
        old, new = (
            f"{1 / seconds:,.1f} samples/s" if found.is_training and seconds else seconds_text(seconds)
            for seconds in (found.old_seconds, found.new_seconds)
        )
        new += " now" + (" for a marked step" if any(run.num_steps for run in _runs(found)) else "")
        ends = format_ends(ratio.low, ratio.high, ratio.value)
        yield "speed", f"{format_ratio(ratio.value)} times as fast (95 % interval {ends}); {old} before, {new}"
    if found.difference is not None:
        ends = format_interval(found.difference.value, found.difference.low, found.difference.high, form=".4g")
        yield "quality", f"{found.parity}: difference {ends}, positive is better; margin {found.margin:.3g}"
    if sentence := describe_caches(found):
        yield "caches", sentence
    if found.needed_seconds is not None:
        yield "needed", f"about {found.needed_rounds} rounds: --budget {found.needed_seconds:.0f}"
    elif found.outcome == "RETEST":
        quiet = "more rounds than Paceline takes: the sides are too alike, or vary too much"
        yield "needed", quiet if found.num_rounds else "a quiet machine"
    contaminated = len(found.rounds) - len(found.valid_rounds)
    effort = f"{format_seconds(found.seconds)}, {found.num_rounds} rounds of 4 processes"
    yield "effort", effort + (f", and {contaminated} contaminated ones, which do not count" if contaminated else "")
    yield "ledger", f"{found.ledger}, candidate {found.candidate}, at a level of {found.level:.2g}"


def describe_caches(found: Judgement) -> str:
    """What the processes of one side read from disks, and those of the other do not; empty where they are alike."""
    if not found.valid_rounds:
        return ""
    old, new = (median(run.read_bytes for each in found.valid_rounds for run in each.of(name)) for name in COLOURS)
    if max(old, new) < MIN_READ_BYTES or max(old, new) < 2 * min(old, new):
        return ""
    amounts = f"{old / MEBIBYTE:,.0f} MiB from disks, a process of the new side {new / MEBIBYTE:,.0f} MiB"
    return f"a process of the old side reads {amounts}: the page cache may explain a part of the ratio"


def draw_judgement(found: Judgement) -> dict[str, Figure]:
    """Pictures by their names: the ratio of each round, the processes one after the other, and their metric."""
    figures = {"rounds": draw_rounds(found)}
    what = "Seconds of a sample" if found.is_training else "Seconds"
    figures["processes"] = _draw_processes(found, what, [run.seconds for run in _runs(found)])
    metrics = [run.metric for run in _runs(found)]
    if None not in metrics:
        figures["metric"] = _draw_processes(found, "Metric", [metric or 0.0 for metric in metrics])
    return figures


def draw_rounds(found: Judgement) -> Figure:
    """The ratio of each round, crosses for contaminated ones, and the interval of the judgement."""
    figure, (axis,) = new_figure(2.4, "Throughput of the new side over the old one")
    ratios = np.exp(log_ratios(found.rounds))
    is_valid = np.array([not each.contaminated for each in found.rounds])
    valid, contaminated = {"color": BLUE, "marker": "o"}, {"color": GREY, "marker": "x"}
    looks: tuple[tuple[Any, dict[str, Any]], ...] = ((is_valid, valid), (~is_valid, contaminated))
    for is_drawn, look in looks:
        axis.plot(1 + np.flatnonzero(is_drawn), ratios[is_drawn], linestyle="none", markersize=4, **look)
    if found.ratio is not None and found.ratio.low is not None and found.ratio.high is not None:
        axis.axhspan(found.ratio.low, found.ratio.high, color=BLUE, alpha=0.15, linewidth=0)
        axis.axhline(found.ratio.value, color=BLUE, linewidth=1)
    axis.axhline(1.0, **DASHED)
    axis.set_xlabel("round", loc="right")
    return figure


def _draw_processes(found: Judgement, title: str, values: list[float]) -> Figure:
    """Values of the processes in the order in which they ran, by their side."""
    figure, (axis,) = new_figure(2.4, f"{title} of each process")
    names = np.array([name for each in found.rounds for name in each.order])
    is_valid = np.array([not each.contaminated for each in found.rounds for _ in each.order])
    for name, colour in COLOURS.items():
        for is_drawn, marker in ((is_valid, "o"), (~is_valid, "x")):
            places = np.flatnonzero((names == name) & is_drawn)
            look: dict[str, Any] = {"color": colour, "marker": marker, "label": name if marker == "o" else None}
            axis.plot(1 + places, np.array(values)[places], linestyle="none", markersize=3, **look)
    axis.set_xlabel("process", loc="right")
    axis.legend(**LEGEND)
    return figure


def _runs(found: Judgement) -> list[ProcessRun]:
    return [run for each in found.rounds for run in each.runs]


def render_judgement(found: Judgement, figures: dict[str, Figure]) -> str:
    """Render the page with its pictures as HTML."""
    notes = [
        f"Old: `{found.old}`",
        f"New: `{found.new}`",
        "Each round has four fresh processes: old, new, new, old, or the reverse, as a coin decided.",
        "A cross stands for a round next to other work on the machine. It does not count.",
        "The interval holds the true ratio in 95 % of the judgements, over all planned looks together.",
        f"A candidate that is not faster is kept with a chance of at most {found.level:.2g}.",
        "The artifact `summary.json` holds the time and the metric of each process.",
    ]
    rows = [row for row in judgement_rows(found) if row[0] != "outcome"]  # the page's heading
    return render_page("judgement", figures, found=found, rows=rows, notes=notes)
