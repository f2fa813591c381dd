"""The schedule of the paired probe: which arm runs how many steps when, and when to stop.

Knows nothing of torch, devices or data: an arm is a callable that runs steps and returns their seconds. Blocks of the
arms follow each other in palindromes, A B | B A | A B ... (A B C | C B A ... with three), so that a linear drift of the
machine falls on all arms alike. In a distributed run every rank calls `run_probe` with the same arms; all decisions
come from rank 0 through `agree`, so that no rank waits for another that has stopped.
"""

from __future__ import annotations

import math
import statistics as plain_statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.schema import Speedup
from tasks.errors import RunError
from tasks.records import Arm, Block, ProbeResult
from tasks.speedup.contamination import Contamination, CpuWatch
from tasks.speedup.statistics import MIN_ROUNDS, MIN_ROUNDS_TO_STOP, ROUNDS_PER_LOOK, speedup_ratio

Role = Literal["baseline", "candidate", "single"]
StopReason = Literal["interval narrow enough", "time is up", "all blocks done"]
StepRunner = Callable[[int], Sequence[float]]
"""Runs n training steps and returns each one's wall seconds, device work included (synchronised). A rank that has no
part in an arm returns an empty sequence; rank 0 has a part in every arm."""
Agree = Callable[[float], float]
"""Rank 0's value, on every rank. Collective: every rank calls it equally often."""
Clock = Callable[[], float]

ROLES: tuple[Role, ...] = ("baseline", "candidate", "single")
BLOCK_SECONDS = 0.25
"""Aim for a block of the slowest arm. Long against timer and scheduler ticks (1 to 10 ms) and the refill of caches
after a change of arm, short against the seconds over which clock rates and neighbours drift."""
MAX_STEPS_PER_BLOCK = 1000
MIN_WARMUP_STEPS = 2
MAX_WARMUP_STEPS = 10
SETTLED = 0.9
"""Warm-up ends when a step takes at least this share of the one before: times have stopped falling."""


@dataclass(frozen=True)
class ArmRunner:
    """An arm that can be measured."""

    arm: Arm
    run: StepRunner
    samples_per_step: int
    """Over all the arm's devices."""


@dataclass(frozen=True)
class _Link:
    """What decisions need: the common voice of the ranks and the time."""

    agree: Agree
    clock: Clock


def identity(value: float) -> float:
    """`agree` of a single process."""
    return value


def run_probe(
    runners: Mapping[Role, ArmRunner],
    settings: Speedup,
    agree: Agree = identity,
    own_pids: Iterable[int] = (),
    clock: Clock = time.perf_counter,
) -> ProbeResult:
    """Measure the arms against each other; the same result on every rank.

    Args:
        runners: "baseline", "candidate" and, for parallel efficiency, "single".
        settings: Numbers of blocks and steps, time limit, width at which to stop.
        agree: Makes rank 0's value known to all ranks.
        own_pids: Processes of this run (ranks, workers, the flow); others' use of the CPUs is contamination.
        clock: Seconds from any origin.

    Raises:
        RunError: A step's time is not a positive finite number.
    """
    link = _Link(agree, clock)
    started = clock()
    roles = tuple(role for role in ROLES if role in runners)
    step_seconds = {role: _warm_up(role, runners[role], link) for role in roles}
    num_steps = _steps_per_block(step_seconds, settings)
    watch = CpuWatch(own_pids)
    rounds, reason = _measure({role: runners[role] for role in roles}, num_steps, settings, link)
    contamination = watch.stop()
    baseline = runners["baseline"]
    return ProbeResult(
        baseline=baseline.arm,
        candidate=runners["candidate"].arm,
        batch_size=baseline.samples_per_step // baseline.arm.num_devices,
        samples_per_step={role: runners[role].samples_per_step for role in roles},
        rounds=rounds,
        seconds=agree(clock() - started),
        stopped_because=reason,
        **_agreed(contamination, agree),
    )


def _warm_up(role: Role, runner: ArmRunner, link: _Link) -> float:
    """Run steps that are thrown away until their time no longer falls; the last one's seconds."""
    last = math.inf
    for num_done in range(1, MAX_WARMUP_STEPS + 1):
        previous, last = last, _timed(role, runner, 1, link)
        if num_done >= MIN_WARMUP_STEPS and last >= SETTLED * previous:
            break
    return last


def _steps_per_block(step_seconds: Mapping[Role, float], settings: Speedup) -> int:
    """Steps of one block, equal for all arms.

    `auto`: enough for `BLOCK_SECONDS` of the slowest arm, less where the time limit would not hold twice the minimum of
    rounds. The median over three or more steps is not moved by the first step after a change of arm; blocks of fewer
    steps only arise when a step lasts so long (over 80 ms) that a refilled cache is nothing beside it.
    """
    if settings.steps_per_block != "auto":
        return settings.steps_per_block
    affordable = settings.max_seconds / (2 * MIN_ROUNDS * len(step_seconds))
    wanted = min(BLOCK_SECONDS, affordable) / max(step_seconds.values())
    return min(MAX_STEPS_PER_BLOCK, max(1, math.ceil(wanted)))


def _measure(
    runners: Mapping[Role, ArmRunner], num_steps: int, settings: Speedup, link: _Link
) -> tuple[tuple[tuple[Block, ...], ...], StopReason]:
    order = list(runners)
    rounds: list[tuple[Block, ...]] = []
    started = link.clock()
    while True:
        rounds.append(tuple(_block(role, runners[role], num_steps, link) for role in order))
        order.reverse()
        elapsed = link.agree(link.clock() - started)
        reason = _stop_reason(rounds, elapsed, settings)
        if reason:
            return tuple(rounds), reason


def _stop_reason(rounds: Sequence[tuple[Block, ...]], elapsed: float, settings: Speedup) -> StopReason | None:
    """Why to stop now, from values that are equal on all ranks; None to go on.

    Looks at the interval only after whole palindromes: statistics.py has the coverage under exactly this rule.
    """
    if len(rounds) >= MIN_ROUNDS_TO_STOP and len(rounds) % ROUNDS_PER_LOOK == 0:
        ratio = speedup_ratio(rounds)
        if ratio and ratio.half_width is not None and ratio.half_width <= settings.target_half_width:
            return "interval narrow enough"
    if len(rounds) >= settings.num_blocks:
        return "all blocks done"
    if elapsed + elapsed / len(rounds) > settings.max_seconds:  # the next round would end too late
        return "time is up"
    return None


def _block(role: Role, runner: ArmRunner, num_steps: int, link: _Link) -> Block:
    seconds = _timed(role, runner, num_steps, link)
    return Block(arm=role, seconds_per_sample=seconds / runner.samples_per_step, num_steps=num_steps)


def _timed(role: Role, runner: ArmRunner, num_steps: int, link: _Link) -> float:
    """Rank 0's median step seconds; outside the timed region the ranks agree on it."""
    steps = runner.run(num_steps)
    seconds = link.agree(plain_statistics.median(steps) if steps else 0.0)
    if not (math.isfinite(seconds) and seconds > 0):
        raise RunError(
            f"a step of the probe's arm {role} took {seconds} s; times are positive; "
            "return the wall seconds of every step from the arm's runner"
        )
    return seconds


def _agreed(contamination: Contamination, agree: Agree) -> dict[str, float | None]:
    """Rank 0's view of its machine; nan carries None through `agree`."""
    values = {}
    for name in ("steal_fraction", "foreign_load"):
        own = getattr(contamination, name)
        common = agree(math.nan if own is None else own)
        values[name] = None if math.isnan(common) else common
    return values
