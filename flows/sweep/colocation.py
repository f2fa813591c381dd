"""Measures before a sweep how much trials on neighbouring devices slow each other down."""

from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from paceline.conf.load import ConfigError, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.sweep.trial import SweepContext
from paceline.tasks.errors import PacelineError
from paceline.tasks.files import write_durably
from paceline.tasks.sweep.concurrency import Colocation, colocation_of, judge_colocation
from paceline.tasks.train.prefect_tasks import measure

FILE = "colocation.json"  # in the sweep's directory, for a resume


def colocation_on(work: SweepContext, baseline: str) -> tuple[Colocation | None, str]:
    """Measure how trials slow each other down, or read the measurement of a resumed sweep; None with the reason."""
    path = work.environment.root / "runs" / work.parent.run_id / FILE
    with suppress(OSError, ValidationError):
        stored, num = Colocation.model_validate_json(path.read_bytes()), work.room.num_at_once
        if stored.num_devices == num:
            return stored, ""
        return None, f"{stored.num_devices} trials ran at once before the interruption, now {num} do"
    if reason := _why_not(work, baseline):
        return None, reason
    try:
        colocation = _measure(work)
    except (PacelineError, ConfigError) as error:
        if is_interruption(error):
            raise
        return None, f"it could not be measured: {error}"
    if colocation is None:
        return None, "the measurement was too short"
    write_durably(path, colocation.model_dump_json().encode())
    return colocation, ""


def _why_not(work: SweepContext, baseline: str) -> str:
    if baseline != "probe":
        return f"speedup.baseline={baseline}"
    if work.room.num_at_once == 1:
        return "one trial runs at a time"
    if work.config.execution.world_size > 1:
        return "each trial has several devices"
    return ""


def _measure(work: SweepContext) -> Colocation | None:
    devices = f"execution.num_devices={work.room.num_at_once}"
    config = make_config(work.config, [devices, "recipe.batch_scaling=weak", "speedup.baseline=probe"])
    hardware = work.checked.hardware
    plan = preflight.plan_on(config, hardware, work.checked.num_train).model_copy(update=work.layers)
    checked = replace(work.checked, plan=plan)
    measurement = colocation_of(plan, config.recipe.batch_size, hardware.num_cores)
    job = train_job(config, checked, work.prepared, work.parent.run_id, work.environment, measurement=measurement)
    return judge_colocation(measure(job, work.address).probe)
