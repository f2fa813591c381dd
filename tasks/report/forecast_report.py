"""The report of a prediction: what N devices would give, what stops it, what to do next, and how it was found."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from paceline.tasks.formatting import format_seconds
from paceline.tasks.redact import redact
from paceline.tasks.report.html import Html, bullets, columns, join, page, paragraph, section, table, tag, text, tiles
from paceline.tasks.report.plotting import BLUE, FAINT, FONT_POINTS, GREY, INK, ORANGE, new_figure, set_title, svg_text
from paceline.tasks.speedup.forecast.model import MAX_DEVICES
from paceline.tasks.speedup.forecast.records import (
    Advice,
    AdviseResult,
    Check,
    Interference,
    Limits,
    Prediction,
    calibration,
)

KINDS = ("strong", "weak")


def draw_advise(result: AdviseResult, checks: Sequence[Check]) -> dict[str, Figure]:
    """Pictures by name: predicted speedup, strong and weak, and the errors of earlier predictions."""
    figures: dict[str, Figure] = {}
    for kind in KINDS:
        predictions = [prediction for prediction in result.predictions if prediction.scaling == kind]
        if predictions:
            figures[f"predicted-{kind}"] = _draw_predicted(predictions, kind)
    if checks:
        figures["calibration"] = _draw_checks(checks)
    return figures


def _draw_predicted(predictions: Sequence[Prediction], kind: str) -> Figure:
    figure, (axis,) = new_figure(2.7)
    numbers = [1, *(prediction.num_devices for prediction in predictions)]
    axis.plot(numbers, numbers, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), label="ideal")
    lows, highs = ([1.0, *(getattr(prediction, end) for prediction in predictions)] for end in ("low", "high"))
    axis.fill_between(numbers, lows, highs, color=BLUE, alpha=0.2, linewidth=0)
    ratios = [1.0, *(prediction.ratio for prediction in predictions)]
    axis.plot(numbers, ratios, color=BLUE, marker="o", markersize=4, linewidth=1.6, label="predicted, 95 %")
    _double_log(axis, numbers)
    axis.set_xlabel("devices", fontsize=FONT_POINTS, color=INK)
    axis.legend(frameon=False, fontsize=FONT_POINTS - 1, labelcolor=INK, loc="upper left")
    set_title(axis, f"Predicted speedup, {kind} scaling")
    return figure


def _double_log(axis: Axes, numbers: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_locator(NullLocator())
    axis.set_xticks(list(numbers))
    axis.grid(color=FAINT, linewidth=0.7)


def _draw_checks(checks: Sequence[Check]) -> Figure:
    figure, (axis,) = new_figure(2.2)
    places = range(1, len(checks) + 1)
    for place, one in zip(places, checks, strict=True):
        band = (one.low / one.measured - 1, one.high / one.measured - 1)
        axis.plot([place, place], band, color=BLUE if one.inside else ORANGE, linewidth=2)
        axis.plot([place], [one.error], "o", color=BLUE if one.inside else ORANGE, markersize=5)
    axis.axhline(0.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xticks(list(places) if len(checks) <= 20 else [1, len(checks)])  # noqa: PLR2004  room for so many
    axis.set_xlabel("prediction, the oldest first", fontsize=FONT_POINTS, color=INK)
    set_title(axis, "Error of earlier predictions")
    return figure


def render_advise(result: AdviseResult, checks: Sequence[Check]) -> str:
    """The page as HTML.

    Args:
        result: The prediction.
        checks: Of earlier predictions, the oldest first.
    """
    svgs = {name: Html(svg_text(figure, name)) for name, figure in draw_advise(result, checks).items()}
    body = join(
        [
            _head(result),
            section("What would N devices give?", _predictions(result, svgs)),
            section("What limits it, and where does it stop paying?", _limits(result)),
            section("What to do next", bullets(_move(advice) for advice in result.advice)),
            section("Can this be believed?", _belief(checks, svgs.get("calibration", Html("")))),
            section("How was it found?", _method(result)),
        ]
    )
    return redact(page(f"advice for {result.preset}", body))


def _head(result: AdviseResult) -> Html:
    header = tag(
        "header",
        join(
            [
                tag("h1", text(f"{result.experiment} / advice for {result.preset}")),
                paragraph(f"run {result.run_id} · workload {result.workload} · {result.profile.label}"),
            ]
        ),
    )
    items = [(f"{one.num_devices} devices, {one.scaling} scaling", f"{one.ratio:.2f} x") for one in result.predictions]
    return join([header, tiles(items)])


def _predictions(result: AdviseResult, svgs: dict[str, Html]) -> Html:
    head = ("", "speedup", "95 % interval", "efficiency", "epoch", "all epochs", "device-hours", "cost", "bound by")
    rows = [
        (
            f"{one.num_devices} devices, {one.scaling}",
            f"{one.ratio:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
            f"{one.efficiency:.0%}",
            format_seconds(one.epoch_seconds),
            format_seconds(one.total_seconds),
            f"{one.device_hours:.3g}",
            None if one.cost is None else f"{one.cost:.3g}",
            one.bound,
        )
        for one in result.predictions
    ]
    return join([columns(*(svgs[name] for name in svgs if name.startswith("predicted"))), table(head, rows)])


def limit_sentences(limits: Limits) -> list[str]:
    """Where adding devices stops paying, in words."""
    kind = limits.scaling
    last, best = limits.last_paying_num_devices, limits.best_num_devices
    beyond = " or more" if best == MAX_DEVICES else ""
    sentences = [
        f"Under {kind} scaling doubling the devices gives 1.1 x or more up to N = {last}; "
        f"the fastest would be N = {best}{beyond}."
    ]
    if limits.smallest_paying_batch_size == 0:
        sentences.append(f"Under {kind} scaling two devices are slower than one with every batch.")
    elif limits.smallest_paying_batch_size is not None:
        sentences.append(
            f"Under {kind} scaling two devices beat one from {limits.smallest_paying_batch_size} samples per device "
            "and step on."
        )
    return sentences


def device_sentences(result: AdviseResult) -> list[str]:
    """Which devices are worth counting: on a CPU only those that come with cores of their own (decision 0005)."""
    threads = result.profile.num_threads
    if threads is None:
        return []
    return [
        f"A device is here {threads} core{'s' if threads > 1 else ''} of a CPU. N devices need N times those cores, on "
        "this host or more hosts; on the same cores more devices only divide them."
    ]


def _limits(result: AdviseResult) -> Html:
    sentences = [f"At the largest number of devices the step is bound by {result.bound}."]
    sentences += [sentence for limits in result.limits for sentence in limit_sentences(limits)]
    sentences += device_sentences(result)
    if result.cheapest is not None:
        sentences.append(cheapest_sentence(result))
    return bullets(sentences)


def cheapest_sentence(result: AdviseResult) -> str:
    """The answer to a deadline."""
    choice = result.cheapest
    assert choice is not None
    deadline = format_seconds(choice.deadline_seconds)
    if choice.num_devices is None or choice.total_seconds is None or choice.device_hours is None:
        return f"No number of devices trains within {deadline}."
    cost = f", cost {choice.cost:.3g}" if choice.cost is not None else ""
    return (
        f"Cheapest within {deadline}: {_devices(choice.num_devices)}, {format_seconds(choice.total_seconds)}, "
        f"{choice.device_hours:.3g} device-hours{cost}."
    )


def _devices(number: int) -> str:
    return f"{number} device" + ("s" if number > 1 else "")


def _move(advice: Advice) -> str:
    if advice.ratio is None:
        return f"`{advice.setting}`: not measured, {advice.reason}."
    return f"`{advice.setting}`: {_ratio(advice)} x the throughput, {advice.reason}."


def _ratio(advice: Advice) -> str:
    interval = f" [{advice.low:.2f}, {advice.high:.2f}]" if advice.low is not None and advice.high is not None else ""
    return f"{advice.ratio:.2f}{interval}"


def _belief(checks: Sequence[Check], picture: Html) -> Html:
    verdict = calibration(checks)["verdict"]
    rows = [
        (f"{one.num_devices} devices", f"{one.predicted:.2f} [{one.low:.2f}, {one.high:.2f}]", f"{one.measured:.2f}",
         f"{one.error:+.1%}", "yes" if one.inside else "no", one.run_id[:8])
        for one in checks
    ]  # fmt: skip
    parts = [paragraph(f"{verdict[:1].upper()}{verdict[1:]}.")]
    if rows:
        parts.append(columns(picture, table(("", "predicted", "measured", "error", "inside", "run"), rows)))
    return join(parts)


def _method(result: AdviseResult) -> Html:
    profile, link = result.profile, result.link
    rows = [
        (
            f"{point.batch_size} samples",
            format_seconds(point.seconds.value),
            _ends(point.seconds.low, point.seconds.high),
        )
        for point in profile.points
    ]
    name = "as measured" if link.source == "measured" else f"{link.name}, as given"
    bandwidth = "unlimited" if link.seconds_per_byte == 0 else f"{1 / link.seconds_per_byte / 1e9:.3g} GB/s"
    facts = [
        f"Profiled: {profile.label}; {profile.gradient_bytes / 2**20:.2f} MiB of gradients per step.",
        f"Link {name}: {link.latency_seconds * 1e6:.0f} microseconds per message, {bandwidth}, "
        f"all-reduce times within {link.relative_error:.0%}.",
        *(_company_sentence(company) for company in profile.company or ()),
        "A step on N devices: contention times the step at the device's share of the batch, plus waiting, plus the "
        "exchange, which grows with N as a ring all-reduce on that link does.",
    ]
    return columns(table(("one device, batch", "step", "95 % interval"), rows), bullets(facts))


def _company_sentence(company: Interference) -> str:
    contention, waiting, exchange = (one.value - 1 for one in (company.contention, company.waiting, company.exchange))
    return (
        f"Two devices at {company.batch_size} samples each: a step takes {contention:+.1%} because both compute, "
        f"{waiting:+.1%} more because they wait for each other, {exchange:+.1%} more because they exchange gradients."
    )


def _ends(low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return None
    return "the reference" if low == high else f"{format_seconds(low)} to {format_seconds(high)}"


def advise_table(result: AdviseResult) -> list[tuple[str, str]]:
    """Rows for the terminal."""
    rows = [
        (
            f"{one.num_devices} devices, {one.scaling}",
            f"{one.ratio:.2f} x [{one.low:.2f}, {one.high:.2f}], epoch {format_seconds(one.epoch_seconds)}, "
            f"bound by {one.bound}",
        )
        for one in result.predictions
    ]
    rows += [("limit", sentence) for limits in result.limits for sentence in limit_sentences(limits)]
    rows += [("devices", sentence) for sentence in device_sentences(result)]
    if result.cheapest is not None:
        rows.append(("deadline", cheapest_sentence(result)))
    for advice in result.advice:
        gain = "not measured" if advice.ratio is None else f"{_ratio(advice)} x"
        rows.append(("next", f"{advice.setting}: {gain}; {advice.reason}"))
    return rows
