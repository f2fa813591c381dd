"""What every kind of MLflow run with a report has: the page, its pictures, and the machine that it tells of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from paceline.tasks.names import Artifact
from paceline.tasks.records import Hardware
from paceline.tasks.report.plotting import png_bytes
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.run import RunHandle


def log_report(handle: RunHandle, page: str, figures: Mapping[str, Figure]) -> None:
    """Store the page and its pictures by their names."""
    tracking.log_document(handle, Artifact.REPORT, page)
    for name, figure in figures.items():
        tracking.log_document(handle, Artifact.picture(name), png_bytes(figure))


def describe_devices(hardware: Hardware) -> str:
    """A host's devices in words."""
    if hardware.gpus:
        return f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
    return f"{hardware.num_cores} cores of {hardware.cpu_name}"


def log_environment(handle: RunHandle, hardware: Hardware) -> dict[str, Any]:
    """Store and return where this process runs, and on which devices its trainings did."""
    environment = describe_environment((hardware.host,), (describe_devices(hardware),))
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    return environment
