"""A run's summary as a short table for the terminal and for Prefect. Unknown quantities are left out, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.tasks.formatting import format_seconds
from paceline.tasks.records import EvaluateResult, Pretrained
from paceline.tasks.report.run_charts import budget_items
from paceline.tasks.scores import quality_facts

NUM_BUDGET_ITEMS = 4


def summary_table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows (name, value) that answer what a user asks first.

    Args:
        summary: A run's summary, in the shape of the JSON of `paceline run`; parts may be missing or None.
    """
    rows = [
        ("data", _data(summary.get("dataset"))),
        ("begun with", _pretrained(summary.get("pretrained"))),
        ("quality", _quality(summary.get("evaluate"))),
        ("speedup", _speedup(summary.get("speedup"))),
        ("efficiency", _efficiency(summary.get("speedup"), summary.get("train"))),
        ("prediction", prediction_text(summary.get("prediction"))),
        ("history", _history(summary.get("regression"))),
        ("registry", _registry(summary.get("registered"))),
        ("throughput", _throughput(summary.get("train"), summary.get("evaluate"))),
        ("compile", _compile(summary.get("train"))),
        ("restarts", _restarts(summary.get("train"))),
        ("checkpoints", _checkpoints(summary.get("execution"))),
        ("time", _time(summary.get("time_budget"), summary.get("seconds"))),
    ]
    return [(name, value) for name, value in rows if value]


def _data(dataset: Mapping[str, Any] | None) -> str:
    if not dataset:
        return ""
    counts = " / ".join(f"{dataset[key]:,}" for key in ("num_train", "num_validation", "num_test"))
    rejected = f", {dataset['num_rejected']:,} rejected" if dataset.get("num_rejected") else ""
    origin = "reused" if dataset.get("reused") else f"prepared in {format_seconds(dataset['seconds'])}"
    return f"{counts} train / validation / test{rejected}; {dataset['fingerprint']}, {origin}"


def _pretrained(pretrained: Mapping[str, Any] | None) -> str:
    return Pretrained.model_validate(pretrained).summary if pretrained else ""


def _quality(evaluate: Mapping[str, Any] | None) -> str:
    if not evaluate:
        return ""
    return ", ".join(f"{name} {value}" for name, value in quality_facts(EvaluateResult.model_validate(evaluate)))


def _speedup(speedup: Mapping[str, Any] | None) -> str:
    return str(speedup["verdict"]) if speedup and speedup.get("verdict") else ""


def _efficiency(speedup: Mapping[str, Any] | None, train: Mapping[str, Any] | None) -> str:
    if not speedup or speedup.get("efficiency") is None:
        return ""
    low, high = speedup.get("efficiency_low"), speedup.get("efficiency_high")
    interval = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    devices = f" of {train['world_size']} devices" if train else ""
    return f"{speedup['efficiency']:.2f}{interval}{devices}"


def prediction_text(prediction: Mapping[str, Any] | None) -> str:
    """What had been predicted, what was measured, and how good the predictions have been so far."""
    if not prediction:
        return ""
    return (
        f"{prediction['predicted']:.2f} x one device was predicted ({prediction['low']:.2f} to "
        f"{prediction['high']:.2f}), {prediction['measured']:.2f} x measured: {prediction['error']:+.1%}; "
        f"{prediction['calibration']}"
    )


def _throughput(train: Mapping[str, Any] | None, evaluate: Mapping[str, Any] | None) -> str:
    parts = []
    for word, part in (("training", train), ("prediction", evaluate)):
        if part and part.get("samples_per_second") is not None:
            parts.append(f"{word} {part['samples_per_second']:,.0f} samples/s")
    return ", ".join(parts)


def _history(regression: Mapping[str, Any] | None) -> str:
    if not regression or regression["verdict"] == "too few runs":
        return ""
    word = {"regression": "worse than before: ", "disturbed": "slower, and disturbed: "}.get(regression["verdict"], "")
    return f"{word}{regression['text']}"


def _registry(registered: Mapping[str, Any] | None) -> str:
    if not registered:
        return ""
    version = registered["version"]
    where = f"version {version}, {registered['alias']}" if version else "not registered"
    return f"{registered['name']}: {where}; {registered['gate']}"


def _compile(train: Mapping[str, Any] | None) -> str:
    stats = (train or {}).get("compile")
    if not stats:
        return ""
    graphs = f"{stats['num_graphs']} graph" + ("s" if stats["num_graphs"] > 1 else "")
    found = "from the cache, " if stats["is_warm"] else ""
    return (
        f"{graphs} in {format_seconds(stats['seconds'])}, {found}hit rate {stats['hit_rate']:.2%} over "
        f"{stats['num_calls']:,} calls"
    )


def _restarts(train: Mapping[str, Any] | None) -> str:
    restarts = (train or {}).get("restarts") or ()
    return "; ".join(
        f"{one['cause']}: on from step {one['first_step']} after {format_seconds(one['seconds'])}, "
        f"{one['lost_steps']} steps done again"
        for one in restarts
    )


def _checkpoints(execution: Mapping[str, Any] | None) -> str:
    choice = ((execution or {}).get("reasons") or {}).get("checkpoint_steps")
    if not choice or not isinstance(choice["value"], int):  # the training was over before one was due
        return ""
    return f"every {choice['value']:,} steps: {choice['reason']}"


def _time(time_budget: Mapping[str, float] | None, seconds: float | None) -> str:
    items = budget_items(time_budget or {})
    largest = ", ".join(
        f"{name.replace('_', ' ')} {format_seconds(spent)} ({share:.0%})"
        for name, spent, share in items[:NUM_BUDGET_ITEMS]
    )
    total = format_seconds(seconds) if seconds is not None else ""
    return ": ".join(part for part in (total, largest) if part)
