"""What limits a step, from arms that leave one thing out each: input, exchange, company, update, half the batch.

Every share is a sum of step times over the candidate's step time, taken round by round so that the machine's drift
cancels, and located with the estimator of the ratio. The arms count only where their batches make them comparable.

The step time on rank 0 is split into parts. Without exchange each rank takes its own time: what the slowest rank takes
above the median of the others is `imbalance`, for which all wait; what a step takes above the slowest rank is exchange.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.tasks.measure.paired_ratio import MIN_INTERVAL_ROUNDS, Floats, Interval, location_interval
from paceline.tasks.records.measurement import ProbeResult

Measured = Literal["data-bound", "communication-bound", "slow rank", "contention", "update-bound", "launch-bound"]
Bottleneck = Literal[Measured, "compute-bound", "undecided"]

ALONE = ("alone", "single")
"""Of one device; under strong scaling the arm that measures the efficiency has the whole batch."""
MIN_SHARE = 0.1
"""A share is a bottleneck when its interval lies above this. Taking a tenth of the step away altogether makes it 1.11
times as fast: less hardly pays for a change, and the few percent by which caches suit one arm better are no cause."""
CAUSES: dict[str, Measured] = {
    "input": "data-bound",
    "communication": "communication-bound",
    "imbalance": "slow rank",
    "contention": "contention",
    "update": "update-bound",
    "overhead": "launch-bound",
}
_TEXTS = {
    "input": "Waiting for input takes {share} of a step: measured against the same step on a batch that is there.",
    "communication": "Exchanging gradients takes {share} of a step: measured against the same ranks without exchange.",
    "imbalance": "The others wait for rank {slowest} for {share} of a step: measured without exchange.",
    "contention": "The devices slow each other by {share} of a step, exchange apart: measured against one alone.",
    "update": "Updating the weights takes {share} of a step: measured against the same step without it.",
    "overhead": "Launching, and what else does not shrink with the batch, takes {share}: measured with half the batch.",
    "compute": "The rest, {share}, grows with the batch: arithmetic and memory traffic.",
}


@dataclass(frozen=True)
class Diagnosis:
    """Shares of the candidate's step time."""

    shares: dict[str, Interval]
    """`input`, `communication`, `imbalance`, `contention`, `update`, `overhead` as far as measured, and `compute`, the
    remainder; each from 0 to 1, with its 95 % interval."""
    sentences: tuple[str, ...]  # one for each share, the largest first
    cause: Bottleneck | None
    """The largest share; `undecided` if it is neither the remainder nor above `MIN_SHARE`; None: too few rounds."""
    slowest: int | None = None  # rank that takes longest without exchange; None where ranks' times are not recorded

    @property
    def intervals(self) -> dict[str, tuple[float, float | None, float | None]]:
        """Each share with the ends of its interval, as records keep it."""
        return {name: (share.value, share.low, share.high) for name, share in self.shares.items()}

    def clause(self, cause: str) -> str | None:
        """The share behind a cause, with its interval, as a part of a sentence; None when it was not measured."""
        share = self.shares.get(name := next((name for name, bound in CAUSES.items() if bound == cause), "compute"))
        text = _TEXTS[name].partition(":")[0].format(share=_percent(share), slowest=self.slowest) if share else None
        return text and text[0].lower() + text[1:]

    @property
    def lesser(self) -> tuple[Bottleneck, ...]:
        """The causes apart from the largest whose shares' intervals lie above `MIN_SHARE`, the largest first."""
        clear = sorted(_clear(self.shares), key=lambda name: -self.shares[name].value)
        return tuple(CAUSES[name] for name in clear if CAUSES[name] != self.cause)


def diagnose(probe: ProbeResult) -> Diagnosis | None:
    """Shares of a step of the candidate by the arms `synthetic_input`, `no_sync`, `no_update` and `half_batch`.

    `alone` or `single` with `no_sync` shows contention when its batch per device is the candidate's. None without any.
    """
    terms, slowest = share_terms(probe), slowest_rank(probe)
    if not terms:
        return None
    by_round = [{block.arm: block.seconds_per_sample for block in blocks} for blocks in probe.rounds]
    roles = set.intersection(*map(set, by_round))  # the competent loop is not in all rounds
    times = {role: np.array([seconds[role] for seconds in by_round]) * probe.samples_per_step[role] for role in roles}
    times |= {role: np.array(seconds) for role, seconds in rank_times(probe).items()}
    shares = {name: _share(times, weights) for name, weights in terms.items()}
    largest_first = sorted(shares, key=lambda name: (name == "compute", -shares[name].value))
    return Diagnosis(
        shares=shares,
        sentences=tuple(_TEXTS[name].format(share=_percent(shares[name]), slowest=slowest) for name in largest_first),
        cause=_cause(shares),
        slowest=slowest,
    )


def share_terms(probe: ProbeResult) -> dict[str, dict[str, float]]:
    """For each share and the remainder, the weights of the arms' step times in it; empty without further arms."""
    weights = _weights(probe)
    return weights and weights | {"compute": _difference({"candidate": 1.0}, *weights.values())}


def slowest_rank(probe: ProbeResult) -> int | None:
    """The rank that takes longest without exchange; None where the ranks' times are not recorded."""
    seconds = [block.rank_seconds for blocks in probe.rounds for block in blocks if block.arm == "no_sync"]
    if not seconds or min(map(len, seconds)) < 2:  # noqa: PLR2004
        return None
    return int(np.median(seconds, axis=0).argmax())


def rank_times(probe: ProbeResult) -> dict[str, list[float]]:
    """Of each arm without exchange the step seconds of the slowest rank, and the median of the others', by round."""
    times: dict[str, list[float]] = {}
    if (slowest := slowest_rank(probe)) is None:
        return times
    for block in (block for blocks in probe.rounds for block in blocks if block.rank_seconds):
        other_seconds = [seconds for rank, seconds in enumerate(block.rank_seconds) if rank != slowest]
        times.setdefault(f"{block.arm} of the slowest", []).append(block.rank_seconds[slowest])
        times.setdefault(f"{block.arm} of others", []).append(float(np.median(other_seconds)))
    return times


def _weights(probe: ProbeResult) -> dict[str, dict[str, float]]:
    """For each share, what of which arm's step time it is made of.

    With a step time of a + b n for n samples, two batches give a = (k T(n/k) - T(n)) / (k - 1). Neither the exchange of
    gradients nor the update grows with the batch, so that both are in `a` and are taken out where they were measured.
    Where half the batch was timed without exchange, `a` is that of the ranks that are not the slowest.
    """
    samples, devices, further = probe.samples_per_step, probe.candidate.num_devices, probe.others
    knows_ranks = slowest_rank(probe) is not None
    weights: dict[str, dict[str, float]] = {}
    if "synthetic_input" in further:
        weights["input"] = {"candidate": 1.0, "synthetic_input": -1.0}
    if "no_sync" in further:
        weights["communication"] = {"candidate": 1.0, "no_sync of the slowest" if knows_ranks else "no_sync": -1.0}
        if knows_ranks:
            weights["imbalance"] = {"no_sync of the slowest": 1.0, "no_sync of others": -1.0}
        alone = (role for role in ALONE if role in further and samples[role] * devices == samples["no_sync"])
        if single := next(alone, None):
            weights["contention"] = {"no_sync": 1.0, single: -1.0}
    if "no_update" in further:
        weights["update"] = {"candidate": 1.0, "no_update": -1.0}
    if "half_batch" in further and samples["half_batch"] < samples["candidate"]:
        factor = samples["candidate"] / samples["half_batch"]
        half, full, exchange = "half_batch", "candidate", weights.get("communication", {})
        if further["half_batch"].variant == "no_sync" and knows_ranks:
            half, full, exchange = "half_batch of others", "no_sync of others", {}
        constant = {half: factor / (factor - 1), full: -1 / (factor - 1)}
        weights["overhead"] = _difference(constant, exchange, weights.get("update", {}))
    return weights


def _difference(first: Mapping[str, float], *rest: Mapping[str, float]) -> dict[str, float]:
    terms = dict(first)
    for other in rest:
        for role, weight in other.items():
            terms[role] = terms.get(role, 0.0) - weight
    return terms


def _share(times: Mapping[str, Floats], terms: Mapping[str, float]) -> Interval:
    """Location and interval of the terms' sum over the candidate's step time, each cut to 0 to 1."""
    sums: Floats = np.sum([weight * times[role] for role, weight in terms.items()], axis=0)
    return share_interval(sums / times["candidate"])


def share_interval(shares: Floats) -> Interval:
    """Location and interval of a share of a step, each cut to 0 to 1."""
    if shares.size < MIN_INTERVAL_ROUNDS:
        return Interval(value=float(np.clip(np.median(shares), 0.0, 1.0)))
    value, low, high = (float(np.clip(end, 0.0, 1.0)) for end in location_interval(shares))
    return Interval(value=value, low=low, high=high)


def _cause(shares: Mapping[str, Interval]) -> Bottleneck | None:
    if any(share.low is None for name, share in shares.items() if name in CAUSES):
        return None
    largest = max(shares, key=lambda name: shares[name].value)
    if largest == "compute":
        return "compute-bound"
    return CAUSES[largest] if largest in _clear(shares) else "undecided"


def _clear(shares: Mapping[str, Interval]) -> list[str]:
    return [name for name, share in shares.items() if name in CAUSES and (share.low or 0.0) > MIN_SHARE]


def _percent(share: Interval) -> str:
    if share.low is None or share.high is None:
        return f"{share.value:.0%}"
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"
