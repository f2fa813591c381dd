"""The schedule of the paired probe: which arm runs how many steps when, and when to stop.

Knows nothing of torch, devices or data: an arm is a callable that runs steps and returns their seconds. Blocks of the
arms follow each other in palindromes, A B | B A | A B ... (A B C | C B A ... with three), so that a linear drift of the
machine falls on all arms alike. With more arms each palindrome begins one arm later, A B C D | D C B A | B C D A | ...:
every arm comes to every place, and what its neighbours leave in caches and clocks falls on all. In a distributed run
every rank calls `run_probe` with the same arms; all decisions come from rank 0 through `agree`, so that no rank waits
for another that has stopped.
"""

import math
import statistics as plain_statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.conf.config import Speedup
from paceline.tasks.errors import RunError
from paceline.tasks.measure.paired_ratio import MIN_ROUNDS, ROUNDS_PER_LOOK, arm_ratio, planned_looks
from paceline.tasks.measure.step_times import StepTimes
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.measure.warm_up import num_warm_up
from paceline.tasks.records.execution import LADDER_PREFIX, Arm
from paceline.tasks.records.measurement import Block, ProbeResult, Validity

StopReason = Literal["interval narrow enough", "time is up", "all blocks done"]
StepRunner = Callable[[int], Sequence[float]]
"""Runs n training steps and returns each one's wall seconds, device work included (synchronised). A rank that has no
part in an arm returns an empty sequence; rank 0 has a part in every arm."""
Agree = Callable[[float], float]  # Rank 0's value, on every rank. Collective: every rank calls it equally often.
Clock = Callable[[], float]

MAX_ROLES_IN_PALINDROMES = 3
"""Up to so many arms the palindromes alone give each its turn at both ends or the same place in the middle."""
COMPETENT = "competent"
COMPETENT_ROUNDS = 10
"""Rounds after the warm-up with the competent loop, a process of its own; more would take the others' time."""
BY_PRODUCTS = ("single", "all_cores", "uncompiled", COMPETENT)
"""Arms that get no time of their own: they measure the efficiency and what compiling saves, as time allows."""
REPEAT_FACTOR = 2.0  # a contaminated measurement is repeated within so many times the time limit, in all
MIN_REPEAT_SHARE = 0.5
"""Share of the time limit; with less time left a repetition would be worth less than the contaminated measurement."""
BLOCK_SECONDS = 0.25
"""Aim for a block of the slowest arm. Long against timer and scheduler ticks (1 to 10 ms) and the refill of caches
after a change of arm, short against the seconds over which clock rates and neighbours drift."""
MAX_STEPS_PER_BLOCK = 1000
MIN_STEPS_TO_DROP_FIRST = 3
MIN_WARMUP_STEPS = 2
MAX_WARMUP_STEPS = 10
SETTLED = 0.9  # warm-up ends when a step takes at least this share of the one before: times have stopped falling


@dataclass(frozen=True)
class ArmRunner:
    """An arm that can be measured."""

    arm: Arm
    run: StepRunner
    samples_per_step: int  # over all the arm's devices
    has_diverged: Callable[[], bool] = lambda: False  # whether its last loss is not a finite number
    arithmetic: str | None = None  # on GPUs
    gather: Callable[[float], Sequence[float]] | None = None
    """Collects the ranks' seconds of an arm in which they do not wait for each other; called by all of them."""
    joules: Callable[[], float | None] = lambda: None  # a counter's reading
    period: int = 1
    """Steps after which their times repeat: workers of a loader that read at the same time are waited for in turn."""


class ArmLostError(RuntimeError):
    """An arm cannot be executed any more, on all ranks; the probe continues without it."""


@dataclass(frozen=True)
class _Link:
    agree: Agree
    clock: Clock
    steps: StepTimes
    lost: dict[str, str] = field(default_factory=dict)  # arms by role, and why


@dataclass(frozen=True)
class _Attempt:
    """The measured blocks of one beginning; `seconds` is rank 0's."""

    warm_up: tuple[tuple[Block, ...], ...]
    rounds: tuple[tuple[Block, ...], ...]
    reason: StopReason
    seconds: float


def run_probe(
    runners: Mapping[str, ArmRunner],
    settings: Speedup,
    agree: Agree = lambda value: value,
    watch: Callable[[], ValidityWatch] | None = None,
    clock: Clock = time.perf_counter,
    steps: StepTimes | None = None,
) -> ProbeResult:
    """Measure the arms against each other; the same result on every rank, but for the validity of its own host.

    While the watch reports contamination and time allows, the rounds start again; the last attempt counts. The time
    limit of the settings is that of one attempt. `runners` are by role: "baseline", "candidate", and any others, such
    as "single" for parallel efficiency. `watch` begins to watch the machine before each attempt, and is given on every
    rank or on none. `steps` takes the time of each measured step.

    Raises ValueError: "baseline" or "candidate" is missing; ArmLostError: one of them cannot be executed; RunError: a
    step's time is not a positive finite number.
    """
    link = _Link(agree, clock, steps or StepTimes())
    started = clock()
    required = ["baseline", "candidate"]
    if missing := [role for role in required if role not in runners]:
        raise ValueError(f"runners={sorted(runners)} lack {' and '.join(missing)}; a probe needs both")
    # The same order on every rank, whatever the mapping's, since blocks are collective.
    runners = {role: runners[role] for role in [*required, *sorted(set(runners) - set(required))]}
    step_seconds = [_warm_up(role, runner, link) for role, runner in runners.items()]
    period = int(agree(math.lcm(*(runner.period for runner in runners.values()))))
    num_steps = _steps_per_block(step_seconds, period, settings)
    for role in required:
        if role in link.lost:
            raise ArmLostError(f"{runners[role].arm.label}: {link.lost[role]}")
    runners = {role: runner for role, runner in runners.items() if role not in link.lost}
    attempt, validity, num_repeats = _attempts(runners, num_steps, settings, link, watch)
    baseline = runners["baseline"]
    return ProbeResult(
        baseline=baseline.arm,
        candidate=runners["candidate"].arm,
        batch_size=baseline.samples_per_step // baseline.arm.num_devices,
        samples_per_step={role: runner.samples_per_step for role, runner in runners.items()},
        arithmetic={role: runner.arithmetic for role, runner in runners.items() if runner.arithmetic is not None},
        others={role: runner.arm for role, runner in runners.items() if role not in {"baseline", "candidate"}},
        diverged=tuple(role for role, runner in runners.items() if agree(float(runner.has_diverged()))),
        warm_up=attempt.warm_up,
        left_out=link.lost,
        rounds=attempt.rounds,
        seconds=agree(clock() - started),
        stopped_because=attempt.reason,
        validity=validity,
        num_repeats=num_repeats,
    )


def _attempts(
    runners: Mapping[str, ArmRunner],
    num_steps: int,
    settings: Speedup,
    link: _Link,
    watch: Callable[[], ValidityWatch] | None,
) -> tuple[_Attempt, Validity, int]:
    """The first clean attempt, or the last that time allowed; with what was seen, and how many came before it.

    Whether to begin again depends on the machine alone: a choice among attempts by their outcome would bias the ratio.
    """
    remaining, num_repeats = REPEAT_FACTOR * settings.max_seconds, 0
    while True:
        watching = watch() if watch else None
        limit = min(settings.max_seconds, remaining)
        attempt = _measure(runners, num_steps, settings.model_copy(update={"max_seconds": limit}), link)
        validity = watching.stop() if watching else Validity()
        remaining -= attempt.seconds
        contaminated = bool(link.agree(float(validity.contaminated or False))) if watch else False
        if not contaminated or remaining < min(attempt.seconds, MIN_REPEAT_SHARE * settings.max_seconds):
            return attempt, validity, num_repeats
        num_repeats += 1


def _warm_up(role: str, runner: ArmRunner, link: _Link) -> float:
    """Run steps that are thrown away until their time no longer falls; the last one's seconds."""
    last = math.inf
    for num_done in range(1, MAX_WARMUP_STEPS + 1):
        try:
            previous, last = last, _agree_on_seconds(role, sum(runner.run(1)), link)
        except ArmLostError as error:
            link.lost[role] = str(error)
            return 0.0
        if num_done >= MIN_WARMUP_STEPS and last >= SETTLED * previous:
            break
    return last


def _steps_per_block(step_seconds: Sequence[float], period: int, settings: Speedup) -> int:
    """Steps of one block, equal for all arms; those that count are whole periods, if the time limit allows it.

    `auto`: enough for `BLOCK_SECONDS` of the slowest arm, less where the time limit would not hold twice the minimum of
    rounds. Of three or more steps, the first one after a change of arm is not counted; blocks of fewer steps only arise
    when a step lasts so long (over 80 ms) that refilling a cache is negligible.
    """
    if settings.steps_per_block != "auto":
        return settings.steps_per_block
    affordable = settings.max_seconds / (2 * MIN_ROUNDS * len(step_seconds))
    num_steps = max(1, math.ceil(min(BLOCK_SECONDS, affordable) / max(step_seconds)))
    whole = 1 + period * max(1, math.ceil((num_steps - 1) / period))
    if period > 1 and 2 * MIN_ROUNDS * whole * sum(step_seconds) <= settings.max_seconds:
        num_steps = whole
    return min(MAX_STEPS_PER_BLOCK, num_steps)


def _measure(runners: Mapping[str, ArmRunner], num_steps: int, settings: Speedup, link: _Link) -> _Attempt:
    """Rounds until it is time to stop, from values that are equal on all ranks.

    The looks are planned after the first palindrome and are after complete ones: `paired_ratio` has the coverage under
    exactly this rule. Rounds of the warm-up count for the limits and for nothing else.
    """
    rounds: list[tuple[Block, ...]] = []
    looks, num_dropped = range(0), 0
    link.steps.start_attempt()
    started = link.clock()
    while True:
        link.steps.start_round()
        num_with = sum(any(block.arm == COMPETENT for block in blocks) for blocks in rounds[num_dropped:])
        is_over = num_with >= COMPETENT_ROUNDS
        roles = tuple(role for role in runners if role not in link.lost and not (role == COMPETENT and is_over))
        blocks = [_block(role, runners[role], num_steps, link) for role in order_of_round(roles, len(rounds))]
        rounds.append(tuple(block for block in blocks if block is not None))
        elapsed = link.agree(link.clock() - started)
        if len(rounds) == ROUNDS_PER_LOOK:
            affordable = int(settings.max_seconds * len(rounds) / max(elapsed, 1e-9))
            looks = planned_looks(min(settings.num_blocks, affordable))
        reason: StopReason | None = "all blocks done" if len(rounds) >= settings.num_blocks else None
        if reason is None and elapsed + elapsed / len(rounds) > settings.max_seconds:
            reason = "time is up"  # another round would end too late
        if reason is None and len(rounds) % ROUNDS_PER_LOOK:
            continue
        num_dropped = num_warm_up(rounds)
        counted = rounds[num_dropped:]
        if len(counted) in looks and _is_narrow(counted, settings):
            reason = "interval narrow enough"
        if reason:
            return _Attempt(tuple(rounds[:num_dropped]), tuple(counted), reason, elapsed)


def order_of_round(roles: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Order of the arms in round `number`, from 0: odd rounds reverse the one before.

    In each palindrome every arm stands once before and once after every other, and its two places add up to the same.
    """
    turn = number // 2 % len(roles) if len(roles) > MAX_ROLES_IN_PALINDROMES else 0
    order = roles[turn:] + roles[:turn]
    return order[::-1] if number % 2 else order


def _is_narrow(rounds: Sequence[tuple[Block, ...]], settings: Speedup) -> bool:
    roles = {block.arm for block in rounds[0] if not block.arm.startswith(LADDER_PREFIX)}  # those as time allows
    compared = roles - {"candidate", COMPETENT}
    judged = {"baseline"} if compared <= {"baseline", *BY_PRODUCTS} else compared
    ratios = [arm_ratio(rounds, role, "candidate") for role in judged]
    widths = [None if ratio is None else ratio.half_width for ratio in ratios]
    return all(width is not None and width <= settings.target_half_width for width in widths)


def _block(role: str, runner: ArmRunner, num_steps: int, link: _Link) -> Block | None:
    started, before = time.time(), runner.joules()
    try:
        steps = runner.run(num_steps)
    except ArmLostError as error:
        link.lost[role] = str(error)
        return None
    after = runner.joules()
    link.steps.add(role, started, steps)
    counted = steps[1:] if len(steps) >= MIN_STEPS_TO_DROP_FIRST else steps
    own = plain_statistics.fmean(counted) if counted else 0.0
    seconds = _agree_on_seconds(role, own, link)
    typical = _agree_on_seconds(role, plain_statistics.median(steps) if steps else 0.0, link)
    samples = runner.samples_per_step
    # Equal times are a mean, as of a GPU's steps.
    spread = plain_statistics.variance(counted) / seconds**2 if len(set(counted)) > 1 else 0.0
    return Block(
        arm=role,
        seconds_per_sample=seconds / samples,
        typical_seconds_per_sample=typical / samples,
        num_steps=num_steps,
        rank_seconds=tuple(runner.gather(own)) if runner.gather else (),
        joules_per_sample=None if before is None or after is None else (after - before) / (num_steps * samples),
        step_variance=link.agree(spread) or None,
    )


def _agree_on_seconds(role: str, seconds: float, link: _Link) -> float:
    """Rank 0's step seconds; outside the timed region the ranks agree on it."""
    seconds = link.agree(seconds)
    if not (math.isfinite(seconds) and seconds > 0):
        raise RunError(
            f"a step of the probe's arm {role} took {seconds} s; times are positive; "
            "return the wall seconds of every step from the arm's runner"
        )
    return seconds
