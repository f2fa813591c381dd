"""From the blocks of a training loop to its cause, by the rules of the diagnosis of a probe."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from paceline.tasks.errors import one_line
from paceline.tasks.measure.device_limit import limit_cache, measure_limit
from paceline.tasks.measure.paired_ratio import Interval, estimate_ratio
from paceline.tasks.speedup.diagnosis import MIN_SHARE, share_interval
from paceline.tasks.speedup.limit_share import format_share
from paceline.tasks.speedup.verdict import MIN_STEP_SECONDS, format_ends, format_ratio
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.records import PARTS, Step, StepCause, WatchResult, seconds_of

LIMIT_SECONDS = 1.0  # for the rates of a device that no run has measured before
CAUSES: dict[str, StepCause] = {
    "input": "data-bound",
    "transfer": "transfer-bound",
    "wait": "wait-bound",
    "update": "update-bound",
    "loop": "loop-bound",
}
CLAUSES = {
    "input": "waiting for input takes {share} of a step",
    "transfer": "moving batches to the device takes {share} of a step",
    "wait": "in {share} of a step the forward and backward pass wait and compute nothing",
    "update": "updating the weights takes {share} of a step",
    "loop": "code outside of forward, backward and update takes {share} of a step",
    "compute": "forward and backward take {share} of a step",
}
NEXT_STEPS: dict[StepCause, str] = {
    "data-bound": "give DataLoader more workers (num_workers), or move work from __getitem__ into a preparation",
    "transfer-bound": "use pin_memory=True, and .to(device, non_blocking=True)",
    "wait-bound": "look for sleeps, locks, reads of files and network calls in training_step or the model",
    "update-bound": "use fused=True in the optimizer, or larger batches",
    "loop-bound": "look at callbacks, loggers, metrics and .item() between the steps",
    "launch-bound": "use larger batches or torch.compile: calling operators takes longer than their work",
    "compute-bound": "use bf16 (precision='bf16-mixed'), torch.compile or more devices",
    "undecided": "no cause clearly takes more than 10% of a step: train longer, for a narrower interval",
    "too few steps": "train for some hundred steps",
    "contaminated machine": "repeat it on a quiet machine, and compare nothing with these figures",
}


def judge(account: Account, name: str) -> WatchResult | None:
    """Judge a stopped account; None where it has seen no step with a backward pass."""
    blocks, validity = account.blocks, account.validity
    steps = [step for block in blocks.normal for step in block]
    if not account.num_steps:
        return None
    step_seconds = seconds_of(steps) if steps else 0.0
    parts = _parts(account.split or steps, step_seconds)
    shares = _shares(account)
    cause = _cause(shares, step_seconds)
    clauses: list[str] = []
    if validity.contaminated:
        cause = "contaminated machine"
        verdict = f"refused: the machine was disturbed meanwhile ({'; '.join(validity.reasons)})"
    elif cause == "too few steps":
        verdict = f"too few steps: {account.num_steps} steps give no interval"
    else:
        largest = sorted(shares, key=lambda share: -shares[share].value)
        clauses = [share for share in largest if share == largest[0] or (shares[share].low or 0.0) > MIN_SHARE]
        text = ", ".join(CLAUSES[share].format(share=format_range(shares[share])) for share in clauses)
        verdict = f"{cause}: {text}"
    gain, source = _gain(account, shares, clauses[0]) if clauses else (None, None)
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    share = {} if validity.contaminated or not steps else _limit_share(account, device, step_seconds)
    num_samples = account.num_ranks * sum(step.num_samples for step in steps) / max(1, len(steps))  # of a step
    return WatchResult(
        name=name,
        device=device.type,
        num_steps=account.num_steps,
        num_measured=len(steps),
        step_seconds=step_seconds,
        parts=parts,
        samples_per_second=num_samples / step_seconds or None if step_seconds else None,
        shares=shares,
        cause=cause,
        verdict=verdict,
        next_step=NEXT_STEPS[cause],
        gain=gain,
        gain_source=source,
        why_not_measured=account.why_not_measured,
        num_rounds=account.num_rounds,
        **share,
        time_budget=account.time_budget,
        validity=validity,
    )


def format_range(share: Interval) -> str:
    """A share with its interval, for people."""
    if share.low is None or share.high is None:
        return format_share(share.value)
    return f"{format_share(share.value)} ({format_share(share.low)} to {format_share(share.high)})"


def format_gain(gain: Interval) -> str:
    """A factor of the throughput with its interval, for people."""
    ends = "" if gain.low is None or gain.high is None else f" ({format_ends(gain.low, gain.high, gain.value)})"
    return f"{format_ratio(gain.value)} times as fast{ends}"


def _parts(steps: Sequence[Step], step_seconds: float) -> dict[str, float]:
    """Seconds of each part of a step that takes `step_seconds`, in the proportions that `steps` have.

    On a GPU, `steps` are those that waited for it after each part, and so take longer than the others.
    """
    total = sum(step.seconds for step in steps)
    return {part: sum(step.parts[part] for step in steps) / total * step_seconds if total else 0.0 for part in PARTS}


def _shares(account: Account) -> dict[str, Interval]:
    blocks = account.blocks
    if not blocks.normal:
        return {}
    items = {"input": "data_wait", "transfer": "transfer", "update": "optimizer", "loop": "rest"}
    is_host = not account.split  # on a GPU the host runs ahead, so that parts are taken from single steps
    sources = blocks.normal if is_host else [[step] for step in account.split]
    shares = {name: [_mean_share(block, part) for block in sources] for name, part in items.items()}
    if is_host:
        shares["wait"] = [sum(step.idle for step in block) / seconds_of(block) / len(block) for block in sources]
    if blocks.at_hand:  # measured, what the workers of the loader take from the step included
        shares["input"] = [float(1 - np.exp(-ratio)) for ratio in blocks.log_ratios()]
    number = min(map(len, shares.values()))
    columns = {name: np.clip(values[:number], 0.0, 1.0) for name, values in shares.items()}
    columns["compute"] = np.clip(1 - np.sum(list(columns.values()), axis=0), 0.0, 1.0)
    return {name: share_interval(values) for name, values in columns.items()}


def _mean_share(block: Sequence[Step], part: str) -> float:
    return sum(step.parts[part] for step in block) / (seconds_of(block) * len(block))


def _cause(shares: dict[str, Interval], step_seconds: float) -> StepCause:
    if not shares or any(share.low is None for share in shares.values()):
        return "too few steps"
    largest = max(shares, key=lambda name: shares[name].value)
    if largest == "compute":
        return "launch-bound" if step_seconds < MIN_STEP_SECONDS else "compute-bound"
    return CAUSES[largest] if (shares[largest].low or 0.0) > MIN_SHARE else "undecided"


def _gain(
    account: Account, shares: dict[str, Interval], name: str
) -> tuple[Interval | None, Literal["measured", "computed", "at most"] | None]:
    """The factor of the throughput without the largest share, and how it is known."""
    if name == "compute":
        return None, None
    if name == "input" and account.blocks.at_hand:
        return estimate_ratio(account.blocks.log_ratios()), "measured"
    share = shares[name]
    low, high = (None if end is None else 1 / max(1e-6, 1 - end) for end in (share.low, share.high))
    gain = Interval(value=1 / max(1e-6, 1 - share.value), low=low, high=high)
    return gain, "computed" if name == "input" else "at most"


def _limit_share(account: Account, device: torch.device, step_seconds: float) -> dict[str, Any]:
    """Operations per second of the steps, and their share of what the device does in a matrix product."""
    flops = account.flops
    precision = flops.precision if flops is not None else None
    if flops is None or precision is None or flops.why_not:
        return {"why_no_share": (flops and flops.why_not) or "no matrix product was seen"}
    rate = flops.total / step_seconds
    known: dict[str, Any] = {"precision": precision, "flops_per_second": rate}
    try:
        cache = limit_cache(account.environment.root, device)
        limit = cache.find()
        if limit is None:
            cache.keep(limit := measure_limit(device, [precision], LIMIT_SECONDS))
        return known | {"of_limit": rate / limit.flops_per_second[precision]}
    except (KeyError, OSError, RuntimeError) as error:
        return known | {"why_no_share": f"the limit of the device is unknown: {one_line(error)}"}
