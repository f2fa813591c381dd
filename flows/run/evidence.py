"""Stores the raw data behind the speedup of a run."""

from hashlib import sha256
from typing import Any

from prefect import get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.run.metrics import is_disturbed
from paceline.tasks.files import write_durably
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.records.training import Trained
from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.evidence.archive import PLAN, analysis_plan, evidence_files, find_steps, json_bytes, pack
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle


def log_plan(handle: RunHandle, config: Config) -> None:
    """Record by which rules the probe is measured and judged, before its first step."""
    tracking.set_tags(handle, {Tag.ANALYSIS_PLAN: sha256(analysis_plan(config.speedup)).hexdigest()})


def log_evidence(
    handle: RunHandle,
    measured: tuple[Config, Trained, SpeedupResult],
    summary: dict[str, Any],
    environment: dict[str, Any],
    starts: FurtherStarts | None = None,
    earlier: tuple[float, ...] = (),
) -> None:
    """Store the evidence in the run's directory and in MLflow; nothing without a probe.

    `starts` are the further processes, and `earlier` the ratios of earlier starts, that the speedup is judged by.
    """
    (config, trained, speedup), directory = measured, Environment().root / "runs" / handle.run_id
    probes = (trained.probe, *(starts or FurtherStarts()).undisturbed)
    contents = [find_steps(directory, probe.steps) for probe in probes if probe is not None]
    raw = [content for content in contents if content is not None]
    if trained.probe is None or len(raw) < len(contents):
        return
    disturbed = is_disturbed(trained)
    validities = (speedup.validity, trained.validity if disturbed else None)
    facts = {
        "run_id": handle.run_id,
        "workload": summary["workload"],
        "contaminated": bool(speedup.contaminated) or disturbed,
        "reasons": [reason for validity in validities if validity for reason in validity.reasons],
        "earlier": earlier,
    }
    environment = environment | {"diff": None, "hosts": None, "settings": config.model_dump(mode="json")}
    documents = {PLAN: analysis_plan(config.speedup), Artifact.ENVIRONMENT: json_bytes(environment)}
    try:
        files = evidence_files(raw, trained, facts, summary | {"rows": summary_table(summary)}, documents)
    except Exception as error:  # noqa: BLE001  a finished run is worth more than its evidence
        get_run_logger().warning("No evidence is stored: %s", error)
        return
    write_durably(directory / Artifact.EVIDENCE, pack(files))
    tracking.log_document(handle, Artifact.EVIDENCE, directory / Artifact.EVIDENCE)
    for name in (Artifact.STEPS, Artifact.WINDOWS):
        tracking.log_document(handle, name, files[name])
