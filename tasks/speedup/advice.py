"""Advice from a run's results. Each piece names a setting and the observation behind it."""

from collections.abc import Iterator

from paceline.conf.config import Config
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.scores import SCORE_WORDS
from paceline.tasks.speedup.records import SpeedupResult

MIN_GAIN = 0.005  # a score that still rose by this much over the last quarter of the epochs has not settled
MIN_EPOCHS = 4


def next_steps(
    config: Config,
    plan: Plan,
    prepared: PreparedSet,
    train: TrainResult,
    speedup: SpeedupResult,
    evaluate: EvaluateResult | None,
) -> list[str]:
    """Advice as sentences; settings stand between backquotes."""
    advice = [*_on_speed(config, plan, speedup), *_on_epochs(train)]
    if evaluate:
        advice += _on_classes(evaluate)
    if prepared.num_rejected:
        advice.append(
            f"{prepared.num_rejected} samples were rejected: their names and reasons are in `rejected.jsonl` "
            "of the prepared set."
        )
    return advice or ["Nothing stands out: this run is a sound baseline for the next one."]


def _on_speed(config: Config, plan: Plan, speedup: SpeedupResult) -> Iterator[str]:
    cause = "not measured" if speedup.ratio is None and speedup.cause is None else speedup.cause
    larger_batch = f"`recipe.batch_size={config.recipe.batch_size * 2}`"
    more_time = f"`speedup.max_seconds={config.speedup.max_seconds * 3:g}`"
    fixed = {
        "not measured": "Measure the speedup: `speedup.baseline=probe`.",
        "not divided": "Measure the speedup against a baseline of its own: `speedup.baseline=probe`.",
        "too few runs": "Train the baseline twice more for an interval, or measure both in one run: "
        "`speedup.baseline=probe`.",
        "undecided": f"Give the probe more time to find the limit of the step: {more_time}.",
        "too few rounds": f"Give the probe more time for an interval: {more_time}.",
        "contaminated machine": "Repeat the run when the machine is quiet; do not compare others with this one.",
        "identical arms": "The run was its own baseline; change one of `execution.precision`, `execution.loading` "
        + ("or `execution.num_devices` " if plan.accelerator == "gpu" else "or `execution.memory_format` ")
        + "to learn what pays.",
        "no measurable difference": "The plain baseline is as fast: prefer it for its simplicity, or try a larger "
        f"{larger_batch}.",
        "slower": "The baseline is faster: run it instead, or find the guilty setting by changing one at a time.",
        "communication-bound": f"More samples per device and step make communication rarer: {larger_batch}; or use "
        "fewer devices.",
        "contention": "The devices share memory, caches or clock: use fewer, each with more threads, such as "
        f"`execution.num_devices={max(1, plan.world_size // 2)}`, or more hosts by `execution.num_nodes`.",
        "slow rank": "One rank is slower than the others: look at its host and device, or share the batches by speed: "
        "`execution.worker_load=measured`.",
        "update-bound": f"More samples per step make updates rarer: {larger_batch}; or use an optimizer with less "
        "state.",
        "memory-bound": "Memory traffic is the limit: `execution.precision=bf16-mixed` moves fewer bytes"
        + (", and `execution.compile=step` may fuse operators." if plan.compile == "off" else "."),
        "too small": "Starting took longer than training: measure what pays on a longer one, such as "
        f"`recipe.num_epochs={config.recipe.num_epochs * 10}`, or run small ones like this as they are.",
        "compile not amortised": "Compiling cost more than it saved: `execution.compile=off` for trainings of this "
        "length.",
        "launch-bound": f"Larger steps drown the overhead: {larger_batch}"
        + ("; so may `execution.compile=step`." if plan.compile == "off" else "."),
    }
    if cause in fixed:
        yield fixed[cause]
    elif cause == "data-bound":
        better = "resident" if plan.loading != "resident" else "streaming"
        yield f"Training waits for data: try `execution.loading={better}`, or put the prepared set on a faster disk."
    elif cause == "compute-bound":
        yield from _on_compute(config, plan)


def _on_compute(config: Config, plan: Plan) -> Iterator[str]:
    """Advise more devices, except on a CPU, where they only divide the cores of the host (decision 0005)."""
    execution = config.execution
    if plan.accelerator == "gpu":
        more = f"more devices would help, such as `execution.num_devices={execution.num_devices + 1}`."
    else:
        more = (
            f"a GPU or more hosts would help, such as `execution.num_nodes={execution.num_nodes + 1}` with a "
            "`cluster.kind` that reaches them. More devices on the same CPU only divide its cores."
        )
    yield f"The arithmetic is the limit: {more}"
    if plan.precision in ("32-true", "64-true", "tf32") and "precision" not in plan.reasons:  # else it was measured
        yield "Reduced precision may help where the hardware has it: `execution.precision=bf16-mixed`."


def _on_epochs(train: TrainResult) -> Iterator[str]:
    scores = train.validation_scores
    if len(scores) < MIN_EPOCHS:
        return
    last = max(1, len(scores) // 4)
    gain = max(scores[-last:]) - max(scores[:-last])
    if gain > MIN_GAIN:
        yield (
            f"Validation {SCORE_WORDS[train.score_name]} still rose by {gain:.1%} in the last {last} epochs: "
            f"`recipe.num_epochs={train.num_epochs * 2}` may give a better model."
        )


def _on_classes(evaluate: EvaluateResult) -> Iterator[str]:
    names = list(evaluate.per_class_accuracy)
    mistakes = [
        (count, names[row], names[column])
        for row, counts in enumerate(evaluate.confusion)
        for column, count in enumerate(counts)
        if row != column and count
    ]
    if mistakes:
        count, true, predicted = max(mistakes)
        yield (
            f"The commonest mistake takes {true} for {predicted} ({count} times): "
            "look at those images, and at their labels, first."
        )
