"""`paceline doctor`: what is wrong with this site, before a run meets it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, write_json
from paceline.tasks.errors import RunError

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


def _line(finding: Finding) -> str:
    remedy = f"\n{'':9}{'':{WIDTH}}-> {finding.remedy}" if finding.remedy else ""
    return f"{MARKS[finding.status]}  {finding.check:<{WIDTH - 1}} {finding.found}{remedy}"
