"""`paceline judge`: is a training faster with another setting, or a new version of any program, and as good?"""

import re
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import is_lightning, preset_names
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
from paceline.flows.commands.own_code import CODE, load_config
from paceline.tasks.errors import InputError
from paceline.tasks.names import JUDGEMENT_EXPERIMENT

if TYPE_CHECKING:
    from paceline.conf.config import Config
    from paceline.tasks.judge.records import Question

BUDGET, TRAINING_BUDGET = 300.0, 1800.0
AS_SIDE = (
    *("speedup.baseline=none", f"track.experiment={JUDGEMENT_EXPERIMENT}"),
    *("track.register=none", "track.on_regression=off"),
)
"""Settings of a training that is judged: a probe would only take time, and no other history may hold its runs."""
RATE_KEY = "train.steady_samples_per_second"
"""Speed of a training, in its JSON. The time of the process would not do: its start-up would hide a gain that matters
in a long training. Rates are compared, so that sides may have unlike numbers of epochs or batches."""
LEDGER_NAME = r"[A-Za-z0-9_.-]{1,64}"
EXAMPLE = (
    "paceline judge --old 'python train.py' --new 'python train.py --fused' --metric 'loss=(.+)' --lower-is-better"
)
STATUSES = {"KEEP": 0, "DISCARD": 3, "RETEST": 4}


@command(
    ("paceline judge digits --old execution.precision=32-true --new execution.precision=bf16-mixed", EXAMPLE),
    argument(
        "overrides WORD ...",
        "preset or YAML file with the settings of both sides, where --old and --new are settings; behind --, "
        "a program, where they are revisions of git",
    ),
    argument("--old OLD", "the old side: settings in quotes ('' for none), a command for the shell, or a revision"),
    argument("--new NEW", "the candidate"),
    CODE,
    argument("--metric REGEX", "quality: number behind the last match in the output, the first group if it has one"),
    argument("--metric-key KEY", "quality: a key of the last line of JSON with it, such as evaluate.accuracy"),
    argument("--mlflow-metric NAME", "quality: a metric that a program logs to the store of MLFLOW_TRACKING_URI"),
    argument("--lower-is-better", "a smaller metric is better, as of a loss"),
    argument("--margin M", "largest loss of the metric that does not matter (default: 1%% of the old one)", type=float),
    argument("--steps REGEX", "speed by the seconds of steps in the output, not by marked steps or the process"),
    argument(
        "--budget SECONDS",
        f"time for the judgement (default: {BUDGET:g}, for settings {TRAINING_BUDGET:g})",
        type=float,
    ),
    argument("--limit SECONDS", "time for one process (default: that of the judgement)", type=float),
    argument(
        "--ledger NAME", "ledger to use (default: that of the old side); alone: print it, or all", nargs="?", const=""
    ),
    JSON,
)
def judge(options: Namespace) -> int:
    """Judge whether other settings, or a new version of any program, are faster and as good."""
    if options.ledger and not re.fullmatch(LEDGER_NAME, options.ledger):
        fault = f"--ledger {options.ledger}: a name has up to 64 letters of English, digits, dots, - and _"
        raise InputError(fault, hint="--ledger mine")
    if options.ledger is not None and options.old is options.new is None:
        _show_ledgers(options)
        return 0
    site, is_training = Environment(), bool(options.overrides) and not options.has_dashes
    _check(options, is_training)
    from paceline.flows.judge import judge_commands, judge_revisions, judge_settings
    from paceline.tasks.track.store import absolute_uri

    if is_training:
        question, old = _trainings(options, site)
        judging = judge_settings(site, question, old, options.ledger or None)
    elif options.code is not None:
        fault = f"--code {options.code} is about your own Lightning code, and its file is not given"
        raise InputError(fault, hint="paceline judge CONFIG.yaml --code DIR", setting="--code")
    else:
        program = shlex.join(options.overrides)
        given = {"old": options.old, "new": options.new}
        sides = {name: {"command": program or text, "revision": program and text} for name, text in given.items()}
        judge_sides = judge_revisions if program else judge_commands
        store = {"name": options.mlflow_metric, "tracking_uri": absolute_uri(site.tracking_uri)}
        question = _question(options, sides, BUDGET, logged=store if options.mlflow_metric else None)
        judging = judge_sides(site, question, options.ledger or None)
    with json_stream(options.json) as stream, judging as found:
        from paceline.tasks.report.judgement_report import judgement_rows  # with matplotlib, which no check waits for

        place = [("run", run_location(found.run_id, str(found.experiment)))] if found.run_id else []
        say_pairs(*judgement_rows(found), *place)
        write_json(stream, found.model_dump(mode="json"))
    return STATUSES[found.outcome]


def _question(options: Namespace, sides: dict[str, dict[str, str]], budget: float, **facts: Any) -> "Question":
    from paceline.tasks.judge.records import Question

    names = ("metric", "metric_key", "lower_is_better", "margin", "steps")
    given = {name: getattr(options, name) for name in names} | facts
    limits = {"budget_seconds": options.budget or budget, "limit_seconds": options.limit or options.budget or budget}
    both = {name: {"name": name, "directory": str(Path.cwd())} | side for name, side in sides.items()}
    return Question.model_validate(given | limits | both)


def _trainings(options: Namespace, site: Environment) -> tuple["Question", "Config"]:
    """Check both sides as `paceline run` does; the question, and the configuration of the old side."""
    preset, *shared = options.overrides
    code = [] if options.code is None else ["--code", options.code]
    for name in ("metric", "mlflow-metric", "steps"):
        if getattr(options, name.replace("-", "_")):
            fault = f"--{name} is about a program, and a training is judged by the JSON of its run"
            raise InputError(fault, hint=f"remove --{name}; --metric-key names another metric")
    if shutil.which(preset) and preset not in preset_names() and not Path(preset).is_file():
        rest = shlex.join(["--old", options.old, "--new", options.new, "--", *options.overrides])
        raise InputError(f"{preset} is a program, and is to stand behind --", hint=f"paceline judge {rest}")
    is_own = is_lightning(preset)
    if is_own and not options.metric_key:
        hint = "--metric-key metrics.val_loss --lower-is-better"
        raise InputError("your own Lightning code needs a metric that it logs", hint=hint, setting="--metric-key")
    configs: list[Config] = []
    sides: dict[str, dict[str, str]] = {}
    for name in ("old", "new"):
        try:
            own = shlex.split(getattr(options, name))
        except ValueError as error:
            fault = f"--{name} {getattr(options, name)}: a quote has no end"
            raise InputError(fault, hint=f"--{name} 'recipe.num_epochs=2'", setting=f"--{name}") from error
        overrides = [*shared, *own, *AS_SIDE, f"name={name}"]
        configs.append(load_config(Namespace(preset=preset, overrides=overrides, code=options.code)))
        program = [sys.executable, "-P", "-m", "paceline.flows.cli", "run", preset, *overrides, *code, "--json"]
        shown = ["paceline", "run", preset, *shared, *own, *code]
        sides[name] = {"command": shlex.join(program), "shown": shlex.join(shown)}
    old, new = configs
    if new.with_seed(old.seed).model_copy(update={"name": old.name}) == old:
        fault = f"--old {options.old} and --new {options.new} are the same training; seeds are of rounds, not of sides"
        raise InputError(fault, hint="--old '' --new execution.precision=bf16-mixed", setting="--new")
    if options.lower_is_better and not options.metric_key:
        fault = "--lower-is-better is about --metric-key, and the score of a preset is better when it is larger"
        raise InputError(fault, hint="remove --lower-is-better")
    from paceline.flows.checks import preflight
    from paceline.tasks.scores import SCORE_OF_TASK

    for config in configs:
        preflight.check_run(config, site)
    options.metric_key = options.metric_key or f"evaluate.{SCORE_OF_TASK[old.model.task]}"
    return _question(options, sides, TRAINING_BUDGET, rate_key=RATE_KEY), old


def _check(options: Namespace, is_training: bool) -> None:
    for name in ("old", "new"):
        given = getattr(options, name)
        if given is None or not (given.strip() or is_training):
            raise InputError(f"paceline judge needs --{name}", hint=f"for example: {EXAMPLE}", setting=f"--{name}")
    check_values(options, ("budget", "limit", "margin"), ("metric", "steps"))
    if options.mlflow_metric is not None and not options.mlflow_metric.strip():
        raise InputError("--mlflow-metric has no name", hint="--mlflow-metric loss", setting="--mlflow-metric")
    qualities = ("metric", "metric_key", "mlflow_metric")
    given = [f"--{name.replace('_', '-')}" for name in qualities if getattr(options, name)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are given; use one", hint=f"remove {given[0]}")
    if options.margin is not None and not (given or is_training):
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
