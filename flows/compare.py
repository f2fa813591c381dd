"""Compares runs and hardware from runs of the store; divides only runs that did the same work. Starts nothing."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.names import Artifact, Metric, is_contaminated
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.speedup.comparability import world_of
from paceline.tasks.speedup.compare import EXECUTION, RATES, ComparedRun, Comparison, compare
from paceline.tasks.speedup.hardware_table import HardwareRun, HardwareTable, tabulate
from paceline.tasks.track.queries import FoundRun, find_runs, get_runs, read_document
from paceline.tasks.track.ui_views import ACCURACY, share_runs

MIN_RUNS = 2
LAST = 5
OTHER_ROLES = ("study", "sweep", "advise", "predict", "classify", "no-gpu")  # roles of runs without a training
TRAINED = ("run", "arm")
FIXED_ITEMS = ("startup", "setup", "prediction", "teardown")
"""Items of the time budget that do not grow with the length of a training."""


def compare_runs(environment: Environment, run_ids: list[str], experiment: str | None, last: int | None) -> Comparison:
    """Compare runs by id, or the newest of an experiment; the first named, or the oldest, is the base."""
    if run_ids and (experiment or last):
        fault = "give either run ids or --experiment with --last, not both"
        raise InputError(fault, hint="for example paceline compare --last 2", setting="--experiment")
    if run_ids:
        runs = get_runs(environment.tracking_uri, run_ids)
    else:
        conditions = [f"tags.`paceline.role` != '{role}'" for role in OTHER_ROLES]
        condition = " and ".join([*conditions, "attributes.status = 'FINISHED'"])
        runs = find_runs(environment.tracking_uri, experiment or "paceline", condition, last or LAST)[::-1]
    if len(runs) < MIN_RUNS:
        raise InputError(
            f"{len(runs)} runs to compare{f' in experiment {experiment}' if experiment else ''}; a comparison needs "
            "at least two: give their ids (see paceline ui) or train another one",
            setting="RUN_ID",
        )
    if len({run.run_id for run in runs}) < len(runs):
        raise InputError("a run is named twice; name each once", setting="RUN_ID")
    return compare([read_compared_run(environment.tracking_uri, run) for run in runs])


def view_url(environment: Environment, comparison: Comparison) -> str:
    """Address of the runs in the MLflow UI, with the columns of the comparison."""
    scores = list(dict.fromkeys(run.score_name for run in comparison.runs if run.score_name)) or ACCURACY
    return share_runs(environment.tracking_uri, [run.run_id for run in comparison.runs], scores)


def read_compared_run(tracking_uri: str, run: FoundRun) -> ComparedRun:
    """Read the facts of a run that a comparison needs."""
    facts: dict[str, Any] = read_document(tracking_uri, run.run_id, Artifact.FACTS) or {}
    return ComparedRun(facts={key: str(value) for key, value in facts.items()}, **run.model_dump())


def hardware_table(environment: Environment, experiment: str, prices: Mapping[str, float]) -> HardwareTable:
    """Tabulate an experiment of MLflow, with prices of a device for an hour by a part of its name."""
    runs, left_out = trained_runs(environment, experiment)
    if not runs:
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "the experiment has no runs"
        fault = f"--experiment {experiment}: no finished, undisturbed training is there ({reasons})"
        raise InputError(f"{fault}; train, or name another experiment")
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
    fit_items = *STEP_ITEMS, "data_wait"
    seconds = {item: run.metrics.get(Metric.seconds(item), 0.0) for item in (*fit_items, *FIXED_ITEMS)}
    fit_seconds = sum(seconds[item] for item in fit_items)
    return HardwareRun(
        run_id=run.run_id,
        facts={name: str(value) for name, value in facts.items()},
        num_devices=num_devices,
        execution=", ".join(str(facts[f"execution.{name}"]) for name in EXECUTION),
        samples_per_second=next(run.metrics[name] for name in RATES if run.metrics.get(name)),
        fixed_seconds=sum(seconds[item] for item in FIXED_ITEMS) or None,
        peak_memory_bytes=run.metrics.get(Metric.PEAK_MEMORY),
        joules_per_sample=joules / (rate * fit_seconds) if joules and rate and fit_seconds else None,
        price_per_device_hour=None if price == "None" else float(price),
        prediction_samples_per_second=run.metrics.get(Metric.PREDICTION_THROUGHPUT),
        of_limit=run.metrics.get(Metric.OF_LIMIT),
        mfu=run.metrics.get(Metric.MFU),
    )
