"""Rounds of fresh processes until their outcome is decided, or the time is used up."""

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline.tasks.errors import InputError
from paceline.tasks.judge.decision import MARGIN_SHARE, Plan, decide, differences, first_look, log_ratios, plan_looks
from paceline.tasks.judge.processes import run_process
from paceline.tasks.judge.records import ORDERS, Decision, ProcessRun, Question, Round, Side, SideName
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.records.measurement import Validity

Run = Callable[[Side, Question], ProcessRun]


class Watch(Protocol):
    """Watches the machine from its making to `stop`."""

    def stop(self) -> Validity:
        """Signs of other work since the start."""


SPARE = 1.1  # of a proposed budget
MIN_WATCHED_SECONDS = 1.0  # the times of processors count in ticks of 10 ms


def judge_sides(
    question: Question,
    level: float,
    before_look: Callable[[], None],
    run: Run = run_process,
    watch: Callable[[list[int]], Watch] = ValidityWatch,
    flip: Callable[[], int] = lambda: secrets.randbelow(2),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Decision, tuple[Round, ...]]:
    """Judge the new side by rounds; return the decision and all rounds, the contaminated ones among them.

    One process of each side comes first and does not count: it fills caches, and shows whether the side works and marks
    its steps.
    `before_look` is called once, before the first look that can decide: from then on the level is spent.

    Raises InputError: a side does not work, or the budget is too short for any decision.
    """
    started = clock()
    sides = {side.name: side for side in (question.old, question.new)}
    times = [started]
    for side in sides.values():
        done = run(side, question)
        question = question.model_copy(update={"is_marked": done.num_steps > 0})
        times.append(clock())
    before, quickest = times[-1] - started, min(np.diff(times))
    if question.budget_seconds - before < 2 * quickest * first_look(level):  # even if the next ones are twice as fast
        _plan(question, level, before, 4 * quickest)
    rounds: list[Round] = []
    plan, decision, longest, num_looks = None, None, 0.0, 0
    while decision is None:
        rounds += take_rounds(sides, question, run, watch, lambda: ORDERS[flip()], clock)
        valid, longest = [each for each in rounds if not each.contaminated], max(longest, rounds[-1].seconds)
        plan = plan or _plan(question, level, before, longest)  # by both sides together: that is independent of coins
        is_over = clock() - started + longest > question.budget_seconds or len(valid) >= plan.looks[-1]
        for look in [look for look in plan.looks[num_looks:] if look <= len(valid)]:
            if num_looks == 0:
                before_look()
            num_looks += 1
            found = _decide(question, valid[:look], plan)
            if found.outcome != "RETEST":
                decision = found
                break
        if decision is None and is_over and valid:
            decision = _decide(question, valid[: plan.looks[-1]], plan)
        elif decision is None and is_over:
            reasons = "; ".join(rounds[-1].contaminated)
            decision = Decision(outcome="RETEST", reason=f"all {len(rounds)} rounds are contaminated ({reasons})")
    if decision.needed_rounds is not None:
        seconds = math.ceil(SPARE * (before + decision.needed_rounds * longest))
        decision = decision.model_copy(update={"needed_seconds": float(seconds)})
    return decision, tuple(rounds)


def _decide(question: Question, rounds: Sequence[Round], plan: Plan) -> Decision:
    quality = differences(rounds, lower_is_better=question.lower_is_better)
    first = [run.metric or 0.0 for run in rounds[0].of("old")]
    margin = MARGIN_SHARE * abs(float(np.mean(first))) if question.margin is None else question.margin
    decision = decide(log_ratios(rounds), quality, margin, plan)
    if len(rounds) < plan.looks[0] or len(rounds) in plan.looks:
        return decision
    needed = decision.needed_rounds or min(look for look in plan.looks if look > len(rounds))
    reason = "the time ended before a planned look"
    return decision.model_copy(update={"outcome": "RETEST", "reason": reason, "needed_rounds": needed})


def take_rounds(
    sides: dict[SideName, Side],
    question: Question,
    run: Run,
    watch: Callable[[list[int]], Watch],
    draw: Callable[[], tuple[SideName, ...]],
    clock: Callable[[], float],
) -> list[Round]:
    """A round in an order that is drawn, or several for as long as other work on the machine can be seen.

    Trainings by Paceline watch the machine of their ranks themselves, while they train: it need not be this one, and
    workers of a cluster on this one are no other work.
    """
    watched, started, rounds = None if question.rate_key else watch([os.getpid()]), clock(), []
    while (begin := clock()) - started < MIN_WATCHED_SECONDS:
        order = draw()
        runs = tuple(run(sides[name], question) for name in order)
        rounds.append(Round(order=order, runs=runs, seconds=clock() - begin))
    reasons = watched.stop().reasons if watched else ()
    return [each.model_copy(update={"contaminated": (*reasons, *each.reasons)}) for each in rounds]


def _plan(question: Question, level: float, before: float, seconds: float) -> Plan:
    """Plan as many rounds as fit into the budget; InputError if they are too few for any KEEP."""
    most, fewest = int((question.budget_seconds - before) / seconds), first_look(level)
    if most < fewest:
        budget = math.ceil(SPARE * (before + fewest * seconds))
        fault = f"--budget {question.budget_seconds:g} is too short: a decision needs {fewest} rounds or more of"
        raise InputError(f"{fault} {seconds:.3g} seconds each", hint=f"--budget {budget}")
    return plan_looks(level, most)
