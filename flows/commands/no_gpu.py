"""`paceline no-gpu`: what to do without a GPU, measured on the data and the machine at hand."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from paceline.conf.load import load, validate_as
from paceline.flows.commands.console import Command, argument, preset, require, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow, stored_request


def main(options: Namespace) -> None:
    """Run or resume a study of training without a GPU."""
    from paceline.flows.no_gpu.flow import run_no_gpu
    from paceline.flows.no_gpu.request import NoGpuRequest, check_no_gpu

    tree = stored_request(options, "no-gpu") if options.resume else _request(options)
    start_flow(options, validate_as(NoGpuRequest, tree), check_no_gpu, run_no_gpu, _show)


def _request(options: Namespace) -> dict[str, Any]:
    require(options, "preset", "--pretrained")
    config = load(options.preset, options.overrides)
    fields = {"tuned": options.fine_tune} | {
        name: getattr(options, name) for name in ("layer", "target", "repeats", "gpu")
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"preset": options.preset, "config": config, "pretrained": options.pretrained} | given


def _show(summary: dict[str, Any]) -> None:
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
