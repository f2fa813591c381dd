"""`paceline judge`: is the new version of a program faster, and as good?"""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.conf.environment import Environment
from paceline.flows.commands.console import (
    JSON,
    argument,
    command,
    json_stream,
    run_location,
    say,
    say_pairs,
    say_table,
    write_json,
)
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.tasks.judge.records import Judgement

BUDGET = 300.0
LEDGER_NAME = r"[A-Za-z0-9_.-]{1,64}"
EXAMPLE = (
    "paceline judge --old 'python train.py' --new 'python train.py --fused' --metric 'loss=(.+)' --lower-is-better"
)
STATUSES = {"KEEP": 0, "DISCARD": 3, "RETEST": 4}


@command(
    (EXAMPLE, "paceline judge --ledger"),
    argument("program PROGRAM ...", "the program, behind --, where --old and --new are revisions of git"),
    argument("--old OLD", "the program as it was: a command for the shell, or a revision"),
    argument("--new NEW", "the candidate"),
    argument("--metric REGEX", "quality: number behind the last match in the output, the first group if it has one"),
    argument("--metric-key KEY", "quality: a key of the last line of JSON with it, such as evaluate.accuracy"),
    argument("--lower-is-better", "a smaller metric is better, as of a loss"),
    argument("--margin M", "largest loss of the metric that does not matter (default: 1%% of the old one)", type=float),
    argument("--steps REGEX", "speed by the seconds of steps in the output, not by the time of the process"),
    argument("--budget SECONDS", f"time for the judgement (default: {BUDGET:g})", type=float, default=BUDGET),
    argument("--limit SECONDS", "time for one process (default: that of the judgement)", type=float),
    argument(
        "--ledger NAME", "ledger to use (default: that of the old side); alone: print it, or all", nargs="?", const=""
    ),
    JSON,
)
def judge(options: Namespace) -> int:
    """Judge whether a new version of a program is faster and as good."""
    if options.ledger and not re.fullmatch(LEDGER_NAME, options.ledger):
        fault = f"--ledger {options.ledger}: a name has up to 64 letters of English, digits, dots, - and _"
        raise InputError(fault, hint="--ledger mine")
    if options.ledger is not None and options.old is options.new is None:
        _show_ledgers(options)
        return 0
    _check(options)
    from paceline.flows.judge import judge_commands, judge_revisions
    from paceline.tasks.judge.records import Question

    program, given = shlex.join(options.program), {"old": options.old, "new": options.new}
    sides = {
        name: {"name": name, "command": program or text, "directory": str(Path.cwd()), "revision": program and text}
        for name, text in given.items()
    }
    names = ("metric", "metric_key", "lower_is_better", "margin", "steps")
    limits = {"budget_seconds": options.budget, "limit_seconds": options.limit or options.budget}
    question = Question.model_validate(sides | limits | {name: getattr(options, name) for name in names})
    judge_sides = judge_revisions if program else judge_commands
    with json_stream(options.json) as stream, judge_sides(Environment(), question, options.ledger or None) as found:
        say_pairs(*_rows(found))
        write_json(stream, found.model_dump(mode="json"))
    return STATUSES[found.outcome]


def _check(options: Namespace) -> None:
    for name in ("old", "new"):
        if not (getattr(options, name) or "").strip():
            raise InputError(f"paceline judge needs --{name}", hint=f"for example: {EXAMPLE}", setting=f"--{name}")
    check_values(options, ("budget", "limit", "margin"), ("metric", "steps"))
    if options.metric and options.metric_key:
        raise InputError("--metric and --metric-key are given; use one", hint="remove --metric")
    if options.margin is not None and not (options.metric or options.metric_key):
        raise InputError("--margin is about a metric, and none is given", hint="add --metric 'loss=(.+)'")


def check_values(options: Namespace, numbers: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    """Raise InputError: a number is not above 0, which a margin may be, or a pattern is not a regular expression."""
    for name in numbers:
        value, option = getattr(options, name), name.replace("_", "-")
        if value is not None and not (0 < value < float("inf") or (value == 0 and name == "margin")):
            rule, hint = ("0 or more", 0) if name == "margin" else ("a number above 0", 60)
            raise InputError(f"--{option} must be {rule}, got {value:g}", hint=f"--{option} {hint}")
    for name in patterns:
        try:
            re.compile(getattr(options, name) or "")
        except re.error as error:
            fault = f"--{name} {getattr(options, name)} is not a regular expression ({error})"
            raise InputError(fault, hint=f"for example --{name} 'loss=(.+)'") from error


def _rows(found: "Judgement") -> Iterator[tuple[str, str]]:
    from paceline.tasks.formatting import format_interval, format_seconds, seconds_text
    from paceline.tasks.speedup.verdict import format_ends, format_ratio

    yield "outcome", f"{found.outcome}: {found.reason}"
    if (ratio := found.ratio) is not None and ratio.low is not None and ratio.high is not None:
        times = f"{seconds_text(found.old_seconds)} before, {seconds_text(found.new_seconds)} now"
        ends = format_ends(ratio.low, ratio.high, ratio.value)
        yield "speed", f"{format_ratio(ratio.value)} times as fast (95 % interval {ends}); {times}"
    if found.difference is not None:
        ends = format_interval(found.difference.value, found.difference.low, found.difference.high, form=".4g")
        yield "quality", f"{found.parity}: difference {ends}, positive is better; margin {found.margin:.3g}"
    if found.needed_seconds is not None:
        yield "needed", f"about {found.needed_rounds} rounds: --budget {found.needed_seconds:.0f}"
    elif found.outcome == "RETEST":
        quiet = "more rounds than Paceline takes: the sides are too alike, or vary too much"
        yield "needed", quiet if found.num_rounds else "a quiet machine"
    contaminated = sum(bool(each.contaminated) for each in found.rounds)
    effort = f"{format_seconds(found.seconds)}, {found.num_rounds} rounds of 4 processes"
    yield "effort", effort + (f", and {contaminated} contaminated ones, which do not count" if contaminated else "")
    yield "ledger", f"{found.ledger}, candidate {found.candidate}, at a level of {found.level:.2g}"
    if found.run_id is not None:
        yield "run", run_location(found.run_id, str(found.experiment))


def _show_ledgers(options: Namespace) -> None:
    from paceline.flows.judge import ledgers
    from paceline.tasks.formatting import format_interval
    from paceline.tasks.judge.lord import FALSE_KEEP_RATE

    with json_stream(options.json) as stream:
        found = ledgers(Environment(), options.ledger or None)
        if not found:
            fault = f"--ledger {options.ledger}: no such ledger is in {Environment().root}".replace("  ", " ")
            raise InputError(fault, hint=f"judge a candidate first: {EXAMPLE}")
        for ledger in found:
            at = f" at commit {ledger.base.commit[:12]}" if ledger.base.commit else ""
            say(f"\nledger {ledger.name}: {ledger.base.command} in {ledger.base.directory}{at}")
            rows = [
                (
                    str(each.number),
                    each.time[:16],
                    each.outcome,
                    format_interval(each.ratio.value, each.ratio.low, each.ratio.high, form=".3f")
                    if each.ratio
                    else "",
                    f"{each.level:.2g}",
                    each.command,
                )
                for each in ledger.candidates
            ]
            note = f"next level {ledger.next_level:.2g}: of all that are kept at most {FALSE_KEEP_RATE:.0%} are false"
            say_table(("#", "time (UTC)", "outcome", "ratio", "level", "candidate"), rows, [note])
        trees = [each.model_dump(mode="json") | {"next_level": each.next_level} for each in found]
        write_json(stream, {"ledgers": trees})
