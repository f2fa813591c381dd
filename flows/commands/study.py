"""`paceline study` and `paceline no-gpu`: measure what each factor, or each way without a GPU, is worth."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import is_lightning, load, load_plan, plan_names, validate_as
from paceline.flows.commands.console import argument, command, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.own_code import CODE, GOALS, load_config, objective_of
from paceline.flows.commands.prefect_session import start_flow, stored_request
from paceline.tasks.errors import InputError

REPEATS = 3


@command(
    (
        "paceline study digits --axis execution.precision=32-true,bf16-mixed",
        "paceline study --plan scaling data.root=DIR",
    ),
    *preset(resume="resume an interrupted study"),
    argument("--axis field=a,b ...", "a setting and its values, the baseline's value first; repeat for more"),
    argument("--plan NAME", f"a prepared study: {', '.join(plan_names())}, or a YAML file"),
    argument("--ladder", "add one factor at a time instead of the full grid"),
    argument("--repeats K", f"trainings of each arm (default: {REPEATS})", type=int),
    argument("--target A", "validation score to which the time is measured", type=float),
    argument("--diagnose", "measure what limits each arm's step, once"),
    CODE,
    argument("--same-work FIELD ...", "axis of your own code that changes how the work is done, not what is learned"),
    *GOALS,
)
def study(options: Namespace) -> None:
    """Benchmark every combination of settings, trained several times."""
    from paceline.flows.study.flow import check_study, run_study
    from paceline.flows.study.trainings import StudyRequest

    tree = stored_request(options, "study") if options.resume else _request(options)
    request = validate_as(StudyRequest, tree)
    start_flow(options, request, check_study, run_study, _show_ways if request.arms else _show_factors)


def _request(options: Namespace) -> dict[str, Any]:
    from paceline.tasks.speedup.study.design import parse_axes

    is_own = options.preset is not None and is_lightning(options.preset)
    axes = parse_axes(options.axis, is_own=is_own) if options.axis or not options.plan else {}
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
            fault = f"--plan {options.plan} has arms of its own, which neither --axis nor --ladder can change"
            hint = f"paceline study --plan {options.plan} data.root=DIR model.pretrained=RUN_ID"
            raise InputError(fault, hint=hint, setting="--axis" if axes else "--ladder")
        if not arms:
            of_both = [f"{field}={','.join(values)}" for field, values in (plan.axes | axes).items()]
            axes = parse_axes(of_both, is_own=is_lightning(options.preset))
    require(options, "preset")
    if options.target is not None and not 0 < options.target <= 1:
        raise InputError(f"--target must be above 0 and at most 1, got {options.target:g}; for example --target 0.9")
    if options.diagnose:
        options.overrides.append("speedup.diagnose=true")
    return {
        "preset": options.preset,
        "config": load_config(options),
        "axes": axes,
        "arms": arms,
        "same_work": options.same_work,
        "objective": objective_of(options),
        "ladder": options.ladder,
        "repeats": REPEATS if options.repeats is None else options.repeats,
        "target": options.target,
    }


def _show_factors(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.study_report import study_notes, study_table
    from paceline.tasks.speedup.study.records import StudyResult

    result = StudyResult.model_validate(summary["result"])
    say_table(*study_table(result), study_notes(result))
    say_pairs(("study", run_location(result.run_id, result.experiment)), ("view", summary["view"]))


@command(
    (
        "paceline no-gpu folder data.root=DIR --pretrained RUN_ID",
        "paceline no-gpu folder data.root=DIR --pretrained resnet18.pt --repeats 3",
    ),
    *preset(resume="resume an interrupted study"),
    argument("--pretrained WEIGHTS", "weights to start from: a file, RUN_ID, runs:/RUN_ID/model or models:/NAME@ALIAS"),
    argument("--fine-tune key=value ...", "setting of the recipe for fine-tuning only; repeat for more"),
    argument("--layer NAME", "layer whose output is the features (default: pool)"),
    argument("--target A", "validation accuracy at which the time is taken", type=float),
    argument("--repeats K", "number of repeats of each way (default: 3)", type=int),
    argument("--gpu NAME", "GPU whose data sheet bounds what was not measured (default: L4)"),
)
def no_gpu(options: Namespace) -> None:
    """Measure on CPUs what pays without a GPU: from scratch, fine-tuning or features."""
    from paceline.flows.study.flow import check_study, run_study
    from paceline.flows.study.trainings import StudyRequest

    tree = stored_request(options, "no-gpu") if options.resume else no_gpu_request(options)
    flow = run_study.with_options(name="paceline-no-gpu", flow_run_name="no GPU: {request.config.name}")
    start_flow(options, validate_as(StudyRequest, tree), check_study, flow, _show_ways)


def no_gpu_request(options: Namespace) -> dict[str, Any]:
    """Fill in the plan `no-gpu`."""
    from paceline.tasks.speedup.study.no_gpu import FEATURES, TUNED

    require(options, "preset", "--pretrained")
    if any(override.startswith("model.pretrained=") for override in options.overrides):
        raise InputError("model.pretrained and --pretrained are given; use one", hint="remove model.pretrained")
    wrong = [override for override in options.fine_tune or [] if not override.startswith("recipe.")]
    if wrong:
        fault = f"--fine-tune {wrong[0]} is not a setting of the recipe, and the ways share all other settings"
        raise InputError(fault, hint="--fine-tune recipe.num_epochs=4")
    plan = load_plan("no-gpu")
    arms = plan.model_dump()["arms"]
    arms[TUNED]["overrides"] += options.fine_tune or []
    if options.layer is not None:
        arms[FEATURES]["linear_eval"] = options.layer
    given = {name: getattr(options, name) for name in ("target", "repeats", "gpu")}
    config = load(options.preset, [*plan.overrides, *options.overrides, f"model.pretrained={options.pretrained}"])
    request = {"preset": options.preset, "config": config, "arms": arms, "repeats": plan.repeats}
    return request | {name: value for name, value in given.items() if value is not None}


def _show_ways(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.no_gpu_report import no_gpu_table
    from paceline.tasks.speedup.study.no_gpu import NoGpuResult

    result = NoGpuResult.model_validate(summary["result"])
    say_table(*no_gpu_table(result), [result.verdict, "", *result.notes])
    say_pairs(("study", run_location(result.run_id, result.experiment)), ("view", summary["view"]))
