"""Report of a forecast: what N devices would give, what stops it, what to do next, and how it was found."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from paceline.tasks.formatting import format_interval, format_seconds
from paceline.tasks.report import plotting as plot
from paceline.tasks.report.page import render_page
from paceline.tasks.speedup.forecast.model import MAX_DEVICES
from paceline.tasks.speedup.forecast.records import Advice, AdviseResult, Check, Limits, Prediction, calibration

KINDS = ("strong", "weak")
MAX_NUMBERED_CHECKS = 20  # more checks have no room for a number each


def draw_advise(result: AdviseResult, checks: Sequence[Check]) -> dict[str, Figure]:
    """Draw the predicted speedup, strong and weak, and the errors of earlier predictions, by name."""
    figures: dict[str, Figure] = {}
    for kind in KINDS:
        if predictions := [prediction for prediction in result.predictions if prediction.scaling == kind]:
            figures[f"predicted-{kind}"] = _draw_predicted(predictions, kind)
    if checks:
        figures["calibration"] = _draw_checks(checks)
    return figures


def _draw_predicted(predictions: Sequence[Prediction], kind: str) -> Figure:
    figure, (axis,) = plot.new_figure(2.7, f"Predicted speedup, {kind} scaling")
    numbers = [1, *(prediction.num_devices for prediction in predictions)]
    axis.plot(numbers, numbers, label="ideal", **plot.IDEAL)
    lows, highs = ([1.0, *(getattr(prediction, end) for prediction in predictions)] for end in ("low", "high"))
    axis.fill_between(numbers, lows, highs, color=plot.BLUE, alpha=0.2, linewidth=0)
    ratios = [1.0, *(prediction.ratio for prediction in predictions)]
    axis.plot(numbers, ratios, color=plot.BLUE, marker="o", markersize=4, linewidth=1.6, label="predicted, 95 %")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_locator(NullLocator())
    axis.set_xticks(numbers)
    axis.grid(color=plot.FAINT, linewidth=0.7)
    axis.set_xlabel("devices")
    axis.legend(loc="upper left", **plot.LEGEND)
    return figure


def _draw_checks(checks: Sequence[Check]) -> Figure:
    figure, (axis,) = plot.new_figure(2.2, "Error of earlier predictions")
    places = range(1, len(checks) + 1)
    for place, check in zip(places, checks, strict=True):
        colour = plot.BLUE if check.inside else plot.ORANGE
        ends = (check.low / check.measured - 1, check.high / check.measured - 1)
        axis.plot([place, place], ends, color=colour, linewidth=2)
        axis.plot([place], [check.error], "o", color=colour, markersize=5)
    axis.axhline(0.0, **plot.DASHED)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xticks(places if len(checks) <= MAX_NUMBERED_CHECKS else [1, len(checks)])
    axis.set_xlabel("prediction, the oldest first")
    return figure


def render_advise(result: AdviseResult, checks: Sequence[Check]) -> str:
    """Render the page as HTML, with earlier predictions against their measurements, the oldest first."""
    return render_page(
        "forecast",
        draw_advise(result, checks),
        result=result,
        checks=checks,
        calibration=calibration(checks)["verdict"],
        sentences=[
            f"At the largest number of devices the step is bound by {result.bound}.",
            *(sentence for _, sentence in _sentences(result)),
        ],
        moves=[
            f"`{advice.setting}`: {_gain(advice)}{'' if advice.ratio is None else ' the throughput'}, {advice.reason}."
            for advice in result.advice
        ],
    )


def limit_sentences(limits: Limits) -> Iterator[str]:
    """Say where adding devices stops paying."""
    kind, last, best = limits.scaling, limits.last_paying_num_devices, limits.best_num_devices
    smallest, beyond = limits.smallest_paying_batch_size, " or more" if best == MAX_DEVICES else ""
    yield (
        f"Under {kind} scaling doubling the devices gives 1.1 x or more up to N = {last}; "
        f"the fastest would be N = {best}{beyond}."
    )
    if smallest == 0:
        yield f"Under {kind} scaling two devices are slower than one with every batch."
    elif smallest is not None:
        yield f"Under {kind} scaling two devices beat one from {smallest} samples per device and step on."


def _sentences(result: AdviseResult) -> Iterator[tuple[str, str]]:
    """Subjects and sentences: where adding devices stops paying, what a device is, and the cheapest that is in time."""
    for limits in result.limits:
        yield from (("limit", sentence) for sentence in limit_sentences(limits))
    threads, choice = result.profile.num_threads, result.cheapest
    if threads is not None:  # on a CPU, more devices pay only with cores of their own (decision 0005)
        yield (
            "devices",
            f"A device is here {threads} core{'s' if threads > 1 else ''} of a CPU. N devices need N times those "
            "cores, on this host or more hosts; on the same cores more devices only divide them.",
        )
    if choice is None:
        return
    deadline = format_seconds(choice.deadline_seconds)
    if choice.num_devices is None or choice.total_seconds is None or choice.device_hours is None:
        yield "deadline", f"No number of devices trains within {deadline}."
        return
    devices = f"{choice.num_devices} device" + ("s" if choice.num_devices > 1 else "")
    cost = f", cost {choice.cost:.3g}" if choice.cost is not None else ""
    yield (
        "deadline",
        f"Cheapest within {deadline}: {devices}, {format_seconds(choice.total_seconds)}, "
        f"{choice.device_hours:.3g} device-hours{cost}.",
    )


def _gain(advice: Advice) -> str:
    return "not measured" if advice.ratio is None else f"{format_interval(advice.ratio, advice.low, advice.high)} x"


def advise_table(result: AdviseResult) -> list[tuple[str, str]]:
    """List rows for the terminal."""
    return [
        *(
            (
                f"{prediction.num_devices} devices, {prediction.scaling}",
                f"{prediction.ratio:.2f} x [{prediction.low:.2f}, {prediction.high:.2f}], "
                f"epoch {format_seconds(prediction.epoch_seconds)}, bound by {prediction.bound}",
            )
            for prediction in result.predictions
        ),
        *_sentences(result),
        *(("next", f"{advice.setting}: {_gain(advice)}; {advice.reason}") for advice in result.advice),
    ]
