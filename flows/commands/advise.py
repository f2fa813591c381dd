"""`paceline advise`: predict what more devices would give before they are bought."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import split_values
from paceline.flows.commands.console import argument, command, preset, run_location, say_pairs
from paceline.flows.commands.own_code import CODE, load_config
from paceline.flows.commands.prefect_session import start_flow
from paceline.tasks.errors import InputError

DEVICES = "2,4,8"


@command(
    ("paceline advise cifar10 data.root=DIR --devices 2,4,8", "paceline advise digits --link ethernet10"),
    *preset(),
    argument("--devices N,N", f"numbers of devices to forecast (default: {DEVICES})", default=DEVICES),
    argument(
        "--link LINK", "link between devices: measured (default), or nvlink, pcie4, ethernet10, ...", default="measured"
    ),
    argument("--latency S", "latency of your own link, seconds per message", type=float),
    argument("--bandwidth GB/S", "bandwidth of your own link, gigabytes per second", type=float),
    argument("--deadline S", "longest acceptable training time, seconds", type=float),
    CODE,
)
def advise(options: Namespace) -> None:
    """Forecast the speedup on N devices, and rank what to do next."""
    from paceline.flows.forecast import AdviseRequest, check_advise, run_advise

    if (options.latency is None) != (options.bandwidth is None):
        fault = "--latency and --bandwidth describe one link, and only one of them is given"
        missing = "--latency" if options.latency is None else "--bandwidth"
        raise InputError(fault, hint="give both, for example --latency 30e-6 --bandwidth 10", setting=missing)
    if options.deadline is not None and options.deadline <= 0:
        raise InputError(f"--deadline must be above 0 seconds, got {options.deadline:g}; for example --deadline 3600")
    try:
        devices = [int(part) for part in split_values(options.devices)]
    except ValueError as error:
        fault = f"--devices must be whole numbers, got {options.devices}"
        raise InputError(f"{fault}; for example --devices 2,4,8") from error
    request = AdviseRequest(
        preset=options.preset,
        config=load_config(options),
        devices=devices,
        link="given" if options.latency is not None else options.link,
        latency_seconds=options.latency,
        gigabytes_per_second=options.bandwidth,
        deadline_seconds=options.deadline,
    )
    start_flow(options, request, check_advise, run_advise, _show)


def _show(summary: dict[str, Any]) -> None:
    where = run_location(summary["run_id"], summary["experiment"])
    say_pairs(*map(tuple, summary.pop("table")), ("prediction", where))
