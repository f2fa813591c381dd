"""Measures precision, memory format and threads that are `auto`, once for a whole study, sweep or forecast."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.preflight import PreflightResult
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.autotune.choice import LAYER_SETTINGS, choose, without_failed_graph
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.prefect_tasks import measure_layers


def train_job(
    config: Config,
    checked: PreflightResult,
    prepared: PreparedSet | None,
    run_id: str,
    environment: Environment,
    **options: Any,
) -> TrainJob:
    """The job of a checked configuration on a prepared set, or of own Lightning code, with further fields of it."""
    return TrainJob(
        config=config,
        plan=checked.plan,
        prepared=prepared,
        pretrained=checked.pretrained,
        packages=config.lightning.packages,
        run_id=run_id,
        tracking_uri=environment.tracking_uri,
        home=str(environment.root),
        **options,
    )


def measure_plan(
    config: Config, checked: PreflightResult, prepared: PreparedSet, run_id: str, environment: Environment, address: str
) -> PreflightResult:
    """Replace the layers' settings of a plan by measured ones, from an earlier measurement or a new one."""
    plan = checked.plan
    if plan.strategy == "fsdp" or not plan.reasons.keys() & set(LAYER_SETTINGS):
        return checked
    job = train_job(config, checked, prepared, run_id, environment)
    of_run, of_home = (
        AutotuneCache(home, config, checked.hardware, prepared) for home in (job.directory, Path(job.home))
    )
    search = of_run.find() or of_home.find()
    if search is None:
        search = measure_layers(job, address)
        of_home.keep(search)
    of_run.keep(search, even_contaminated=True)  # so that a resume executes the same plan
    layers = tuple(probe for probe in search.probes if probe.candidate.variant == "synthetic_input")
    plan = without_failed_graph(plan, search)
    return replace(checked, plan=choose(plan, search.model_copy(update={"probes": layers}), arm_of(plan), 0))
