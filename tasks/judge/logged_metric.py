"""A metric that a process of a side logs to MLflow: where it logs, and the value in the run that it leaves.

The process finds the store and the experiment in its environment, as any program of MLflow does, and a tag that MLflow
adds to each run that the process starts (`mlflow.start_run`, Lightning's `MLFlowLogger`). So no run of another program
is taken for its own.
"""

import json
import secrets

from paceline.tasks.errors import InputError
from paceline.tasks.judge.records import MlflowMetric, Side
from paceline.tasks.names import JUDGEMENT_EXPERIMENT, Tag
from paceline.tasks.track.queries import runs_with_tag

NOT_INHERITED = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")  # they would lead to a run or an experiment of the caller


def new_token() -> str:
    """The value of the tag of a process's runs."""
    return secrets.token_hex(8)


def logging_environment(logged: MlflowMetric, token: str) -> dict[str, str]:
    """Variables of a process whose runs are to be found."""
    return {
        "MLFLOW_TRACKING_URI": logged.tracking_uri,
        "MLFLOW_EXPERIMENT_NAME": JUDGEMENT_EXPERIMENT,
        "MLFLOW_RUN_CONTEXT": json.dumps({Tag.PROCESS: token}),
    }


def read_logged(logged: MlflowMetric, token: str, side: Side) -> tuple[float, str]:
    """The last value in the newest run of a process that has the metric, and the run's id; InputError without one."""
    runs = runs_with_tag(logged.tracking_uri, Tag.PROCESS, token)
    for run in runs:
        if logged.name in run.metrics:
            return run.metrics[logged.name], run.run_id
    known = sorted({name for run in runs for name in run.metrics})
    what = f"only {', '.join(known)[:200]}" if known else "nothing to the store that MLFLOW_TRACKING_URI names"
    hint = "use mlflow.start_run or Lightning's MLFlowLogger without a tracking_uri in the code"
    raise InputError(
        f"--mlflow-metric {logged.name}: the --{side.name} side logs {what}",
        hint=f"--mlflow-metric {known[0]}" if known else hint,
    )
