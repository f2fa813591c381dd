"""From a probe to one sentence: how much faster, how certain, and why.

The cause is found from what was measured; a cause for which nothing was measured is not named.
"""

from __future__ import annotations

import statistics as plain_statistics
from dataclasses import dataclass
from typing import Literal

from tasks.records import Arm, ProbeResult, SpeedupResult, TrainResult
from tasks.speedup.statistics import Estimate, parallel_efficiency, speedup_ratio

Cause = Literal[
    "not measured",
    "too few rounds",
    "contaminated machine",
    "identical arms",
    "no measurable difference",
    "slower",
    "data-bound",
    "communication-bound",
    "launch-bound",
    "compute-bound",
]

MAX_STEAL_FRACTION = 0.02
"""Above this share of stolen CPU time the machine counts as contaminated: as large as the width the probe aims for."""
MAX_FOREIGN_CORES = 0.25
"""Above this many cores busy with others it does too: an eighth of the smallest supported machine (two cores)."""
MAX_FOREIGN_SHARE = 0.05
"""On machines of many cores, above this share of them instead."""
MAX_DATA_WAIT_FRACTION = 0.2
"""Above this share of the steps' time spent waiting for data a run is data-bound."""
MIN_EFFICIENCY = 0.9
"""Below this parallel efficiency, with several devices, a run is communication-bound."""
MIN_STEP_SECONDS = 0.005
"""Below this a step is launch-bound: calling some hundred operators one by one from Python takes 1 to 2 ms of it."""


@dataclass(frozen=True)
class _Facts:
    """What the sentence is made of."""

    probe: ProbeResult
    ratio: Estimate
    efficiency: Estimate | None
    step_seconds: float
    data_wait_fraction: float | None
    contaminated: bool | None
    num_cores: int | None


def speedup_result(
    probe: ProbeResult | None, train: TrainResult | None = None, num_cores: int | None = None
) -> SpeedupResult:
    """Judge a probe.

    Args:
        probe: The raw measurement; None when it was switched off.
        train: The run's training, for its share of waiting for data.
        num_cores: Cores of the host, for the threshold of foreign load; the strictest is used when unknown.
    """
    ratio = speedup_ratio(probe.rounds) if probe else None
    if probe is None or ratio is None:
        return SpeedupResult(verdict="not measured: the run had no probe", cause="not measured")
    facts = _Facts(
        probe=probe,
        ratio=ratio,
        efficiency=parallel_efficiency(probe.rounds, probe.candidate.num_devices),
        step_seconds=_step_seconds(probe),
        data_wait_fraction=train.data_wait_fraction if train else None,
        contaminated=_contaminated(probe, num_cores),
        num_cores=num_cores,
    )
    cause = _cause(facts)
    return SpeedupResult(
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        num_blocks=len(probe.rounds),
        significant=ratio.significant,
        efficiency=facts.efficiency.value if facts.efficiency else None,
        efficiency_low=facts.efficiency.low if facts.efficiency else None,
        efficiency_high=facts.efficiency.high if facts.efficiency else None,
        verdict=_sentence(cause, facts),
        cause=cause,
        baseline=probe.baseline.label,
        candidate=probe.candidate.label,
        baseline_samples_per_second=1 / _median_seconds(probe, "baseline"),
        candidate_samples_per_second=1 / _median_seconds(probe, "candidate"),
        contaminated=facts.contaminated,
    )


def _median_seconds(probe: ProbeResult, role: str) -> float:
    return plain_statistics.median(
        block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == role
    )


def _step_seconds(probe: ProbeResult) -> float:
    """Seconds of one step of the candidate."""
    samples = probe.samples_per_step.get("candidate", probe.batch_size * probe.candidate.num_devices)
    return _median_seconds(probe, "candidate") * samples


def _contaminated(probe: ProbeResult, num_cores: int | None) -> bool | None:
    """Whether others used the machine; None when neither share is known."""
    if probe.steal_fraction is None and probe.foreign_load is None:
        return None
    most_foreign = max(MAX_FOREIGN_CORES, MAX_FOREIGN_SHARE * (num_cores or 0))
    return (probe.steal_fraction or 0.0) > MAX_STEAL_FRACTION or (probe.foreign_load or 0.0) > most_foreign


def _cause(facts: _Facts) -> Cause:
    """The first that applies: doubts about the number come before explanations of it."""
    checks: tuple[tuple[Cause, bool], ...] = (
        ("identical arms", facts.probe.baseline == facts.probe.candidate),
        ("contaminated machine", bool(facts.contaminated)),
        ("too few rounds", facts.ratio.significant is None),
        ("no measurable difference", facts.ratio.significant is False),
        ("slower", facts.ratio.value < 1.0),
    )
    return next((cause for cause, applies in checks if applies), _limit(facts))


def _limit(facts: _Facts) -> Cause:
    """What limits the candidate's step."""
    if (facts.data_wait_fraction or 0.0) > MAX_DATA_WAIT_FRACTION:
        return "data-bound"
    if facts.probe.candidate.num_devices > 1 and facts.efficiency and facts.efficiency.value < MIN_EFFICIENCY:
        return "communication-bound"
    if facts.step_seconds < MIN_STEP_SECONDS:
        return "launch-bound"
    return "compute-bound"


def _sentence(cause: Cause, facts: _Facts) -> str:
    return f"{_amount(cause, facts)} {_evidence(facts)}: {_explanation(cause, facts)}."


def _amount(cause: Cause, facts: _Facts) -> str:
    ratio = facts.ratio
    against = facts.probe.baseline.label
    if cause == "identical arms":
        return f"{ratio.value:.3f} x between two identical arms, {against}"
    if ratio.significant is None:
        return f"{format_ratio(ratio.value)} x the throughput of {against}"
    if not ratio.significant:
        return f"No measurable difference to {against}: {format_ratio(ratio.value)} x"
    return f"{format_ratio(ratio.value)} x {'faster than' if ratio.value > 1 else 'the throughput of'} {against}"


def _evidence(facts: _Facts) -> str:
    num_rounds = len(facts.probe.rounds)
    rounds = f"{num_rounds} paired round" + ("s" if num_rounds > 1 else "")
    if facts.ratio.low is None or facts.ratio.high is None:
        return f"({rounds}, no interval)"
    return f"(95 % interval {format_ratio(facts.ratio.low)} to {format_ratio(facts.ratio.high)}, {rounds})"


def format_ratio(ratio: float) -> str:
    """Two decimals, or three where two would hide on which side of 1 it lies."""
    return f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}"


def _explanation(cause: Cause, facts: _Facts) -> str:
    limit = _LIMIT_TEXT[_limit(facts)].format(**_figures(facts))
    pays = _differences(facts.probe.baseline, facts.probe.candidate)
    if cause == "identical arms":
        return f"a check of the measurement itself, {_CHECK_TEXT[facts.ratio.significant]}"
    texts = {
        "contaminated machine": f"others used the machine meanwhile ({_strangers(facts)}), so repeat it on a quiet one",
        "too few rounds": "too few rounds to be certain; give the probe more time with speedup.max_seconds",
        "no measurable difference": f"{pays} makes no difference here; {limit}",
        "slower": f"slower with {pays}; {limit}",
    }
    return texts.get(cause, f"{pays} pays; {limit}")


_CHECK_TEXT: dict[bool | None, str] = {
    True: "and it is off: distrust this machine's figures",
    False: "and the right answer, 1, lies in the interval",
    None: "with too few rounds to tell",
}
_LIMIT_TEXT: dict[str, str] = {
    "data-bound": "the run is data-bound, {data_wait:.0%} of its steps' time went into waiting for data",
    "communication-bound": "the ranks hold each other up (communication, or hardware that they share), "
    "efficiency {efficiency:.2f} on {num_devices} devices",
    "launch-bound": "the step is launch-bound, its {milliseconds:.1f} ms are mostly the framework's overhead",
    "compute-bound": "the step is compute-bound",
}


def _figures(facts: _Facts) -> dict[str, float]:
    return {
        "data_wait": facts.data_wait_fraction or 0.0,
        "efficiency": facts.efficiency.value if facts.efficiency else 0.0,
        "num_devices": facts.probe.candidate.num_devices,
        "milliseconds": facts.step_seconds * 1000,
    }


def _strangers(facts: _Facts) -> str:
    parts = []
    if facts.probe.foreign_load is not None:
        of_cores = f" of {facts.num_cores}" if facts.num_cores else ""
        parts.append(f"{facts.probe.foreign_load:.2f}{of_cores} cores busy with other processes")
    if facts.probe.steal_fraction is not None:
        parts.append(f"{facts.probe.steal_fraction:.1%} of CPU time stolen")
    return ", ".join(parts)


_FACTOR_TEXT: dict[str, dict[str, str]] = {
    "precision": {
        "32-true": "fp32 arithmetic",
        "64-true": "fp64 arithmetic",
        "bf16-mixed": "bf16 arithmetic",
        "16-mixed": "fp16 arithmetic",
    },
    "memory_format": {"channels_last": "the channels-last layout", "contiguous": "the contiguous layout"},
    "compile": {"step": "compilation", "off": "eager execution"},
}


def _differences(baseline: Arm, candidate: Arm) -> str:
    """What the candidate has and the baseline has not; a probe cannot tell several factors apart, a study can."""
    parts = []
    if candidate.num_devices != baseline.num_devices:
        parts.append(f"{candidate.num_devices} device" + ("s" if candidate.num_devices > 1 else ""))
    for field, texts in _FACTOR_TEXT.items():
        if getattr(candidate, field) != getattr(baseline, field):
            parts.append(texts[getattr(candidate, field)])
    if candidate.loading != baseline.loading:
        parts.append(f"{candidate.loading} loading")
    if len(parts) <= 1:
        return parts[0] if parts else "the same execution"
    return f"the whole of {', '.join(parts[:-1])} and {parts[-1]}"
