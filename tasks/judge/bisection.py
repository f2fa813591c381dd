"""Search for the commit that made a program slower, by series of rounds of fresh processes.

A round is a palindrome: its sides in an order that is drawn, and then backwards. If two of its sides do not differ, an
order with both exchanged was as likely, so that the signed-rank test between them is exact on any machine (see
`paceline.tasks.judge.decision`, as for the looks of a series and contaminated rounds). There are three kinds of series:

- The bad revision against the good one, first. Without a difference there is nothing to search for.
- A step: the good revision, the middle commit and the bad revision, in rounds of six. If the middle commit is as fast
  as the good one, calling it slower than that is an error of one exact test; if it is as slow as the bad one, calling
  it faster than that is an error of another one. One of the two holds where a single commit changed the speed, so that
  only one of them can err, and each may spend the level of the step. Times are not compared with a threshold, such as
  half of the first slowdown: it would have to be estimated, and only half of the effect would remain, which takes four
  times the rounds. Since both revisions are measured again, the machine may change between steps.
- The commit that remains against the one before it, last. Only this shows that the commit itself is slower. It is not
  shown where many commits have each a small part of the slowdown.

The level is divided by the number of series, which is known beforehand: a step leaves at most half of the commits, and
one at which the command fails is left out before it is measured. By the union bound, all series together err with at
most the level, however they depend on each other. Contaminated rounds are no part of this: they name no commit.

"The machine, not the code" means that the good version is now as slow as the bad one was: both are equally fast, with
recorded times that are nearer to the bad one's, or in contaminated rounds; or the good version has become as slow as
the bad one was at first, and the time ended before a series was decided. That last rule compares times that lie apart,
which no order of processes makes exact: it explains why nothing was found.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.formatting import format_interval
from paceline.tasks.judge.decision import MAX_ROUNDS, log_ratios, plan_looks
from paceline.tasks.judge.processes import run_process
from paceline.tasks.judge.records import Commit, ProcessRun, Question, Round, Side, SideName
from paceline.tasks.judge.rounds import Run, Watch, take_rounds
from paceline.tasks.measure.paired_ratio import Interval, estimate_ratio, location_interval
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.records.record import Record

LEVEL = 0.05  # of all series together
MARGIN = math.log(1.02)  # a slowdown that does not matter, where none is known
PATIENCE = 10  # a commit whose process takes so many times a round of the good and the bad revision counts as hung

Verdict = Literal["slower", "equal", "as good", "as bad", "machine", "undecided", "skipped"]
Result = Literal["FOUND", "MACHINE", "NO SLOWDOWN", "UNDECIDED"]
Decide = Callable[[Sequence[Round]], Verdict | None]
CONTINUE: tuple[Verdict, ...] = ("slower", "as good", "as bad", "skipped")


class Series(Record):
    """Rounds of a commit against others, and what they show."""

    commit: str
    verdict: Verdict
    reason: str = ""  # why it was skipped
    ratios: dict[str, Interval]  # throughput of the commit over that of each other side, by their revisions
    rounds: tuple[Round, ...]  # the contaminated ones among them

    @property
    def text(self) -> str:
        """The series for people, on one line."""
        facts = [
            f"{format_interval(ratio.value, ratio.low, ratio.high, form='.3f')} times as fast as {revision}"
            for revision, ratio in self.ratios.items()
        ]
        num_contaminated = sum(bool(each.contaminated) for each in self.rounds)
        facts += [f"{len(self.rounds) - num_contaminated} rounds"] if self.rounds else []
        facts += [f"{num_contaminated} contaminated ones"] if num_contaminated else []
        return f"{self.commit}: {self.verdict}; {', '.join(filter(None, [*facts, self.reason]))}"


class Bisection(Record):
    """The outcome of a search as it is recorded and printed."""

    outcome: Result
    reason: str
    old: str  # the good revision
    new: str  # the bad one
    commits: tuple[Commit, ...]  # those that may have made it slower; one where it is found
    num_commits: int  # from the good revision to the bad one
    ratio: Interval | None = None  # throughput of the found commit over that of the one before it; else bad over good
    good_seconds: float | None = None  # median of a process, or of a step, in the first series
    bad_seconds: float | None = None
    series: tuple[Series, ...]
    level: float = LEVEL
    seconds: float
    run_id: str | None = None
    experiment: str | None = None


class UnusableError(Exception):
    """The command fails at the middle commit."""


@dataclass
class Search:
    """What is searched, and the means; `search` carries it out once."""

    question: Question  # old is the good side, new the bad one
    commits: Sequence[Commit]  # from the good revision to the bad one, both included
    open_side: Callable[[SideName, str], Side]
    recorded: tuple[float, float] | None = None  # seconds of the good side and the bad one, measured earlier
    note: Callable[[str], None] = lambda _: None
    run: Run = run_process
    watch: Callable[[list[int]], Watch] = ValidityWatch
    draw: random.Random = field(default_factory=random.SystemRandom)
    clock: Callable[[], float] = time.monotonic
    level: float = LEVEL
    what: str = "commit"  # that is searched
    budget_name: str = "--budget "  # as messages begin the setting of the time

    def __post_init__(self) -> None:
        """Divide the level, and start the time."""
        between = len(self.commits) - 2
        self._num_steps, self._series = between.bit_length(), list[Series]()
        self._plan = plan_looks(self.level / (2 + self._num_steps if between else 1), MAX_ROUNDS)
        self._started, self._known, self._margin = self.clock(), self.recorded, MARGIN
        if self.recorded:
            self._margin = math.log(self.recorded[1] / self.recorded[0]) / 2

    def search(self) -> Bisection:
        """Search for the commit; InputError if a revision does not work, or the time is too short for all series."""
        low, high, skipped = 0, len(self.commits) - 1, set[int]()
        sides: dict[SideName, Side] = {"good": self.question.old, "bad": self.question.new}
        last = self._take(self.commits[high].label, sides, self._compare)
        if last.verdict == "slower":
            self._known = _typical(_valid(last.rounds))
            self._margin = -math.log(_first_ratio(last).value) / 2
            limit = min(self.question.limit_seconds, PATIENCE * max(each.seconds for each in last.rounds))
            self.question = self.question.model_copy(update={"limit_seconds": limit})
        while last.verdict in CONTINUE and (left := sorted(set(range(low + 1, high)) - skipped)):
            middle = left[len(left) // 2]
            if self.clock() - self._started > self.question.budget_seconds:  # as commits that fail take time, too
                label = self.commits[middle].label
                last = self._keep(Series(commit=label, verdict="undecided", ratios={}, rounds=()))
                break
            last = self._step(self.commits[middle], sides)
            if last.verdict == "skipped":
                skipped.add(middle)
            elif last.verdict == "as good":
                low = middle
            elif last.verdict == "as bad":
                high = middle
        if last.verdict in CONTINUE and high - low == 1 and self._num_steps:
            sides = {"good": self.open_side("good", self.commits[low].name)}
            sides["bad"] = self.open_side("bad", self.commits[high].name)
            last = self._take(self.commits[high].label, sides, self._compare, of_machine=False)
        return self._conclude(self.commits[low + 1 : high + 1], last)

    def _step(self, commit: Commit, sides: dict[SideName, Side]) -> Series:
        try:
            try:
                middle = self.open_side("middle", commit.name)
            except InputError as error:
                raise UnusableError(one_line(error)) from error
            return self._take(commit.label, {"good": sides["good"], "middle": middle, "bad": sides["bad"]}, self._place)
        except UnusableError as error:
            return self._keep(Series(commit=commit.label, verdict="skipped", reason=str(error), ratios={}, rounds=()))

    def _take(self, commit: str, sides: dict[SideName, Side], decide: Decide, *, of_machine: bool = True) -> Series:
        """Rounds of the middle or bad side, a commit, and others until a look decides or the time is used up.

        `of_machine`: the machine may be the cause. This is known only where the good side is the good revision.
        """
        for side in sorted(sides.values(), key=lambda side: side.name != "middle"):  # the one that may fail is first
            is_marked = self._run(side, self.question).num_steps > 0
            self.question = self.question.model_copy(update={"is_marked": is_marked})
        rounds: list[Round] = []
        num_looks, verdict = {False: 0, True: 0}, None
        while verdict is None:
            rounds += take_rounds(sides, self.question, self._run, self.watch, lambda: self._order(sides), self.clock)
            if not self._series:
                self._check_budget(rounds)
            for is_contaminated, test in ((False, decide), (True, self._test_machine))[: 1 + of_machine]:
                group = [each for each in rounds if bool(each.contaminated) == is_contaminated]
                for look in self._plan.looks[num_looks[is_contaminated] :]:
                    if verdict is None and look <= len(group):
                        num_looks[is_contaminated] += 1
                        verdict = test(group[:look])
            longest = max(each.seconds for each in rounds)
            is_over = self.clock() - self._started + longest > self.question.budget_seconds
            if verdict is None and (is_over or num_looks[False] == len(self._plan.looks)):
                verdict = "machine" if of_machine and self._is_slow(rounds) else "undecided"
        own: SideName = "middle" if "middle" in sides else "bad"
        ratios = {
            str(side.revision): ratio
            for name, side in sides.items()
            if name != own
            and (ratio := estimate_ratio(log_ratios(_valid(rounds), (name, own)), self._plan.confidence)) is not None
        }
        return self._keep(Series(commit=commit, verdict=verdict, ratios=ratios, rounds=tuple(rounds)))

    def _run(self, side: Side, question: Question) -> ProcessRun:
        try:
            return self.run(side, question)
        except InputError as error:
            if side.name == "middle":
                raise UnusableError(one_line(error)) from error
            raise

    def _order(self, sides: dict[SideName, Side]) -> tuple[SideName, ...]:
        order = self.draw.sample(list(sides), len(sides))
        return (*order, *reversed(order))

    def _keep(self, series: Series) -> Series:
        self._series.append(series)
        self.note(series.text)
        return series

    def _check_budget(self, rounds: list[Round]) -> None:
        number = (4 + 4 * bool(self._num_steps) + 6 * self._num_steps) * self._plan.looks[0]
        seconds = sum(each.seconds for each in rounds) / sum(len(each.runs) for each in rounds)
        if self.question.budget_seconds < number * seconds:
            budget = f"{self.budget_name}{self.question.budget_seconds:g}"
            fault = f"{budget} is too short for {len(self.commits) - 1} {self.what}s:"
            fault += f" they take {number} processes of {seconds:.3g} seconds or more"
            raise InputError(fault, hint=f"{self.budget_name}{math.ceil(2 * number * seconds)}")

    def _slowdown(self, rounds: Sequence[Round], fast: SideName, slow: SideName) -> tuple[float, float]:
        """Sure interval of the logarithm of a side's time over that of another one."""
        _, low, high = location_interval(log_ratios(rounds, (slow, fast)), 1 - 2 * self._plan.look_level)
        return float(low), float(high)

    def _compare(self, rounds: Sequence[Round]) -> Verdict | None:
        low, high = self._slowdown(rounds, "good", "bad")
        if high < self._margin and (low <= 0 or self._known):
            return "equal"
        return "slower" if low > 0 else None

    def _place(self, rounds: Sequence[Round]) -> Verdict | None:
        if self._slowdown(rounds, "good", "middle")[0] > 0:  # or by a part, where several commits have one
            return "as bad"
        return "as good" if self._slowdown(rounds, "middle", "bad")[0] > 0 else None

    def _test_machine(self, contaminated: Sequence[Round]) -> Verdict | None:
        return "machine" if self._slowdown(contaminated, "good", "bad")[1] < self._margin else None

    def _is_slow(self, rounds: Sequence[Round]) -> bool:
        """Whether the good side's time now is nearer to the known one of the bad side than to its own."""
        return self._known is not None and _typical(rounds)[0] ** 2 > self._known[0] * self._known[1]

    def _conclude(self, commits: Sequence[Commit], last: Series) -> Bisection:
        first = self._series[0]
        outcome: Result = "UNDECIDED"
        if last.verdict == "machine" or (last is first and last.verdict == "equal" and self._is_slow(last.rounds)):
            outcome, reason = "MACHINE", "the machine, not the code: the good version is now as slow as the bad one was"
        elif last.verdict == "equal" and last is first:
            outcome, reason = (
                "NO SLOWDOWN",
                f"the bad version is less than {math.expm1(self._margin):.1%} slower, if at all",
            )
        elif last.verdict == "slower" and len(commits) == 1:
            outcome, reason = "FOUND", f"{commits[0].label} is slower than the {self.what} before it"
        elif last.verdict == "equal":
            reason = f"{last.commit} has a small part of the slowdown at most: it came by several {self.what}s"
        elif last.verdict == "undecided":
            reason = f"{last.commit} is undecided after {len(last.rounds)} rounds"
            if signs := [each.contaminated for each in last.rounds if each.contaminated]:
                reason += f", {len(signs)} of them contaminated ({'; '.join(signs[-1])})"
        else:
            reason = f"the command fails at all {self.what}s between {len(commits)} that remain"
        good_seconds, bad_seconds = _typical(_valid(first.rounds))
        return Bisection(
            outcome=outcome,
            reason=reason,
            old=self.question.old.label,
            new=self.question.new.label,
            commits=tuple(commits),
            num_commits=len(self.commits) - 1,
            ratio=_first_ratio(last if outcome == "FOUND" else first),
            good_seconds=good_seconds,
            bad_seconds=bad_seconds,
            series=tuple(self._series),
            level=self.level,
            seconds=self.clock() - self._started,
        )


def _valid(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds that count; all where none does."""
    return [each for each in rounds if not each.contaminated] or rounds


def _typical(rounds: Sequence[Round]) -> tuple[float, float]:
    """Median seconds of the good side and the bad one."""
    good, bad = ([run.seconds for each in rounds for run in each.of(name)] for name in ("good", "bad"))
    return median(good), median(bad)


def _first_ratio(series: Series) -> Interval:
    return next(iter(series.ratios.values()))
