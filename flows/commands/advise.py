"""`paceline advise`: predict what more devices would give before they are bought."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.commands.console import add_preset, json_stream, run_location, say_pairs, write_json
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.tasks.errors import InputError

HELP = "predict the speedup on N devices, and rank what to do next"
DEVICES = "2,4,8"


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser)
    parser.add_argument("--devices", default=DEVICES, metavar="N,N", help=f"numbers of devices (default: {DEVICES})")
    parser.add_argument(
        "--link", default="measured", help="measured (default), or a kind: nvlink, pcie4, ethernet10, ..."
    )
    parser.add_argument("--latency", type=float, metavar="S", help="of a link of your own, seconds per message")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="of a link of your own, gigabytes per second")
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds that the whole training may take")


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.forecast import AdviseRequest, check_advise

    site = Environment()
    if (options.latency is None) != (options.bandwidth is None):
        raise InputError("--latency and --bandwidth describe one link; give both or neither")
    if options.deadline is not None and options.deadline <= 0:
        raise InputError(f"--deadline {options.deadline} is not above 0; give seconds")
    request = AdviseRequest(
        preset=options.preset,
        config=load(options.preset, options.overrides),
        devices=_numbers(options.devices),
        link="given" if options.latency is not None else options.link,
        latency_seconds=options.latency,
        gigabytes_per_second=options.bandwidth,
        deadline_seconds=options.deadline,
    )
    check_advise(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        from paceline.flows.forecast import run_advise

        outcome = run_advise(request)
        where = run_location(outcome["run_id"], outcome["experiment"])
        say_pairs([*((name, value) for name, value in outcome.pop("table")), ("prediction", where)])
        write_json(stream, outcome)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--devices {text} is not a list of numbers; write them as in --devices 2,4,8") from error
