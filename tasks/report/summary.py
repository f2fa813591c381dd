"""A run's summary as a short table for the terminal and for Prefect. Unknown quantities are left out, never guessed."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.tasks.formatting import format_interval, format_seconds
from paceline.tasks.records.data import Pretrained
from paceline.tasks.records.training import EvaluateResult
from paceline.tasks.scores import quality_facts
from paceline.tasks.speedup.baselines.ratios import HEADLINES
from paceline.tasks.speedup.limit_share import format_flops, format_share
from paceline.tasks.speedup.verdict import format_ends, format_ratio

NUM_BUDGET_ITEMS = 4
MIN_SHARE = 0.0005  # smaller shares of the time budget are summed into one item
MAX_CLOCK_DIFFERENCE = 0.01
MIN_CLASSES_FOR_TOP_5 = 21  # among fewer classes, the right one is nearly always among the first five


def summary_table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List rows (name, value) that answer what a user asks first."""
    rows = itertools.chain(_model_rows(summary), _speed_rows(summary), _run_rows(summary))
    return [(name, value) for name, value in rows if value]


def _model_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dataset := summary.get("dataset"):
        counts = " / ".join(f"{dataset[key]:,}" for key in ("num_train", "num_validation", "num_test"))
        rejected = f", {dataset['num_rejected']:,} rejected" if dataset.get("num_rejected") else ""
        origin = "reused" if dataset.get("reused") else f"prepared in {format_seconds(dataset['seconds'])}"
        yield "data", f"{counts} train / validation / test{rejected}; {dataset['fingerprint']}, {origin}"
    if pretrained := summary.get("pretrained"):
        yield "weights", Pretrained.model_validate(pretrained).summary
    if evaluate := summary.get("evaluate"):
        result = EvaluateResult.model_validate(evaluate)
        shown_top = ("top-5 accuracy",) if len(result.per_class_accuracy) >= MIN_CLASSES_FOR_TOP_5 else ()
        facts = quality_facts(result)
        shown = (f"{name} {value}" for name, value in facts if name in shown_top or not name.startswith("top-"))
        yield "quality", ", ".join(shown)


def _speed_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    train, speedup = summary.get("train") or {}, summary.get("speedup") or {}
    if (headline := speedup.get("headline")) is not None:
        value, low, high = (speedup["ratios"][headline][key] for key in ("value", "low", "high"))
        interval = "" if low is None or high is None else f" (95 % interval {format_ends(low, high, value)})"
        disturbed = "; the machine was disturbed meanwhile" if speedup["contaminated"] else ""
        yield "headline", f"{format_ratio(value)} x{interval} {HEADLINES[headline]}{disturbed}"
    yield "speedup", str(speedup.get("verdict") or "")
    yield "factors", _factors(speedup.get("factors"))
    for name, ratio in (speedup.get("ratios") or {}).items():
        yield name.replace("_", " "), ratio["meaning"]
    yield "limit", _limit(speedup, train, summary.get("execution") or {})
    if speedup.get("efficiency") is not None:
        low, high = speedup.get("efficiency_low"), speedup.get("efficiency_high")
        interval = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
        devices = f" of {train['world_size']} devices" if train else ""
        equal = speedup.get("equal_hardware")
        same = f"; {equal['value']:.2f} of one rank on all cores" if equal else ""
        yield "efficiency", f"{speedup['efficiency']:.2f}{interval}{devices}{same}"
    yield "prediction", prediction_text(summary.get("prediction"))


def _limit(speedup: Mapping[str, Any], train: Mapping[str, Any], execution: Mapping[str, Any]) -> str:
    if speedup.get("of_limit") is None:
        return f"unknown: {train['why_no_share']}" if train.get("why_no_share") else ""
    precision, limit = execution["precision"], train["limit"]
    rates = (format_flops(rate) for rate in (train["flops_per_second"], limit["flops_per_second"][precision]))
    parts = [f"{format_share(speedup['of_limit'])} of what this device does in {precision}: {' of '.join(rates)}"]
    if speedup["of_bandwidth"] is not None:
        parts.append(f"at least {format_share(speedup['of_bandwidth'])} of its memory bandwidth")
    if train["mfu"] is not None:
        parts.append(f"MFU {train['mfu']:.1%}")
    if limit["contaminated"]:
        parts.append("the machine was busy when its limit was measured")
    return ", ".join(parts)


def _factors(card: Mapping[str, Any] | None) -> str:
    texts = [
        f"{one['factor']} "
        + ("not measured" if one["ratio"] is None else f"{format_interval(one['ratio'], one['low'], one['high'])} x")
        for one in (card["factors"] if card else ())
        if one["basis"] != "unchanged"
    ]
    return f"{', '.join(texts)} ({card['method']})" if card and texts else ""


def budget_items(time_budget: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """List (name, seconds, share of all), largest first; tiny items are summed at the end, so nothing is lost."""
    total = sum(time_budget.values())
    if total <= 0:
        return []
    items = sorted(((name, seconds, seconds / total) for name, seconds in time_budget.items()), key=lambda it: -it[1])
    tiny = [item for item in items if abs(item[2]) < MIN_SHARE]
    if len(tiny) <= 1:
        return items
    seconds = sum(item[1] for item in tiny)
    return [*(item for item in items if item not in tiny), (f"{len(tiny)} tiny items", seconds, seconds / total)]


def prediction_text(prediction: Mapping[str, Any] | None) -> str:
    """Compare the predicted with the measured speedup, and say how good the predictions have been so far."""
    if not prediction:
        return ""
    return (
        f"{prediction['predicted']:.2f} x one device was predicted ({prediction['low']:.2f} to "
        f"{prediction['high']:.2f}), {prediction['measured']:.2f} x measured: {prediction['error']:+.1%}; "
        f"{prediction['calibration']}"
    )


def _run_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    train, evaluate = summary.get("train") or {}, summary.get("evaluate") or {}
    if (judged := summary.get("regression")) and judged["verdict"] != "too few runs":
        words = {"regression": "worse than before: ", "disturbed": "slower, and disturbed: "}
        yield "history", f"{words.get(judged['verdict'], '')}{judged['text']}"
    if model := summary.get("registered"):
        where = f"version {model['version']}, {model['alias']}" if model["version"] else "not registered"
        yield "registry", f"{model['name']}: {where}; {model['gate']}"
    rates = {"training": train.get("samples_per_second"), "prediction": evaluate.get("samples_per_second")}
    rate_texts = [f"{word} {rate:,.0f} samples/s" for word, rate in rates.items() if rate is not None]
    rate_texts += [f"{rate:,.0f} {unit}/s" for unit, rate in (train.get("units_per_second") or {}).items()]
    yield "throughput", ", ".join(rate_texts)
    yield "energy", energy_text(train.get("energy"))
    if stats := train.get("compile"):
        graphs = f"{stats['num_graphs']} graph" + ("s" if stats["num_graphs"] > 1 else "")
        origin = "from the cache, " if stats["is_warm"] else ""
        rate = f"hit rate {stats['hit_rate']:.2%} over {stats['num_calls']:,} calls"
        yield "compile", f"{graphs} in {format_seconds(stats['seconds'])}, {origin}{rate}"
    yield "restarts", "; ".join(map(_restart_text, train.get("restarts") or ()))
    yield "metrics", ", ".join(f"{name} {value:.4g}" for name, value in (summary.get("metrics") or {}).items())
    for best in train.get("best_models") or ():
        score = "not finite" if best["score"] is None else f"{best['score']:.4g}"
        chosen = f"{best['monitor']} {score}" if best["monitor"] else "newest"
        yield "best model", f"{chosen}: {best['path']}"
    yield "not measured", ", ".join(summary.get("not_measured") or ())
    choice = ((summary.get("execution") or {}).get("reasons") or {}).get("checkpoint_steps")
    if choice and isinstance(choice["value"], int):  # else the training was over before one was due
        yield "checkpoints", f"every {choice['value']:,} steps: {choice['reason']}"
    # Both totals have names: the budget covers the training process, which is a part of the run.
    seconds, items = summary.get("seconds"), budget_items(summary.get("time_budget") or {})
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, _, share in items[:NUM_BUDGET_ITEMS])
    process = f"training process {format_seconds(sum(item[1] for item in items))}: {shares}" if items else ""
    total = "" if seconds is None else f"{format_seconds(seconds)} in all"
    yield "time", "; ".join(filter(None, [total, process, clock_text(train.get("clock_difference"))]))


def _restart_text(restart: Mapping[str, Any]) -> str:
    wait = restart.get("wait_seconds")  # older summaries have none
    waited = f" ({format_seconds(wait)} waiting for the cluster)" if wait else ""
    resumed = f"resumed from step {restart['first_step']} after {format_seconds(restart['seconds'])}{waited}"
    return f"{restart['cause']}: {resumed}, at least {restart['lost_steps']} steps repeated"


def energy_text(energy: Mapping[str, Any] | None) -> str:
    """Energy of the training with its interval, its part above the idle power, and of a sample in the baseline."""
    if not energy:
        return ""
    joules, idle, neighbours = energy["joules"], energy["idle_watts"], ", ".join(energy["neighbours"])
    interval = " ({low:,.0f} to {high:,.0f})" if energy["low"] is not None else ", partly of neighbours"
    parts = [f"{joules:,.0f} J of {energy['source']}" + interval.format(**energy)]
    if idle is not None:
        parts.append(f"{joules - idle * energy['seconds']:,.0f} J above {idle:,.1f} W before the start")
    parts += [f"{role} {rate[0]:.3g} J/sample" for role, rate in energy["joules_per_sample"].items()]
    return "; ".join([*parts, *([f"neighbours: {neighbours}"] if neighbours else [])])


def clock_text(difference: float | None) -> str:
    """State by how much the time budget differs from the clock of another process; empty up to 1 %, or unknown."""
    if difference is None or abs(difference) <= MAX_CLOCK_DIFFERENCE:
        return ""
    word = "more" if difference > 0 else "less"
    return f"its items add up to {abs(difference):.1%} {word} than a clock outside of it measured"
