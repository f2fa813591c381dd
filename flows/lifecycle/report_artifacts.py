"""Artifacts of every MLflow run with a report: the page, its pictures, and the machine."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from paceline.tasks.names import Artifact
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.report.plotting import png_bytes
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.run import RunHandle


def log_report(handle: RunHandle, page: str, figures: Mapping[str, Figure]) -> None:
    """Log the page and its pictures."""
    tracking.log_document(handle, Artifact.REPORT, page)
    for name, figure in figures.items():
        tracking.log_document(handle, Artifact.picture(name), png_bytes(figure))


def describe_devices(hardware: Hardware) -> str:
    """Describe the devices of a host."""
    if hardware.gpus:
        return f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
    return f"{hardware.num_cores} cores of {hardware.cpu_name}"


def log_environment(handle: RunHandle, hardware: Hardware) -> dict[str, Any]:
    """Log and return the packages, the host and the devices."""
    environment = describe_environment((hardware.host,), (describe_devices(hardware),))
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    return environment
