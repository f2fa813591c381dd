"""`paceline doctor` and `paceline metrics`: the state of this site, for people and for Prometheus."""

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, write_json
from paceline.tasks.errors import InputError, RunError

if TYPE_CHECKING:
    from paceline.tasks.doctor.figures import Measurements
    from paceline.tasks.doctor.finding import Finding

MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}
WIDTH = 18


@command(
    ("paceline doctor", "paceline doctor cluster.kind=address cluster.address=tls://host:8786"),
    argument("overrides key=value ...", "the cluster and execution to look at, such as cluster.kind=ssh"),
    argument("--measure", "also measure devices and their links; they must be free"),
    JSON,
)
def doctor(options: Namespace) -> None:
    """Check packages, devices, servers, certificates and the cluster's workers."""
    from paceline.flows.doctor import examine

    config = load("digits", options.overrides)
    with json_stream(options.json) as stream:
        measured: list[Measurements] = []
        note = measured.append if options.measure else None
        findings = []
        for finding in examine(config, Environment(), note):
            findings.append(finding)
            say(_line(finding))
        counts = {status: sum(finding.status == status for finding in findings) for status in MARKS}
        outcome = {"findings": [finding.model_dump() for finding in findings], "counts": counts}
        write_json(stream, outcome | {"measurement": measured[0].model_dump() if measured else None})
    if counts["error"]:
        raise RunError(
            f"{counts['error']} of {len(findings)} checks found something wrong, {counts['warning']} are doubtful"
        )
    say(f"nothing is wrong, {counts['warning']} of {len(findings)} checks doubtful")


def _line(finding: "Finding") -> str:
    remedy = f"\n{'':9}{'':{WIDTH}}-> {finding.remedy}" if finding.remedy else ""
    return f"{MARKS[finding.status]}  {finding.check:<{WIDTH - 1}} {finding.found}{remedy}"


@command(
    ("paceline metrics", "paceline metrics --listen 127.0.0.1:9464"),
    argument("--listen HOST:PORT", "serve them at http://HOST:PORT/metrics, without a login, until Ctrl-C"),
)
def metrics(options: Namespace) -> None:
    """Print runs by state, speedups, regressions, recoveries and free disk for Prometheus."""
    from prometheus_client import generate_latest, start_http_server

    from paceline.tasks.track.exporter import site_registry

    registry = site_registry(Environment())
    if options.listen is None:
        sys.stdout.write(generate_latest(registry).decode())
        return
    host, _, port = options.listen.rpartition(":")
    try:
        _, thread = start_http_server(int(port), host, registry)
    except (ValueError, OSError, OverflowError) as error:
        fault = f"--listen {options.listen} cannot be used ({error}); it is the address of a free port of this host"
        raise InputError(fault, hint="paceline metrics --listen 127.0.0.1:9464", setting="--listen") from error
    say(f"metrics on http://{options.listen}/metrics (Ctrl-C ends it)")
    thread.join()
