"""Plan of the further processes that measure how starts differ: how many, and how many rounds in each.

A given time gives the narrowest interval with sqrt(c_process / c_round * v_round / v_process) rounds in each process,
from the costs c of a start and of a round and the variances v of these levels (Kalibera and Jones, "Rigorous
Benchmarking in Reasonable Time", ISMM 2013). The variance between processes is unknown until some have been measured:
until then each takes as many rounds as time allows, at most those of the training's own probe.
"""

import math
from dataclasses import dataclass

from paceline.conf.config import Speedup
from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.records import FurtherStarts
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.training import TrainResult
from paceline.tasks.speedup.between_starts import MIN_PROCESSES, variance_components

MAX_SHARE = 0.05  # of the training's time for all further processes
MIN_FURTHER = MIN_PROCESSES - 1
MAX_FURTHER = 5
MIN_ROUNDS = 4  # two palindromes
IMPORT_SECONDS = 6.0
"""Estimate of the imports of a rank, which the training's own process had done before it was needed."""
PATIENCE = 3.0  # times the estimate until a process that the user asked for is given up


@dataclass(frozen=True)
class NextStart:
    """One further process; none with 0 rounds."""

    reason: str = ""  # why no further one
    num_rounds: int = 0
    block_seconds: float = 0.0  # limit of its measured blocks
    seconds: float = 0.0  # limit of the process


def next_start(settings: Speedup, train: TrainResult, done: FurtherStarts) -> NextStart:
    """Plan the next process after those that are done."""
    probe, startup = train.probe, train.startup_seconds
    if settings.starts == 0 or probe is None or startup is None:
        return NextStart("speedup.starts=0" if settings.starts == 0 else "no probe to repeat")
    is_auto = settings.starts == "auto"
    if is_auto and probe.validity.contaminated:
        return NextStart("the machine was disturbed during the probe")
    num_left = (MAX_FURTHER if settings.starts == "auto" else settings.starts) - len(done.probes)
    if num_left <= 0:
        return NextStart(_cost(train, done))
    process, one_round = _process_seconds(train, probe, startup, done), _round_seconds(probe)
    shortest = process + MIN_ROUNDS * one_round
    budget = MAX_SHARE * train.seconds - done.seconds if is_auto else PATIENCE * num_left * shortest
    blocks = settings.max_seconds - sum(_round_seconds(each) * len(each.rounds) for each in done.probes)
    num_needed = max(1, MIN_FURTHER - len(done.probes))
    num = int(min(num_left, budget // shortest, blocks // (MIN_ROUNDS * one_round)))
    if num < num_needed:
        return NextStart(_cost(train, done) if done.probes else _too_long(train, settings, num_needed * shortest))
    affordable = min((budget / num - process) / one_round, blocks / num / one_round)
    num_rounds = min(len(probe.rounds), affordable, _best_rounds(probe, done, process / one_round))
    num_rounds = max(MIN_ROUNDS, int(num_rounds) // 2 * 2)
    return NextStart("", num_rounds, blocks / num, budget)


def _best_rounds(probe: ProbeResult, done: FurtherStarts, relative_cost: float) -> float:
    """Rounds per process by Kalibera and Jones; infinite while starts are not known to differ."""
    variance = variance_components([probe, *done.probes])
    if not variance.process or variance.block is None:
        return math.inf
    return math.ceil(math.sqrt(relative_cost * variance.block / variance.process))


def _process_seconds(train: TrainResult, probe: ProbeResult, startup: float, done: FurtherStarts) -> float:
    """Seconds of a process apart from its rounds: of the processes that were measured, else an estimate."""
    if done.probes:
        rounds = sum(_round_seconds(each) * len(each.rounds) for each in done.probes)
        return max(0.0, done.seconds - rounds) / len(done.probes)
    arms = sum(_block_seconds(probe, role) for role in ("baseline", "candidate", *probe.others))
    warm_up = max(0.0, probe.seconds - arms * len(probe.rounds)) if probe.num_repeats == 0 else 0.0
    return IMPORT_SECONDS + startup - train.time_budget.get("search", 0.0) + warm_up


def _round_seconds(probe: ProbeResult) -> float:
    return _block_seconds(probe, "baseline") + _block_seconds(probe, "candidate")


def _block_seconds(probe: ProbeResult, role: str) -> float:
    """Mean seconds of an arm's blocks."""
    blocks = [block for blocks in probe.rounds for block in blocks if block.arm == role]
    samples = probe.samples_per_step.get(role, probe.batch_size)
    return sum(block.seconds_per_sample * block.num_steps for block in blocks) * samples / max(1, len(blocks))


def _cost(train: TrainResult, done: FurtherStarts) -> str:
    return f"took {format_seconds(done.seconds)}, {done.seconds / train.seconds:.1%} of the training's time"


def _too_long(train: TrainResult, settings: Speedup, seconds: float) -> str:
    return (
        f"two processes would take about {format_seconds(seconds)}; {MAX_SHARE:.0%} of the training are "
        f"{format_seconds(MAX_SHARE * train.seconds)}, and speedup.max_seconds={settings.max_seconds:g}"
    )
