"""Measures, before the trials of a sweep begin, what they give side by side on the devices that they will have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from paceline.conf.load import ConfigError, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.sweep.trial import SweepContext
from paceline.tasks.errors import PacelineError
from paceline.tasks.files import write_durably
from paceline.tasks.sweep.colocation import Colocation, colocation_of, judge_colocation
from paceline.tasks.train.prefect_tasks import measure

KEPT = "colocation.json"
"""In the sweep's directory, for a sweep that goes on."""


def colocation_on(work: SweepContext, baseline: str) -> tuple[Colocation | None, str]:
    """What was measured, now or before this sweep was cut short; or why it was not.

    Args:
        work: Of the sweep.
        baseline: `speedup.baseline`, as asked for.
    """
    kept = work.environment.root / "runs" / work.parent.run_id / KEPT
    before = _load_measurement(kept)
    if before is not None and before.num_devices != work.room.num_at_once:
        return None, f"{before.num_devices} trials ran at once before it was cut short, now {work.room.num_at_once} do"
    if before is not None:
        return before, ""
    reason = _why_not(work, baseline)
    if reason:
        return None, reason
    try:
        found = _measured(work)
    except (PacelineError, ConfigError) as error:
        if is_interruption(error):
            raise
        return None, f"it could not be measured: {error}"
    if found is not None:
        write_durably(kept, found.model_dump_json().encode())
    return found, "" if found is not None else "the measurement was too short"


def _load_measurement(path: Path) -> Colocation | None:
    try:
        return Colocation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _why_not(work: SweepContext, baseline: str) -> str:
    if baseline != "probe":
        return f"speedup.baseline={baseline}"
    if work.room.num_at_once == 1:
        return "one trial runs at a time"
    if work.config.execution.world_size > 1:
        return "each trial has several devices"
    return ""


def _measured(work: SweepContext) -> Colocation | None:
    config = make_config(
        work.config,
        [f"execution.num_devices={work.room.num_at_once}", "recipe.batch_scaling=weak", "speedup.baseline=probe"],
    )
    hardware = work.checked.hardware
    plan = preflight.plan_like(config, work.checked, hardware).model_copy(update=work.layers)
    checked = replace(work.checked, plan=plan)
    measurement = colocation_of(plan, config.recipe.batch_size, hardware.num_cores)
    job = train_job(config, checked, work.prepared, work.parent.run_id, work.environment, measurement=measurement)
    return judge_colocation(measure(job, work.address).probe)
