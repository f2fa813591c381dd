"""Whether the workers of a cluster have the packages of the user's that a configuration names."""

import socket
from collections.abc import Sequence

from paceline.conf import plugins
from paceline.conf.plugins import SETTINGS, Kind, Plugin, PluginError
from paceline.tasks.cluster.client import connect
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.records.record import Record

PackageName = tuple[Kind, str]


class WorkerPackages(Record):
    """The user packages of a worker."""

    host: str
    identities: tuple[str | None, ...]  # identity of each requested package; None for one that is missing


def require_packages(address: str, packages: Sequence[Plugin]) -> None:
    """Check that every worker has them as this process has. Raises InputError: one has not, or other code."""
    if not packages:
        return
    requests = tuple((package.kind, package.name) for package in packages)
    with connect(address) as client:
        answers = client.run(list_packages, requests, on_error="return")
    for worker, answer in sorted(answers.items()):
        if not isinstance(answer, WorkerPackages):
            raise InputError(f"worker {worker} cannot list its packages ({one_line(answer)}); install the same there")
        for _, lack in find_differences(packages, answer):
            raise InputError(f"worker {worker} {lack}; install the same on every host and restart its workers")


def find_differences(packages: Sequence[Plugin], answer: WorkerPackages) -> list[tuple[Plugin, str]]:
    """Packages that a worker has not as they are here, and what it has."""
    differences = []
    for package, identity in zip(packages, answer.identities, strict=True):
        needed = f"{SETTINGS[package.kind]}={package.name} needs {package.identity}"
        if identity is None:
            differences.append((package, f"on host {answer.host} lacks a package: {needed}"))
        elif identity != package.identity:
            differences.append((package, f"on host {answer.host} has {identity}, and {needed}"))
    return differences


def list_packages(asked: tuple[PackageName, ...]) -> WorkerPackages:
    """Look up packages on the worker that runs this, without importing them."""
    identities: list[str | None] = []
    for kind, name in asked:
        try:
            identities.append(plugins.find(kind, name).identity)
        except PluginError:  # not installed here, or by two packages
            identities.append(None)
    return WorkerPackages(host=socket.gethostname(), identities=tuple(identities))
