"""`paceline clean`, `doctor`, `metrics` and `ui`: what operators of a site need, for people and for Prometheus."""

import json
import os
import secrets
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.commands.console import JSON, argument, command, json_stream, say, say_table, write_json
from paceline.flows.lifecycle import pool
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.track.connectivity import check_tracking_uri
from paceline.tasks.track.serve import STORE, TOKEN

if TYPE_CHECKING:
    from paceline.tasks.doctor.figures import Measurements
    from paceline.tasks.doctor.finding import Finding

MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}
WIDTH = 18


@command(
    ("paceline clean --dry-run", "paceline clean --keep 5 --older-than 30"),
    argument(
        "--keep KEEP",
        "leave what the newest KEEP trainings use (default: 10); files of a ModelCheckpoint stay with any KEEP",
        type=int,
        default=10,
    ),
    argument(
        "--older-than DAYS",
        "remove only what was not changed or used for so many days (default: 0)",
        type=float,
        default=0.0,
    ),
    argument("--dry-run", "report what would be removed, and remove nothing"),
    JSON,
)
def clean(options: Namespace) -> None:
    """Remove prepared sets, checkpoints, weights, compiled code and logs that nothing needs."""
    from paceline.tasks.clean.removal import clean_home

    environment = Environment()
    with json_stream(options.json) as stream:
        if (pid := pool.end_pool(dry_run=options.dry_run)) is not None:
            say(f"{'would end' if options.dry_run else 'ended'} the warm pool, process {pid}")
        uri = environment.tracking_uri
        done = clean_home(environment.root, uri, options.keep, options.older_than, dry_run=options.dry_run)
        say_table(("kind", "number", "MiB", "outcome"), done.rows())
        say(f"{'would free' if done.dry_run else 'freed'} {done.freed_bytes / 2**20:,.1f} MiB of {environment.root}")
        write_json(stream, done.model_dump(mode="json") | {"freed_bytes": done.freed_bytes})


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
    JSON,
)
def metrics(options: Namespace) -> None:
    """Print runs by state, speedups, regressions, recoveries and free disk for Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    from paceline.tasks.track.exporter import SiteCollector

    registry = CollectorRegistry()
    registry.register(SiteCollector(Environment()))
    if options.json:
        samples = [sample for family in registry.collect() for sample in family.samples]
        found = [{"name": one.name, "labels": one.labels, "value": one.value} for one in samples]
        write_json(sys.stdout, {"samples": found})
    elif options.listen is None:
        sys.stdout.write(generate_latest(registry).decode())
    if options.listen is None:
        return
    host, _, port = options.listen.rpartition(":")
    try:
        _, thread = start_http_server(int(port), host, registry)
    except (ValueError, OSError, OverflowError) as error:
        fault = f"--listen {options.listen} cannot be used ({error}); it is the address of a free port of this host"
        raise InputError(fault, hint="paceline metrics --listen 127.0.0.1:9464", setting="--listen") from error
    say(f"metrics on http://{options.listen}/metrics (Ctrl-C ends it)")
    thread.join()


@command(
    ("paceline ui", "paceline ui RUN_ID"),
    argument("run RUN_ID", "print the address of this run's page", nargs="?"),
    argument("--port PORT", "TCP port on loopback (default: 5000)", type=int, default=5000),
    JSON,
)
def ui(options: Namespace) -> None:
    """Serve the MLflow UI on the runs of this machine."""
    environment = Environment()
    check_tracking_uri(environment.tracking_uri)
    remote = environment.tracking_uri.startswith("http")
    if not remote and not environment.tracking_uri_given and not (environment.root / "mlflow.db").exists():
        raise InputError(f"PACELINE_HOME={environment.root} holds no runs yet", hint="paceline run digits")
    page = "experiments"
    if options.run:
        from paceline.tasks.track.queries import run_page

        page = run_page(environment.tracking_uri, options.run)
    if remote:
        from paceline.tasks.track.ui_views import server_address

        address = f"{server_address(environment.tracking_uri)}/#/{page}" if options.run else environment.tracking_uri
        write_json(sys.stdout, {"address": address}) if options.json else print(address)
        return
    token = secrets.token_urlsafe(32)
    # Without the workflow type the UI opens on its pages for agents.
    address = f"http://127.0.0.1:{options.port}/?token={token}#/{page}?workflowType=machine_learning"
    if options.json:
        print(json.dumps({"address": address}), flush=True)  # not redacted: the token in it is the login
    else:
        print(f"MLflow UI on {address} (Ctrl-C ends it)", flush=True)
    variables = os.environ | {TOKEN: token, STORE: environment.tracking_uri}
    arguments = ["--host", "127.0.0.1", "--port", str(options.port)]
    os.execve(sys.executable, [sys.executable, "-P", "-m", "paceline.tasks.track.serve", *arguments], variables)
