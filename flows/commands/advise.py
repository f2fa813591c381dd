"""`paceline advise`: predict what more devices would give before they are bought."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.conf.environment import Environment
from paceline.conf.load import load, split_values
from paceline.flows.commands.console import Command, add_preset, json_stream, run_location, say_pairs, write_json
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.tasks.errors import InputError

DEVICES = "2,4,8"


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser)
    parser.add_argument(
        "--devices", default=DEVICES, metavar="N,N", help=f"numbers of devices to forecast (default: {DEVICES})"
    )
    parser.add_argument(
        "--link", default="measured", help="link between devices: measured (default), or nvlink, pcie4, ethernet10, ..."
    )
    parser.add_argument("--latency", type=float, metavar="S", help="latency of your own link, seconds per message")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="bandwidth of your own link, gigabytes per second"
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="longest acceptable training time, seconds")


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.forecast import AdviseRequest, check_advise

    site = Environment()
    if (options.latency is None) != (options.bandwidth is None):
        raise InputError(
            "--latency and --bandwidth describe one link, and only one of them is given",
            hint="give both, for example --latency 30e-6 --bandwidth 10",
            setting="--latency" if options.latency is None else "--bandwidth",
        )
    if options.deadline is not None and options.deadline <= 0:
        raise InputError(
            f"--deadline must be above 0 seconds, got {options.deadline:g}",
            hint="for example --deadline 3600",
            setting="--deadline",
        )
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
        return [int(part) for part in split_values(text)]
    except ValueError as error:
        raise InputError(
            f"--devices must be whole numbers, got {text}", hint="for example --devices 2,4,8", setting="--devices"
        ) from error


COMMAND = Command(
    "forecast the speedup on N devices, and rank what to do next",
    ("paceline advise cifar10 data.root=DIR --devices 2,4,8", "paceline advise digits --link ethernet10"),
    add_arguments,
    main,
)
