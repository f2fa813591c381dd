"""`paceline evidence`: the raw data behind a run's speedup, in an archive that anyone can recompute."""

import hashlib
from argparse import Namespace
from pathlib import Path

from paceline.conf.environment import Environment
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, say_pairs, write_json
from paceline.tasks.errors import InputError
from paceline.tasks.names import Artifact


@command(
    ("paceline evidence RUN_ID -o run.tar", "paceline evidence --check run.tar"),
    argument("run RUN_ID", "run whose evidence is written", nargs="?"),
    argument("-o --output FILE", "archive to write (default: RUN_ID.tar)", type=Path),
    argument("--check FILE", "recompute the figures of an archive, and print them", type=Path),
    JSON,
)
def evidence(options: Namespace) -> None:
    """Write the raw data behind a run's speedup, to recompute every figure without Paceline."""
    if (options.run is None) == (options.check is None):
        raise InputError(
            "paceline evidence needs RUN_ID, or --check FILE", hint=f"for example: {options.parser.example}"
        )
    from paceline.tasks.files import write_durably
    from paceline.tasks.speedup.evidence.archive import check

    option = "--check" if options.check else "--output"
    file: Path = options.check or options.output or Path(f"{options.run}.tar")
    with json_stream(options.json) as stream:
        try:
            content = file.read_bytes() if options.check else find_evidence(Environment(), options.run)
            figures = check(content, str(options.check or f"the evidence of run {options.run}"))
            if options.run:
                write_durably(file, content)
        except OSError as error:
            raise InputError(f"{option} {file}: {error.strerror}", hint="name a file that you may use") from error
        digest = hashlib.sha256(content).hexdigest()
        if options.check:
            say_pairs(*((name, "null" if value is None else f"{value:.6g}") for name, value in figures.items()))
        say(f"{file}: {len(content):,} bytes, SHA-256 {digest}; all {len(figures)} figures follow from its step times")
        write_json(stream, {"file": str(file), "num_bytes": len(content), "sha256": digest, "figures": figures})


def find_evidence(site: Environment, run_id: str) -> bytes:
    """The evidence in a run's directory, else in MLflow. Raises InputError: there is none."""
    from paceline.tasks.track.queries import get_runs, read_artifact

    path = site.root / "runs" / run_id / Artifact.EVIDENCE
    if run_id.isalnum() and path.exists():
        return path.read_bytes()
    get_runs(site.tracking_uri, [run_id])
    content = read_artifact(site.tracking_uri, run_id, Artifact.EVIDENCE)
    if content is None:
        fault = f"run {run_id} has no evidence: it had no probe, or an older version recorded it"
        raise InputError(fault, hint="paceline run PRESET with speedup.baseline=probe", setting="RUN_ID")
    return content
