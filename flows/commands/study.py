"""`paceline study`: measure what each factor is worth, on the same work."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import checked, load
from paceline.conf.study_plan import StudyPlan, load_plan, plan_names
from paceline.flows.commands.console import (
    Command,
    add_preset,
    json_stream,
    run_location,
    say,
    say_pairs,
    say_table,
    write_json,
)
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.flows.commands.resumed import stored_request
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.flows.study.request import StudyRequest

REPEATS = 3


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser, optional=True)
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="field=a,b",
        help="a setting and its values, the baseline's value first; repeat for more",
    )
    parser.add_argument("--plan", metavar="NAME", help=f"a prepared study: {', '.join(plan_names())}, or a YAML file")
    parser.add_argument("--ladder", action="store_true", help="add one factor at a time instead of the full grid")
    parser.add_argument("--repeats", type=int, metavar="K", help=f"trainings of each arm (default: {REPEATS})")
    parser.add_argument("--target", type=float, metavar="A", help="validation score to which the time is measured")
    parser.add_argument("--diagnose", action="store_true", help="measure what limits each arm's step, once")
    parser.add_argument("--resume", metavar="RUN_ID", help="resume an interrupted study")


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.study.flow import check_study

    site = Environment()
    request = _resumed(site, options) if options.resume else _request(options)
    check_study(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        from paceline.flows.study.flow import run_study

        summary = run_study(request, options.resume)
        _show(summary)
        write_json(stream, {key: value for key, value in summary.items() if key != "result"})


def _request(options: Namespace) -> StudyRequest:
    from paceline.flows.study.request import StudyRequest
    from paceline.tasks.speedup.study.design import parse_axes

    axes = parse_axes(options.axis) if options.axis or not options.plan else {}
    if options.plan:
        axes = _merge_plan(options, load_plan(options.plan), axes)
    if options.preset is None:
        raise InputError(
            "paceline study needs a preset",
            hint="for example: paceline study digits --axis execution.num_devices=1,2",
            setting="preset",
        )
    if options.target is not None and not 0 < options.target <= 1:
        raise InputError(
            f"--target must be above 0 and at most 1, got {options.target:g}",
            hint="for example --target 0.9",
            setting="--target",
        )
    if options.diagnose:
        options.overrides.append("speedup.diagnose=true")
    asked = {
        "preset": options.preset,
        "config": load(options.preset, options.overrides),
        "axes": axes,
        "ladder": options.ladder,
        "repeats": REPEATS if options.repeats is None else options.repeats,
        "target": options.target,
    }
    return checked(StudyRequest, asked)


def _merge_plan(options: Namespace, plan: StudyPlan, given: dict[str, list[str]]) -> dict[str, list[str]]:
    """Fill in from a plan what the command line leaves open; the axes, the given ones in place of the plan's."""
    from paceline.tasks.speedup.study.design import parse_axes

    if options.preset and "=" in options.preset:  # a plan has a preset of its own, so that an override may come first
        options.overrides.insert(0, options.preset)
        options.preset = None
    options.preset = options.preset or plan.preset
    options.overrides[:0] = plan.overrides
    options.ladder = options.ladder or plan.ladder
    options.repeats = plan.repeats if options.repeats is None else options.repeats
    return parse_axes([f"{field}={','.join(values)}" for field, values in (plan.axes | given).items()])


def _resumed(site: Environment, options: Namespace) -> StudyRequest:
    from paceline.flows.study.request import StudyRequest

    changed = options.ladder or any(
        value is not None for value in (options.plan, *options.axis, options.repeats, options.target)
    )
    return checked(StudyRequest, stored_request(options, "study", site, changed))


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.study_report import study_notes, study_table
    from paceline.tasks.speedup.study.records import StudyResult

    result = StudyResult.model_validate(summary["result"])
    say_table(*study_table(result))
    say("")
    for note in study_notes(result):
        say(note)
    where = run_location(result.run_id, result.experiment)
    say_pairs([("study", where), ("view", summary["view"])])


COMMAND = Command(
    "benchmark every combination of settings, trained several times",
    (
        "paceline study digits --axis execution.precision=32-true,bf16-mixed",
        "paceline study --plan scaling data.root=DIR",
    ),
    add_arguments,
    main,
)
