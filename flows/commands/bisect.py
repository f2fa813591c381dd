"""`paceline bisect`: which commit, or which package, made a program slower?"""

import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.conf.environment import Environment
from paceline.flows.commands.console import (
    JSON,
    argument,
    command,
    json_stream,
    run_location,
    say,
    say_pairs,
    write_json,
)
from paceline.flows.commands.judge import check_values
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.tasks.judge.bisection import Bisection

BUDGET = 900.0
EXAMPLE = "paceline bisect --good v1.0 --bad HEAD -- python train.py"


class Words(NamedTuple):
    """How the ends of a search, and what is between them, are named."""

    unit: str
    found: str
    all: str
    good: str
    bad: str


GIT_WORDS = Words(
    unit="commits",
    found="as the commit before it",
    all="at the bad revision as at the good one",
    good="at the good revision",
    bad="at the bad one",
)
LOCK_WORDS = Words(
    unit="packages",
    found="with this change as without it",
    all="with the bad versions as with the good ones",
    good="with the good versions",
    bad="with the bad ones",
)
STATUSES = {"FOUND": 0, "MACHINE": 3, "NO SLOWDOWN": 3, "UNDECIDED": 4}


@command(
    (EXAMPLE, "paceline bisect --good fast.txt --bad slow.txt -- python train.py"),
    argument("program PROGRAM ...", "the program, behind --"),
    argument("--good REV", "a revision of git at which it was fast, or a lock file of its packages then"),
    argument("--bad REV", "a later revision at which it is slow, or the lock file of its packages now"),
    argument("--good-seconds S", "its time at the good revision as it was measured then", type=float),
    argument("--bad-seconds S", "its time at the bad revision as it was measured then", type=float),
    argument("--steps REGEX", "speed by the seconds of steps in the output, not by the time of the process"),
    argument("--budget SECONDS", f"time for the search (default: {BUDGET:g})", type=float, default=BUDGET),
    argument("--limit SECONDS", "time for one process (default: that of the search)", type=float),
    JSON,
)
def bisect(options: Namespace) -> int:
    """Find the commit, or the packages of a lock file, that made a program slower, or that it was the machine."""
    _check(options)
    has_locks = _has_lock_files(options)
    from paceline.flows.bisect import bisect_commits, bisect_packages
    from paceline.tasks.judge.records import Question

    program, place = shlex.join(options.program), str(Path.cwd())
    sides = {
        side: {"name": name, "command": program, "directory": place, "revision": getattr(options, name)}
        for side, name in (("old", "good"), ("new", "bad"))
    }
    limits = {"budget_seconds": options.budget, "limit_seconds": options.limit or options.budget}
    question = Question.model_validate(sides | limits | {"steps": options.steps})
    recorded = (options.good_seconds, options.bad_seconds) if options.good_seconds else None
    bisect_ends = bisect_packages if has_locks else bisect_commits
    with json_stream(options.json) as stream, bisect_ends(Environment(), question, recorded, say) as found:
        say_pairs(*_rows(found, LOCK_WORDS if has_locks else GIT_WORDS))
        write_json(stream, found.model_dump(mode="json"))
    return STATUSES[found.outcome]


def _check(options: Namespace) -> None:
    for name in ("good", "bad"):
        if not (getattr(options, name) or "").strip():
            raise InputError(f"paceline bisect needs --{name}", hint=f"for example: {EXAMPLE}", setting=f"--{name}")
    if not options.program:
        raise InputError("paceline bisect needs a program behind --", hint=f"for example: {EXAMPLE}", setting="program")
    check_values(options, ("budget", "limit", "good_seconds", "bad_seconds"), ("steps",))
    good, bad = options.good_seconds, options.bad_seconds
    if (good is None) != (bad is None):
        missing = "--good-seconds" if good is None else "--bad-seconds"
        raise InputError(f"{missing} is missing; recorded times are needed of both revisions", hint=f"{missing} 60")
    if good and bad <= good:
        fault = f"--bad-seconds must be above --good-seconds {good:g}, got {bad:g}"
        raise InputError(fault, hint=f"--good-seconds {bad:g} --bad-seconds {good:g}")


def _has_lock_files(options: Namespace) -> bool:
    """Whether both ends are files, and not revisions. Raises InputError: one is a text file."""
    is_file = {name: Path(getattr(options, name)).is_file() for name in ("good", "bad")}
    for name, other in (("good", "bad"), ("bad", "good")):
        if is_file[name] and not is_file[other] and getattr(options, name).endswith(".txt"):
            fault = f"--{name} {getattr(options, name)} is a file, and --{other} {getattr(options, other)} is none"
            raise InputError(fault, hint="name two lock files, or two revisions of git", setting=f"--{other}")
    return all(is_file.values())


def _rows(found: "Bisection", words: Words) -> Iterator[tuple[str, str]]:
    from paceline.tasks.formatting import format_seconds, seconds_text
    from paceline.tasks.speedup.verdict import format_ends, format_ratio

    yield "outcome", f"{found.outcome}: {found.reason}"
    if (ratio := found.ratio) is not None and ratio.low is not None and ratio.high is not None:
        what = words.found if found.outcome == "FOUND" and len(found.commits) == 1 else words.all
        ends = format_ends(ratio.low, ratio.high, ratio.value)
        yield "speed", f"{format_ratio(ratio.value)} times as fast {what} (95 % interval {ends})"
    times = f"{seconds_text(found.good_seconds)} {words.good}, {seconds_text(found.bad_seconds)} {words.bad}"
    yield "times", times
    if found.outcome in ("MACHINE", "UNDECIDED"):
        names = " to ".join(dict.fromkeys((found.commits[0].label, found.commits[-1].label)))
        yield "remain", f"{len(found.commits)} of {found.num_commits} {words.unit}: {names}"
    num_rounds = sum(len(each.rounds) for each in found.series)
    yield "effort", f"{format_seconds(found.seconds)}, {len(found.series)} series, {num_rounds} rounds"
    if found.run_id is not None:
        yield "run", run_location(found.run_id, str(found.experiment))
