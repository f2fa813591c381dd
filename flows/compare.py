"""Compares runs of the store; divides only runs that did the same work. Starts nothing."""

from typing import Any

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.names import Artifact
from paceline.tasks.speedup.compare import ComparedRun, Comparison, compare
from paceline.tasks.track.queries import FoundRun, find_runs, get_runs, read_document
from paceline.tasks.track.ui_views import ACCURACY, share_runs

MIN_RUNS = 2
LAST = 5
OTHER_ROLES = ("study", "sweep", "advise", "predict", "classify", "no-gpu")  # roles of runs without a training


def compare_runs(environment: Environment, run_ids: list[str], experiment: str | None, last: int | None) -> Comparison:
    """Compare runs by id, or the newest of an experiment; the first named, or the oldest, is the base."""
    if run_ids and (experiment or last):
        raise InputError(
            "give either run ids or --experiment with --last, not both",
            hint="for example paceline compare --last 2",
            setting="--experiment",
        )
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
