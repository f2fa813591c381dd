"""Recompute the figures of a run's summary from the time of each step. Needs numpy alone, and nothing of Paceline.

    python recompute.py [DIRECTORY]

DIRECTORY is an unpacked evidence archive (default: the directory of this file). The exit status is 0 if all figures are
those of the summary, 1 if some differ, and 2 if a file has changed or the evidence cannot be used.

The estimators are written a second time here. A round is one block of every arm. Ratio: Hodges-Lehmann location of the
rounds' log-ratios with the exact signed-rank interval (Hollander, Wolfe and Chicken, 3.2 and 3.3), widened by the lag-1
autocorrelation, by a significant carry-over, and by the variance between starts where there are enough of them. Rounds
before a change point in the time of all arms are warm-up and do not count.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1  # rises with every change of the files, the figures or their methods
SUMS, FACTS, SUMMARY, STEPS = "SHA256SUMS", "evidence.json", "summary.json", "steps.npz"
TOLERANCE = 1e-9  # relative
CONFIDENCE, OUTER_CONFIDENCE, INNER_CONFIDENCE = 0.95, 0.98, 0.988  # the latter two of looks
LATER_LOOKS, LAST_LOOK = 10, 24
CARRY_OVER_LEVEL, WARM_UP_LEVEL, MIN_FALL = 0.05, 0.01, 0.01
MIN_INTERVAL_ROUNDS, MIN_ROUNDS, MIN_AUTOCORRELATION_ROUNDS = 3, 6, 8
MIN_STEPS_TO_DROP_FIRST = 3
USUAL_AUTOCORRELATION, MAX_AUTOCORRELATION = 0.1, 0.8
MIN_PROCESSES, MIN_STARTS, MAX_STARTS = 3, 4, 30

Estimate = tuple[Any, Any, Any]  # value and the ends of its interval, None with too few rounds
Figures = dict[str, Any]


class EvidenceError(ValueError):
    """The evidence must not be used."""


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """The content of SHA256SUMS, as `sha256sum` writes it."""
    names = sorted(set(files) - {SUMS})
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in names).encode()


def check(files: Mapping[str, bytes]) -> tuple[Figures, list[str]]:
    """Recompute the figures; return them, and the names of those that differ from the summary.

    Raises:
        EvidenceError: A file has changed, the version is another one, or the machine was disturbed.
    """
    if files.get(SUMS) != sums_of(files):
        listed = files.get(SUMS, b"").splitlines()
        changed = [line[66:].decode() for line in sums_of(files).splitlines() if line not in listed]
        raise EvidenceError(f"{', '.join(changed) or SUMS} changed after the evidence was written")
    facts = json.loads(files[FACTS])
    if facts["version"] != VERSION:
        raise EvidenceError(f"the evidence has version {facts['version']}, and this program reads version {VERSION}")
    if facts["contaminated"]:
        raise EvidenceError(f"the machine was disturbed during the measurement ({'; '.join(facts['reasons'])})")
    if facts["num_left_out"]:
        raise EvidenceError(f"the times of {facts['num_left_out']} steps were left out, because they were too many")
    with np.load(io.BytesIO(files[STEPS])) as steps:
        figures = recompute(dict(steps), facts)
    return figures, differences(figures, json.loads(files[SUMMARY])["figures"])


def differences(figures: Figures, printed: Figures) -> list[str]:
    """Names of the figures that differ."""
    names = list({**figures, **printed})
    first, second = (np.array([each.get(name) for name in names], dtype=float) for each in (figures, printed))
    equal = np.isclose(first, second, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return [name for name, same in zip(names, equal, strict=True) if not same]


def recompute(steps: Mapping[str, Any], facts: Mapping[str, Any]) -> Figures:
    """The figures of the summary, by their paths in its JSON; None for what cannot be known from these data."""
    samples, devices = facts["samples_per_step"], facts["num_devices"]
    processes = [counted_blocks(steps, number, samples) for number in np.unique(steps["process"])]
    num_warm_up, total, typical, places, spread, numbers = processes[0]  # seconds of a step
    rates = {arm: samples[arm] / float(np.median(total[arm])) for arm in ("baseline", "candidate")}
    per_sample = {arm: np.log(seconds / samples[arm]) for arm, seconds in total.items()}
    ratio = per_sample["baseline"] - per_sample["candidate"]
    is_last = places["baseline"] > places["candidate"]
    bias, p_value = carry_over(per_sample["baseline"] + per_sample["candidate"], is_last)
    inside = allow_for(estimate(ratio), bias, p_value)
    logs = [np.log(times["baseline"] / times["candidate"]) for _, times, *_ in processes[1:]]
    further = [estimate(log + math.log(samples["candidate"] / samples["baseline"]))[0] for log in logs]
    starts, num_rounds = [inside[0], *further], [ratio.size, *(log.size for log in logs)]
    (value, low, high), num_starts = across_starts(inside, starts, facts["earlier"])
    step = float(np.mean([spread["baseline"], spread["candidate"]])) * 2
    num_steps = int(np.max(steps["step"][steps["process"] == 0])) + 1
    is_measured = len(processes) >= MIN_PROCESSES
    efficiency: Estimate = (None, None, None)
    if "single" in total:
        efficiency = estimate(per_sample["single"] - per_sample["candidate"] - math.log(devices))
    steady = np.log(typical["baseline"] / samples["baseline"] * samples["candidate"] / typical["candidate"])
    components = (*variances(ratio, starts, num_rounds, step / num_steps), step)
    figures = {
        **_named("speedup.{}", "ratio low high", (value, low, high)),
        **_named("speedup.process_{}", "ratio low high", inside),
        **_named("speedup.typical_{}", "ratio low high", estimate(steady)),
        "speedup.autocorrelation": autocorrelation(ratio),
        "speedup.num_warm_up": num_warm_up,
        **_named("speedup.{}", "carry_over carry_over_p", (bias, p_value)),
        "speedup.num_blocks": ratio.size,
        "speedup.num_starts": num_starts,
        "speedup.significant": None if not num_starts or low is None else low > 1 or high < 1,
        "speedup.significant_within_process": None if inside[1] is None else inside[1] > 1 or inside[2] < 1,
        **_named("speedup.variance.{}", "process block step", components),
        **{f"speedup.start_ratios.{at}": one for at, one in enumerate(starts) if is_measured},
        **{f"speedup.start_rounds.{at}": one for at, one in enumerate(num_rounds) if is_measured},
        **_named("speedup.efficiency{}", " _low _high", efficiency),
        **_named("speedup.{}_samples_per_second", "baseline candidate", (rates["baseline"], rates["candidate"])),
    }
    for arm, name in (("competent", "ratios.competent"), ("all_cores", "equal_hardware")):
        if per_sample.get(arm, ratio[:0]).size:
            is_shared = np.isin(numbers["candidate"], numbers[arm])  # the competent loop is not in all rounds
            over_arm = estimate(per_sample[arm] - per_sample["candidate"][is_shared])
            figures |= _named(f"speedup.{name}." + "{}", "value low high", over_arm)
    for pattern, terms in facts["factors"].items():
        gain = sum(weight * per_sample[arm] for arm, weight in terms.items())
        names = " _low _high" if pattern.startswith("interaction") else "ratio low high"
        figures |= _named(f"speedup.factors.{pattern}", names, estimate(gain) if terms else (None, None, None))
    total |= {arm: np.array(seconds) for arm, seconds in facts["rank_times"].items()}
    for name, terms in facts["shares"].items():
        shares = sum(weight * total[arm] for arm, weight in terms.items()) / total["candidate"]
        ends = location_interval(shares) if shares.size >= MIN_INTERVAL_ROUNDS else (np.median(shares), None, None)
        cut = tuple(None if end is None else min(1.0, max(0.0, float(end))) for end in ends)
        figures |= _named(f"speedup.shares.{name}." + "{}", "0 1 2", cut)
    known = {name: math.nan if value is None else value for name, value in facts["rates"].items()}
    flops, moved = (known[name] * rates["candidate"] / devices for name in ("flops_per_sample", "bytes_per_sample"))
    seconds = float(np.sum(steps["window_seconds"]))
    figures |= {
        "train.samples_per_second": float(np.sum(steps["window_samples"])) / seconds if seconds else None,
        "train.flops_per_second": flops,
        "train.bytes_per_second": moved,
        "train.mfu": flops / known["sheet_flops_per_second"],
        "speedup.of_limit": flops / known["limit_flops_per_second"],
        "speedup.of_bandwidth": moved / known["limit_bytes_per_second"],
    }
    return {name: None if value is None or math.isnan(value) else value for name, value in figures.items()}


def _named(pattern: str, names: str, values: tuple[Any, ...]) -> Figures:
    return {pattern.format(name): value for name, value in zip(names.split(" "), values, strict=True)}


def counted_blocks(steps: Mapping[str, Any], process: int, samples: Mapping[str, int]) -> tuple[Any, ...]:
    """Number of rounds of a process that are its warm-up, and five figures of each later block, by arm.

    They are mean and median seconds of a step, place in the round, variance of the steps over their squared mean (nan
    where they were not timed one by one), and number of the round, from 0 with the warm-up. Blocks are those of the
    last attempt. The first of three or more steps, in which caches are filled again, is left out of the mean and the
    variance.
    """
    rows = np.flatnonzero(steps["process"] == process)
    rows = rows[steps["attempt"][rows] == steps["attempt"][rows[-1]]]
    blocks: dict[str, list[Any]] = {}
    for block in np.split(rows, np.flatnonzero(steps["step"][rows] == 0)[1:]):
        seconds = steps["seconds"][block]
        counted = seconds[seconds.size >= MIN_STEPS_TO_DROP_FIRST :]
        mean, is_timed = float(np.mean(counted)), len(set(counted)) > 1
        spread = float(np.var(counted, ddof=1)) / mean**2 if is_timed else math.nan
        shown = (mean, np.median(seconds), steps["position"][block[0]], spread, steps["round"][block[0]])
        blocks.setdefault(str(steps["arms"][steps["arm"][block[0]]]), []).append(shown)
    columns = {arm: np.array(list(zip(*shown, strict=True))) for arm, shown in blocks.items()}
    to_the_end = {arm: one[0] for arm, one in columns.items() if one.shape == columns["candidate"].shape}
    count = warm_up(np.mean([np.log(seconds / samples[arm]) for arm, seconds in to_the_end.items()], axis=0))
    return count, *({arm: one[at, one[4] >= count] for arm, one in columns.items()} for at in range(5))


def variances(ratio: Any, starts: list[float], num_rounds: list[int], of_steps: float) -> tuple[Any, Any]:
    """Variances of the log-ratio between processes and between blocks, each without those of the levels below."""
    block = np.var(ratio, ddof=1) if ratio.size > 1 else math.nan
    noise = block * np.mean([1 / number for number in num_rounds])
    process = np.maximum(0, np.var(np.log(starts), ddof=1) - noise) if len(starts) >= MIN_PROCESSES else math.nan
    return process, block if math.isnan(of_steps) else np.maximum(0, block - of_steps)


def warm_up(slowness: Any) -> int:
    """Number of rounds before the last change point; the likelihood-ratio test of one fall, again on what is left.

    The standard error is that of autoregressive noise, by the autocorrelation around both means.
    """
    dropped = 0
    while True:
        values = slowness[dropped:]
        count = values.size
        splits = range(2, count - max(2, math.ceil(slowness.size / 4)) + 1, 2)
        if not splits:
            return dropped
        squares = [at * values[:at].var() + (count - at) * values[at:].var() for at in splits]
        split, square = min(zip(splits, squares, strict=True), key=lambda one: one[1])
        fall = values[:split].mean() - values[split:].mean()
        line = np.polyval(np.polyfit(np.arange(count), values, 1), np.arange(count))
        around_means = np.concatenate([values[:split] - values[:split].mean(), values[split:] - values[split:].mean()])
        share = min(MAX_AUTOCORRELATION, max(0.0, autocorrelation(around_means) or 0.0))
        inflation = (1 + share) / (1 - share)
        error = math.sqrt(inflation * square / (count - 2) * (1 / split + 1 / (count - split)))
        p_value = len(splits) * t_tails(fall / max(error, 1e-12), count - 2) / 2
        if fall < MIN_FALL or square > np.sum((values - line) ** 2) or p_value > WARM_UP_LEVEL:
            return dropped
        dropped += split


def carry_over(sums: Any, is_last: Any) -> tuple[float | None, float | None]:
    """Relative bias of the ratio by the order of the arms, and its p-value: an alternation of the arms' sum."""
    count = sums.size
    if count < MIN_ROUNDS or is_last.all() or not is_last.any():
        return None, None
    design = np.column_stack([is_last - 0.5, np.ones(count), np.arange(count)])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ sums
    error = math.sqrt(float(np.sum((sums - design @ coefficients) ** 2)) / (count - 3) * inverse[0, 0])
    return math.expm1(coefficients[0] / 2), t_tails(abs(float(coefficients[0])) / max(1e-9, error), count - 3)


def allow_for(inside: Estimate, bias: float | None, p_value: float | None) -> Estimate:
    """Widen the interval by a significant carry-over."""
    value, low, high = inside
    if low is None or bias is None or p_value is None or p_value > CARRY_OVER_LEVEL:
        return inside
    return value, min(low, low / (1 + bias)), max(high, high / (1 + bias))


def estimate(log_ratios: Any) -> Estimate:
    """Ratio with the ends of its interval, widened by the autocorrelation."""
    if log_ratios.size < MIN_INTERVAL_ROUNDS:
        return float(np.exp(np.median(log_ratios))), None, None
    location, low, high = location_interval(log_ratios)
    share = min(MAX_AUTOCORRELATION, max(0.0, (autocorrelation(log_ratios) or 0.0) - USUAL_AUTOCORRELATION))
    factor = math.sqrt((1 + share) / (1 - share))
    low, high = location - factor * (location - low), location + factor * (high - location)
    return math.exp(location), math.exp(low), math.exp(high)


def location_interval(values: Any) -> Estimate:
    """Hodges-Lehmann location and signed-rank interval; Student's t with fewer than six values."""
    count = values.size
    first, second = np.triu_indices(count)
    averages = np.sort((values[first] + values[second]) / 2)
    location = float(np.median(averages))
    confidence = OUTER_CONFIDENCE if count < LATER_LOOKS or count == LAST_LOOK else INNER_CONFIDENCE
    if count < MIN_ROUNDS:
        reach = t_quantile((1 + confidence) / 2, count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
        centre = float(np.mean(values))
        return location, min(centre - reach, location), max(centre + reach, location)
    ways = np.ones(1)  # number of ways to each signed-rank sum
    for rank in range(1, count + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    depth = max(1, int(np.searchsorted(np.cumsum(ways / 2.0**count), (1 - confidence) / 2, side="right")))
    return location, float(averages[depth - 1]), float(averages[-depth])


def autocorrelation(values: Any) -> float | None:
    """Lag-1 autocorrelation, corrected for its bias, outliers cut at three robust standard deviations."""
    count = values.size
    if count < MIN_AUTOCORRELATION_ROUNDS:
        return None
    residuals = values - np.median(values)
    reach = 3 * 1.4826 * float(np.median(np.abs(residuals)))
    residuals = np.clip(residuals, -reach, reach)
    residuals = residuals - residuals.mean()
    square = float(np.sum(residuals**2))
    return (count * float(np.sum(residuals[1:] * residuals[:-1])) / square + 1) / (count - 3) if square > 0 else 0.0


def across_starts(inside: Estimate, starts: list[float], earlier: list[float]) -> tuple[Estimate, int]:
    """Interval for the next start and the number of starts behind it; that of the process and 0 with too few of them.

    Student's t over this process and further ones, else the scatter of earlier starts.
    """
    value, low, high = inside
    is_measured = len(starts) >= MIN_PROCESSES
    if not is_measured and (low is None or len(earlier) < MIN_STARTS):
        return inside, 0
    logs = np.log(starts if is_measured else earlier[-MAX_STARTS:])
    reach = t_quantile((1 + CONFIDENCE) / 2, logs.size - 1) * float(logs.std(ddof=1))
    if not is_measured:
        return (value, min(low, value / math.exp(reach)), max(high, value * math.exp(reach))), logs.size
    centre, reach = float(logs.mean()), reach / math.sqrt(logs.size)
    return (math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)), logs.size


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile above the median of Student's t, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def t_tails(value: float, degrees: int) -> float:
    """P(|t| > value), value not below 0."""
    return max(0.0, 1 - _within(math.atan(value / math.sqrt(degrees)), degrees))


def _within(angle: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) tan(angle)) of Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term = total = cosine if odd else 1.0
    for number in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    return 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0)) if odd else sine * total


def main(arguments: list[str]) -> int:
    """Print the figures; the exit status."""
    directory = Path(arguments[0]) if arguments else Path(__file__).parent
    try:
        listed = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        figures, differ = check({name: (directory / name).read_bytes() for name in [SUMS, *(x[66:] for x in listed)]})
    except (EvidenceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in figures.items():
        print(f"{name:<40}{'null' if value is None else f'{value:.10g}'}{'   differs' if name in differ else ''}")
    print(f"{len(differ)} of {len(figures)} figures differ from the summary by more than {TOLERANCE:g}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
