"""Precision, memory format and threads of studies, sweeps and forecasts, where they are left to `auto`: as measured.

A training by `paceline run` measures them itself before its first step. These commands measure them once, before all of
their trainings, so that all of these are executed alike.
"""

from __future__ import annotations

from pathlib import Path

from paceline.tasks.records import Hardware, Plan
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.autotune.choice import LAYER_SETTINGS, choose
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.prefect_tasks import measure_layers


def measured_plan(job: TrainJob, hardware: Hardware, address: str) -> Plan:
    """The job's plan with the layers' settings as measured: by an earlier training, or now.

    What is measured now stays with the run, so that a resumed one is executed as before.

    Args:
        job: with a plan by the rules; its directory is the run's.
        hardware: of the first training host.
        address: of the Dask scheduler.
    """
    plan = job.plan
    if plan.strategy == "fsdp" or not plan.reasons.keys() & set(LAYER_SETTINGS):
        return plan
    of_run, of_home = (
        AutotuneCache(home, job.config, hardware, job.prepared) for home in (job.directory, Path(job.home))
    )
    found = of_run.find() or of_home.find()
    if found is None:
        found = measure_layers(job, address)
        of_home.keep(found)
    of_run.keep(found, even_contaminated=True)
    layers = tuple(probe for probe in found.probes if probe.candidate.variant == "synthetic_input")
    return choose(plan, found.model_copy(update={"probes": layers}), arm_of(plan), 0)
