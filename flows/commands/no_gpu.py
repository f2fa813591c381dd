"""`paceline no-gpu`: what to do without a GPU, measured on the data and the machine at hand."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import checked, load
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
    from paceline.flows.no_gpu.request import NoGpuRequest


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser, optional=True)
    parser.add_argument(
        "--pretrained",
        metavar="WEIGHTS",
        help="weights to start from: a file, RUN_ID, runs:/RUN_ID/model or models:/NAME@ALIAS",
    )
    parser.add_argument(
        "--fine-tune",
        action="append",
        metavar="key=value",
        help="setting of the recipe for fine-tuning only; repeat for more",
    )
    parser.add_argument("--layer", metavar="NAME", help="layer whose output is the features (default: pool)")
    parser.add_argument("--target", type=float, metavar="A", help="validation accuracy at which the time is taken")
    parser.add_argument("--repeats", type=int, metavar="K", help="number of repeats of each way (default: 3)")
    parser.add_argument("--gpu", metavar="NAME", help="GPU whose data sheet bounds what was not measured (default: L4)")
    parser.add_argument("--resume", metavar="RUN_ID", help="resume an interrupted study")


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.no_gpu.request import check_no_gpu

    site = Environment()
    request = _resumed(site, options) if options.resume else _request(options)
    check_no_gpu(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        from paceline.flows.no_gpu.flow import run_no_gpu

        summary = run_no_gpu(request, options.resume)
        _show(summary)
        write_json(stream, {key: value for key, value in summary.items() if key != "result"})


def _options_given(options: Namespace) -> dict[str, Any]:
    names = {"fine_tune": "tuned", "layer": "layer", "target": "target", "repeats": "repeats", "gpu": "gpu"}
    values = {field: getattr(options, option) for option, field in names.items()}
    return {field: value for field, value in values.items() if value is not None}


def _request(options: Namespace) -> NoGpuRequest:
    from paceline.flows.no_gpu.request import NoGpuRequest

    if options.preset is None or options.pretrained is None:
        raise InputError(
            "paceline no-gpu needs a preset and pretrained weights",
            hint="for example: paceline no-gpu folder data.root=DIR --pretrained RUN_ID",
            setting="preset" if options.preset is None else "--pretrained",
        )
    config = load(options.preset, options.overrides)
    asked = {"preset": options.preset, "config": config, "pretrained": options.pretrained}
    return checked(NoGpuRequest, asked | _options_given(options))


def _resumed(site: Environment, options: Namespace) -> NoGpuRequest:
    from paceline.flows.no_gpu.request import NoGpuRequest

    changed = bool(options.pretrained or _options_given(options))
    return checked(NoGpuRequest, stored_request(options, "no-gpu", site, changed))


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.no_gpu_report import no_gpu_table
    from paceline.tasks.speedup.study.no_gpu import NoGpuResult

    result = NoGpuResult.model_validate(summary["result"])
    say_table(*no_gpu_table(result))
    say("")
    say(result.verdict)
    say("")
    for note in result.notes:
        say(note)
    say_pairs([("study", run_location(result.run_id, result.experiment)), ("view", summary["view"])])


COMMAND = Command(
    "measure on CPUs what pays without a GPU: from scratch, fine-tuning or features",
    (
        "paceline no-gpu folder data.root=DIR --pretrained RUN_ID",
        "paceline no-gpu folder data.root=DIR --pretrained resnet18.pt --repeats 3",
    ),
    add_arguments,
    main,
)
