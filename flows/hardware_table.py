"""The hardware table: compares device models that did the same work, from runs of the store. Starts nothing."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.names import Artifact, Metric, is_contaminated
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.speedup.comparability import world_of
from paceline.tasks.speedup.compare import EXECUTION, RATES
from paceline.tasks.speedup.hardware_table import HardwareRun, HardwareTable, tabulate
from paceline.tasks.track.queries import FoundRun, find_runs, read_document

TRAINED = ("run", "arm")
FIXED_ITEMS = ("startup", "setup", "prediction", "teardown")
"""Items of the time budget that do not grow with the length of a training."""


def hardware_table(environment: Environment, experiment: str, prices: Mapping[str, float]) -> HardwareTable:
    """Tabulate an experiment of MLflow, with prices of a device for an hour by a part of its name."""
    runs, left_out = trained_runs(environment, experiment)
    if not runs:
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "there is no run at all"
        raise InputError(
            f"--experiment {experiment}: no finished, undisturbed training is there ({reasons}); "
            "train, or name another experiment"
        )
    return tabulate(runs, left_out, prices)


def trained_runs(environment: Environment, experiment: str) -> tuple[list[HardwareRun], Counter[str]]:
    """The trainings of an experiment, the newest first, and how many were left out for which reason."""
    left_out: Counter[str] = Counter()
    hardware_runs = []
    runs = [
        run
        for role in TRAINED
        for run in find_runs(environment.tracking_uri, experiment, f"tags.`paceline.role` = '{role}'", None)
    ]
    for run in sorted(runs, key=lambda run: -run.start_time):
        if run.status != "FINISHED":
            left_out["not finished"] += 1
        elif is_contaminated(run.tags):
            left_out["disturbed by other work"] += 1
        elif not any(run.metrics.get(name) for name in RATES):
            left_out["without a throughput"] += 1
        else:
            facts = read_document(environment.tracking_uri, run.run_id, Artifact.FACTS) or {}
            num_devices = world_of(facts)
            if num_devices is None:
                left_out["without their facts"] += 1
            else:
                hardware_runs.append(_hardware_run(run, facts, num_devices))
    return hardware_runs, left_out


def _hardware_run(run: FoundRun, facts: Mapping[str, Any], num_devices: int) -> HardwareRun:
    price = run.params.get("speedup.price_per_device_hour", "None")
    joules, rate = (run.metrics.get(name) for name in (Metric.ENERGY, Metric.THROUGHPUT))
    fit_seconds = sum(_seconds(run, item) for item in (*STEP_ITEMS, "data_wait"))
    return HardwareRun(
        run_id=run.run_id,
        facts={name: str(value) for name, value in facts.items()},
        num_devices=num_devices,
        execution=", ".join(str(facts[f"execution.{name}"]) for name in EXECUTION),
        samples_per_second=next(run.metrics[name] for name in RATES if run.metrics.get(name)),
        fixed_seconds=sum(_seconds(run, item) for item in FIXED_ITEMS) or None,
        peak_memory_bytes=run.metrics.get(Metric.PEAK_MEMORY),
        joules_per_sample=joules / (rate * fit_seconds) if joules and rate and fit_seconds else None,
        price_per_device_hour=None if price == "None" else float(price),
        prediction_samples_per_second=run.metrics.get(Metric.PREDICTION_THROUGHPUT),
        of_limit=run.metrics.get(Metric.OF_LIMIT),
        mfu=run.metrics.get(Metric.MFU),
    )


def _seconds(run: FoundRun, item: str) -> float:
    return run.metrics.get(Metric.seconds(item), 0.0)
