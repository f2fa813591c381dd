"""From a probe to one sentence: how much faster, how certain, and why.

The cause follows from what was measured. "compute-bound" without a diagnosis is an inference, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.tasks.formatting import enumerate_words, format_interval
from paceline.tasks.measure import paired_ratio
from paceline.tasks.measure.carry_over import CarryOver, allow_for, carry_over
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.measure.validity import judge
from paceline.tasks.records.execution import FACTORS, Arm
from paceline.tasks.records.measurement import FurtherStarts, ProbeResult, Validity
from paceline.tasks.records.training import Trained
from paceline.tasks.speedup import between_starts
from paceline.tasks.speedup.diagnosis import MIN_SHARE, Bottleneck, Diagnosis, diagnose
from paceline.tasks.speedup.factor_card import ONE_AT_A_TIME, factor_card
from paceline.tasks.speedup.limit_share import LimitShare, format_share, limit_share
from paceline.tasks.speedup.records import FactorCard, SpeedupResult
from paceline.tasks.speedup.steady_state import not_amortised, too_small

Cause = Literal[
    "not measured",
    "too few rounds",
    "contaminated machine",
    "identical arms",
    "no measurable difference",
    "slower",
    "too small",
    "compile not amortised",
    "memory-bound",
    Bottleneck,
]
GROWING = ("memory-bound", "compute-bound")  # parts of a step that grow with its batch

MAX_DATA_WAIT_FRACTION = 0.2  # above this share of the steps' time spent waiting for data a run is data-bound
MIN_EFFICIENCY = 0.9  # below this parallel efficiency, with several devices, a run is communication-bound
MIN_COARSE = 2.0  # from this ratio on one decimal is enough
MIN_STEP_SECONDS = 0.005
"""Below this a step is probably launch-bound: calling some hundred operators one by one from Python takes 1 to 2 ms."""


@dataclass(frozen=True)
class _Facts:
    probe: ProbeResult
    ratio: Interval
    efficiency: Interval | None
    step_seconds: float
    data_wait_fraction: float | None
    validity: Validity
    diagnosis: Diagnosis | None
    card: FactorCard
    share: LimitShare
    scope: str  # in words


def speedup_result(
    probe: ProbeResult | None,
    train: Trained | None = None,
    num_cores: int | None = None,
    earlier: Sequence[float] = (),
    starts: FurtherStarts | None = None,
) -> SpeedupResult:
    """Judge the probe of a training's own process, with its host's number of cores.

    Further processes of this run (`starts`) show the variance between starts. Without enough of them the ratios of
    `earlier` starts on the same kind of device do.
    """
    inside = paired_ratio.speedup_ratio(probe.rounds) if probe else None
    if probe is None or inside is None:
        why = (train and train.no_probe) or "the run had no probe"
        return SpeedupResult(verdict=f"not measured: {why}", cause="not measured")
    order_effect = carry_over(probe.rounds, "baseline", "candidate")
    inside = allow_for(inside, order_effect)
    further = starts or FurtherStarts()
    probes = [probe, *further.undisturbed]
    measured, borrowed = between_starts.over_processes(probes), between_starts.across_starts(inside, earlier)
    ratio = measured or borrowed or inside
    num_starts = len(probes) if measured else min(len(earlier), between_starts.MAX_STARTS) if borrowed else 0
    validity = probe.validity
    if validity.num_cores is None and num_cores is not None:
        validity = judge(validity.model_copy(update={"num_cores": num_cores}))
    scope: Literal["within this process", "across starts"] = "across starts" if num_starts else "within this process"
    num_samples = probe.samples_per_step.get("candidate", probe.batch_size * probe.candidate.num_devices)
    facts = _Facts(
        probe=probe,
        ratio=ratio,
        efficiency=paired_ratio.parallel_efficiency(probe.rounds, probe.candidate.num_devices),
        step_seconds=probe.seconds_per_sample("candidate") * num_samples,
        data_wait_fraction=train.data_wait_fraction if train else None,
        validity=validity,
        diagnosis=diagnose(probe),
        card=factor_card(probe, train.search if train else None),
        share=limit_share(train) if train else LimitShare(),
        scope=f"{scope}, by {num_starts} {'processes' if measured else 'earlier ones'}" if num_starts else scope,
    )
    (cause, explanation), typical = _judge(facts, train), paired_ratio.typical_ratio(probe.rounds)
    notes = _conduct(len(probe.warm_up), order_effect) + _typical_step(inside, typical)
    if diverged := [role for role in ("baseline", "candidate") if role in probe.diverged]:
        notes += f" The loss of the {' and the '.join(diverged)} diverged, so the ratio is not that of trainings."
    return SpeedupResult(
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        scope=scope,
        starts="measured" if measured else "borrowed" if borrowed else None,
        num_starts=num_starts,
        starts_reason=further.reason,
        start_ratios=between_starts.process_ratios(probes) if measured else (),
        start_rounds=tuple(len(each.rounds) for each in probes) if measured else (),
        variance=between_starts.variance_components(probes),
        process_ratio=inside.value,
        process_low=inside.low,
        process_high=inside.high,
        typical_ratio=typical.value if typical else None,
        typical_low=typical.low if typical else None,
        typical_high=typical.high if typical else None,
        autocorrelation=paired_ratio.ratio_autocorrelation(probe.rounds),
        num_warm_up=len(probe.warm_up),
        carry_over=order_effect.bias if order_effect else None,
        carry_over_p=order_effect.p_value if order_effect else None,
        num_blocks=len(probe.rounds),
        significant=ratio.significant if num_starts else None,
        significant_within_process=inside.significant,
        efficiency=facts.efficiency.value if facts.efficiency else None,
        efficiency_low=facts.efficiency.low if facts.efficiency else None,
        efficiency_high=facts.efficiency.high if facts.efficiency else None,
        verdict=f"{_amount(cause, facts)} {_evidence(facts)}: {explanation}.{notes}",
        diverged=probe.diverged,
        cause=cause,
        bottleneck=_limit(facts),
        baseline=probe.baseline.label,
        candidate=probe.candidate.label,
        baseline_arithmetic=probe.arithmetic.get("baseline"),
        candidate_arithmetic=probe.arithmetic.get("candidate"),
        baseline_samples_per_second=1 / probe.seconds_per_sample("baseline"),
        candidate_samples_per_second=1 / probe.seconds_per_sample("candidate"),
        contaminated=facts.validity.contaminated,
        validity=facts.validity,
        shares=facts.diagnosis.intervals if facts.diagnosis else {},
        diagnosis=facts.diagnosis.sentences if facts.diagnosis else (),
        factors=facts.card,
    )


def _judge(facts: _Facts, train: Trained | None) -> tuple[Cause, str]:
    """The first cause that applies, and its explanation: doubts about the number, then measured causes, then presumed.

    A measured bottleneck says more than that the arms are alike or the training is short, and comes before both.
    """
    significant, contaminated, limit = facts.ratio.significant, bool(facts.validity.contaminated), _limit(facts)
    is_measured = facts.diagnosis is not None and facts.diagnosis.cause not in (None, "compute-bound", "undecided")
    small, unpaid = too_small(train), not_amortised(facts.probe, train)
    check = f"a check of the measurement itself, {_CHECK_TEXT[significant]}"
    disturbed = f"the machine was disturbed meanwhile ({'; '.join(facts.validity.reasons)})"
    few_rounds = "too few rounds for an interval; give the probe more time with speedup.max_seconds"
    check += f"; {disturbed}" if contaminated else ""
    effect = _effect(facts)
    limited = f"{effect}{_limit_text(limit, facts)}"
    cases: tuple[tuple[bool, Cause, str], ...] = (
        (is_measured and not contaminated, limit, limited),
        (facts.probe.baseline == facts.probe.candidate, "identical arms", check),
        (contaminated, "contaminated machine", f"{disturbed}, so repeat it on a quiet one and divide nothing by it"),
        (significant is None, "too few rounds", few_rounds),
        (bool(small), "too small", f"{effect}{small}"),
        (bool(unpaid), "compile not amortised", f"{effect}{unpaid}"),
        (significant is False, "no measurable difference", limited),
        (facts.ratio.value < 1.0, "slower", limited),
    )
    return next(((cause, text) for applies, cause, text in cases if applies), (limit, limited))


def _limit(facts: _Facts) -> Cause:
    cause = facts.diagnosis.cause if facts.diagnosis and facts.diagnosis.cause else _inferred_limit(facts)
    has_share = facts.share.bound == "memory" and not facts.share.contaminated
    is_memory = cause == "compute-bound" and has_share and (facts.share.of_bandwidth or 0.0) > MIN_SHARE
    return "memory-bound" if is_memory else cause


def _inferred_limit(facts: _Facts) -> Cause:
    if (facts.data_wait_fraction or 0.0) > MAX_DATA_WAIT_FRACTION:
        return "data-bound"
    if facts.probe.candidate.num_devices > 1 and facts.efficiency and facts.efficiency.value < MIN_EFFICIENCY:
        return "communication-bound"
    if facts.step_seconds < MIN_STEP_SECONDS and facts.probe.candidate.compile in ("off", "step"):  # no graph
        return "launch-bound"
    return "compute-bound"


def _amount(cause: Cause, facts: _Facts) -> str:
    ratio, against = facts.ratio, facts.probe.baseline.label
    if cause == "identical arms":
        return f"{ratio.value:.3f} x between two identical arms, {against}"
    if ratio.significant is False:
        return f"No measurable difference to {against}: {format_ratio(ratio.value)} times as fast"
    return f"{format_ratio(ratio.value)} times as fast as {against}"


def _conduct(num_warm_up: int, order_effect: CarryOver | None) -> str:
    """Warm-up and carry-over of the probe, where there were any."""
    text = f" The first {num_warm_up} rounds were warm-up and do not count." if num_warm_up else ""
    if order_effect is None or not order_effect.significant:
        return text
    return (
        f"{text} The time of an arm depends on the arm before it (p = {order_effect.p_value:.2g}): the ratio may be "
        f"{abs(order_effect.bias):.1%} too {'high' if order_effect.bias > 0 else 'low'}; the interval allows for it."
    )


def _typical_step(ratio: Interval, typical: Interval | None) -> str:
    """The typical step, where it differs from the total times."""
    if typical is None or ratio.low is None or ratio.high is None or typical.low is None or typical.high is None:
        return ""
    if ratio.low <= typical.high and typical.low <= ratio.high:
        return ""
    ends = format_ends(typical.low, typical.high, typical.value)
    return (
        f" The typical step is {format_ratio(typical.value)} times as fast (95 % interval {ends}): some steps take "
        "much longer, and the ratio is that of total times."
    )


def _evidence(facts: _Facts) -> str:
    rounds = f"{len(facts.probe.rounds)} paired round" + ("s" if len(facts.probe.rounds) > 1 else "")
    if facts.ratio.low is None or facts.ratio.high is None:
        return f"({rounds}, no interval)"
    ends = format_ends(facts.ratio.low, facts.ratio.high, facts.ratio.value)
    return f"(95 % interval {ends} {facts.scope}, {rounds})"


def format_ends(low: float, high: float, centre: float) -> str:
    """Format the ends of a ratio's interval for reading, rounded as the ratio: 1.05 to 1.20."""
    return f"{format_ratio(low, centre)} to {format_ratio(high, centre)}"


def format_ratio(ratio: float, centre: float | None = None) -> str:
    """Round a ratio for reading: one decimal from 2 on, else two, or three where two would hide its side of 1.

    The end of an interval is rounded as its centre.
    """
    if f"{ratio:.2f}" == "1.00":
        return f"{ratio:.3f}"
    return f"{ratio:.1f}" if (centre or ratio) >= MIN_COARSE else f"{ratio:.2f}"


def _effect(facts: _Facts) -> str:
    """Effect of the candidate's settings; of several, each gets the credit or the blame that was measured."""
    parts = _differences(facts.probe.baseline, facts.probe.candidate)
    if facts.ratio.significant is None or facts.probe.baseline == facts.probe.candidate:
        return ""
    if len(parts) == 1:
        (what,) = parts.values()
        if not facts.ratio.significant:
            return f"using {what} makes no difference here; "
        return f"using {what} pays; " if facts.ratio.value > 1 else f"slower with {what}; "
    words = {factor: parts[name] for factor, name in FACTORS.items() if name in parts}
    singly = [
        f"{words.pop(one.factor)} {format_interval(one.ratio, one.low, one.high)} x"
        for one in facts.card.factors
        if one.ratio is not None and one.factor in words
    ]
    method = "measured singly" if facts.card.method == ONE_AT_A_TIME else "Shapley values"
    texts = {method: singly, "not measured singly": list(words.values())}
    return "".join(f"{name}: {enumerate_words(parts)}; " for name, parts in texts.items() if parts)


def _limit_text(limit: Cause, facts: _Facts) -> str:
    if limit == "undecided":
        return "no share of its step is clearly the largest; give the probe more time with speedup.max_seconds"
    if facts.diagnosis and (clause := facts.diagnosis.clause(limit)):
        lead = _LEAD_TEXT.get(limit, f"the step is {limit}{_of_limit_text(facts.share) if limit in GROWING else ''}")
        return ", ".join([lead, clause, *filter(None, map(facts.diagnosis.clause, facts.diagnosis.lesser))])
    is_partial = limit == "compute-bound" and facts.data_wait_fraction is None
    return _LIMIT_TEXT["compute-bound, waits unknown" if is_partial else limit].format(
        data_wait=facts.data_wait_fraction or 0.0,
        efficiency=facts.efficiency.value if facts.efficiency else 0.0,
        num_devices=facts.probe.candidate.num_devices,
        milliseconds=facts.step_seconds * 1000,
        of_limit=_of_limit_text(facts.share),
    )


def _of_limit_text(share: LimitShare) -> str:
    """How near the arithmetic is to the device's limit, and the memory traffic where that is nearer to its own."""
    if share.of_limit is None or share.contaminated:
        return ""
    text = f" at {format_share(share.of_limit)} of what this device does"
    if share.bound == "memory":
        text += f", and moves data at {format_share(share.of_bandwidth)} of its memory bandwidth or more"
    return text


_CHECK_TEXT: dict[bool | None, str] = {
    True: "and it is off: distrust this machine's figures",
    False: "and the right answer, 1, lies in the interval",
    None: "with too few rounds to decide",
}
_LIMIT_TEXT: dict[str, str] = {
    "data-bound": "the run is data-bound, {data_wait:.0%} of its steps' time went into waiting for data",
    "communication-bound": "the ranks hold each other up (communication, or hardware that they share), "
    "efficiency {efficiency:.2f} on {num_devices} devices",
    "launch-bound": "the step is probably launch-bound, with {milliseconds:.1f} ms (inferred; --diagnose measures it)",
    "memory-bound": "the step is probably memory-bound{of_limit} (inferred; --diagnose measures its waits)",
    "compute-bound": "the step is probably compute-bound{of_limit}, as no data, communication or launch bottleneck "
    "showed (inferred; --diagnose measures it)",
    "compute-bound, waits unknown": "the step is probably compute-bound{of_limit}, as no communication or launch "
    "bottleneck showed (inferred, and waiting for data was not measured; --diagnose measures both)",
}
_LEAD_TEXT = {"slow rank": "a rank is slow", "contention": "the devices are in contention for what they share"}


_FACTOR_TEXT: dict[str, dict[str, str]] = {
    "precision": {
        "32-true": "fp32 arithmetic",
        "64-true": "fp64 arithmetic",
        "tf32": "TF32 arithmetic",
        "bf16-mixed": "bf16 arithmetic",
        "16-mixed": "fp16 arithmetic",
    },
    "memory_format": {"channels_last": "the channels-last layout", "contiguous": "the contiguous layout"},
    "compile": {
        "step": "compilation",
        "graph": "the step as one CUDA graph",
        "step_graph": "the compiled step as one CUDA graph",
        "off": "eager execution",
    },
}
_UNNAMED = {  # settings whose values need no words of their own
    "num_threads": "other numbers of threads",
    "strategy": "another strategy",
    "gradient_compression": "gradient compression",
    "micro_batch": "other passes of a batch",
    "activation_checkpointing": "activation checkpointing",
    "loads": "other shares of the devices",
}


def _differences(baseline: Arm, candidate: Arm) -> dict[str, str]:
    words = {
        "num_devices": f"{candidate.num_devices} device" + ("s" if candidate.num_devices > 1 else ""),
        **{field: texts[getattr(candidate, field)] for field, texts in _FACTOR_TEXT.items()},
        "loading": f"{candidate.loading} loading",
        **_UNNAMED,
    }
    parts = {name: text for name, text in words.items() if getattr(candidate, name) != getattr(baseline, name)}
    return parts or {"": "the same execution"}
