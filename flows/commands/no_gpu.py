"""`paceline no-gpu`: what to do without a GPU, measured on the data and the machine at hand."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import load, validate_as
from paceline.conf.study_plan import load_plan
from paceline.flows.commands.console import Command, argument, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow, stored_request
from paceline.tasks.errors import InputError


def main(options: Namespace) -> None:
    """Run or resume a study of training without a GPU."""
    from paceline.flows.study.flow import check_study, run_study
    from paceline.flows.study.request import StudyRequest

    tree = stored_request(options, "no-gpu") if options.resume else make_request(options)
    flow = run_study.with_options(name="paceline-no-gpu", flow_run_name="no GPU: {request.config.name}")
    start_flow(options, validate_as(StudyRequest, tree), check_study, flow, show)


def make_request(options: Namespace) -> dict[str, Any]:
    """Fill in the plan `no-gpu`."""
    from paceline.tasks.speedup.study.no_gpu import FEATURES, TUNED

    require(options, "preset", "--pretrained")
    if any(override.startswith("model.pretrained=") for override in options.overrides):
        raise InputError("model.pretrained and --pretrained are given; use one", hint="remove model.pretrained")
    wrong = [override for override in options.fine_tune or [] if not override.startswith("recipe.")]
    if wrong:
        raise InputError(
            f"--fine-tune {wrong[0]} is not a setting of the recipe, and the ways share all other settings",
            hint="--fine-tune recipe.num_epochs=4",
        )
    plan = load_plan("no-gpu")
    arms = plan.model_dump()["arms"]
    arms[TUNED]["overrides"] += options.fine_tune or []
    if options.layer is not None:
        arms[FEATURES]["linear_eval"] = options.layer
    given = {name: getattr(options, name) for name in ("target", "repeats", "gpu")}
    config = load(options.preset, [*plan.overrides, *options.overrides, f"model.pretrained={options.pretrained}"])
    request = {"preset": options.preset, "config": config, "arms": arms, "repeats": plan.repeats}
    return request | {name: value for name, value in given.items() if value is not None}


def show(summary: dict[str, Any]) -> None:
    """Print the table, the verdict and where the study is."""
    from paceline.tasks.report.no_gpu_report import no_gpu_table
    from paceline.tasks.speedup.study.no_gpu import NoGpuResult

    result = NoGpuResult.model_validate(summary["result"])
    say_table(*no_gpu_table(result), [result.verdict, "", *result.notes])
    say_pairs([("study", run_location(result.run_id, result.experiment)), ("view", summary["view"])])


COMMAND = Command(
    "measure on CPUs what pays without a GPU: from scratch, fine-tuning or features",
    (
        "paceline no-gpu folder data.root=DIR --pretrained RUN_ID",
        "paceline no-gpu folder data.root=DIR --pretrained resnet18.pt --repeats 3",
    ),
    (
        *preset(resume="resume an interrupted study"),
        argument(
            "--pretrained",
            metavar="WEIGHTS",
            help="weights to start from: a file, RUN_ID, runs:/RUN_ID/model or models:/NAME@ALIAS",
        ),
        argument(
            "--fine-tune",
            action="append",
            metavar="key=value",
            help="setting of the recipe for fine-tuning only; repeat for more",
        ),
        argument("--layer", metavar="NAME", help="layer whose output is the features (default: pool)"),
        argument("--target", type=float, metavar="A", help="validation accuracy at which the time is taken"),
        argument("--repeats", type=int, metavar="K", help="number of repeats of each way (default: 3)"),
        argument("--gpu", metavar="NAME", help="GPU whose data sheet bounds what was not measured (default: L4)"),
    ),
    main,
)
