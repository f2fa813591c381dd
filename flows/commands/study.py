"""`paceline study`: measure what each factor is worth, on the same work."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import load, validate_as
from paceline.conf.study_plan import load_plan, plan_names
from paceline.flows.commands import no_gpu
from paceline.flows.commands.console import Command, argument, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow, stored_request
from paceline.tasks.errors import InputError

REPEATS = 3


def main(options: Namespace) -> None:
    """Run or resume a study."""
    from paceline.flows.study.flow import check_study, run_study
    from paceline.flows.study.request import StudyRequest

    tree = stored_request(options, "study") if options.resume else _request(options)
    request = validate_as(StudyRequest, tree)
    start_flow(options, request, check_study, run_study, no_gpu.show if request.arms else _show)


def _request(options: Namespace) -> dict[str, Any]:
    from paceline.tasks.speedup.study.design import parse_axes

    axes = parse_axes(options.axis) if options.axis or not options.plan else {}
    arms = {}
    if options.plan:  # it fills in what the command line leaves open
        plan = load_plan(options.plan)
        if options.preset and "=" in options.preset:  # an override may come first: a plan names its preset
            options.overrides.insert(0, options.preset)
            options.preset = None
        options.preset = options.preset or plan.preset
        options.overrides[:0] = plan.overrides
        options.ladder = options.ladder or plan.ladder
        options.repeats = plan.repeats if options.repeats is None else options.repeats
        arms = plan.model_dump()["arms"]
        if arms and (axes or options.ladder):
            raise InputError(
                f"--plan {options.plan} has arms of its own, which neither --axis nor --ladder can change",
                hint=f"paceline study --plan {options.plan} data.root=DIR model.pretrained=RUN_ID",
                setting="--axis" if axes else "--ladder",
            )
        if not arms:
            axes = parse_axes([f"{field}={','.join(values)}" for field, values in (plan.axes | axes).items()])
    require(options, "preset")
    if options.target is not None and not 0 < options.target <= 1:
        raise InputError(f"--target must be above 0 and at most 1, got {options.target:g}; for example --target 0.9")
    if options.diagnose:
        options.overrides.append("speedup.diagnose=true")
    return {
        "preset": options.preset,
        "config": load(options.preset, options.overrides),
        "axes": axes,
        "arms": arms,
        "ladder": options.ladder,
        "repeats": REPEATS if options.repeats is None else options.repeats,
        "target": options.target,
    }


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.study_report import study_notes, study_table
    from paceline.tasks.speedup.study.records import StudyResult

    result = StudyResult.model_validate(summary["result"])
    say_table(*study_table(result), study_notes(result))
    say_pairs([("study", run_location(result.run_id, result.experiment)), ("view", summary["view"])])


COMMAND = Command(
    "benchmark every combination of settings, trained several times",
    (
        "paceline study digits --axis execution.precision=32-true,bf16-mixed",
        "paceline study --plan scaling data.root=DIR",
    ),
    (
        *preset(resume="resume an interrupted study"),
        argument(
            "--axis",
            action="append",
            default=[],
            metavar="field=a,b",
            help="a setting and its values, the baseline's value first; repeat for more",
        ),
        argument("--plan", metavar="NAME", help=f"a prepared study: {', '.join(plan_names())}, or a YAML file"),
        argument("--ladder", action="store_true", help="add one factor at a time instead of the full grid"),
        argument("--repeats", type=int, metavar="K", help=f"trainings of each arm (default: {REPEATS})"),
        argument("--target", type=float, metavar="A", help="validation score to which the time is measured"),
        argument("--diagnose", action="store_true", help="measure what limits each arm's step, once"),
    ),
    main,
)
