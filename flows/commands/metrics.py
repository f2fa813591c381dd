"""`paceline metrics`: metrics of this site for Prometheus."""

import sys
from argparse import Namespace

from paceline.conf.environment import Environment
from paceline.flows.commands.console import argument, command, say
from paceline.tasks.errors import InputError


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
        _, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (ValueError, OSError, OverflowError) as error:
        fault = f"--listen {options.listen} cannot be used ({error}); it is the address of a free port of this host"
        raise InputError(fault, hint="paceline metrics --listen 127.0.0.1:9464", setting="--listen") from error
    say(f"metrics on http://{options.listen}/metrics (Ctrl-C ends it)")
    thread.join()
