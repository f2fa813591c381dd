"""Processes that are killed, and what is known of their runs."""

import psutil
from mlflow.tracking import MlflowClient

from tests.support.patience import until

GUARDIAN = "paceline.flows.lifecycle.guardian"


def family_of(process):
    """A process and its descendants; those of another one that ended are not among them."""
    try:
        found = psutil.Process(process.pid)
        return [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(process, but=""):
    """Kill a process, and with it its descendants, at once, as a power failure does.

    Args:
        process: as a rule a `Popen`.
        but: a module whose processes are left alone.
    """
    for member in family_of(process):
        try:
            if but not in member.cmdline():
                member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(30)


def flow_of(served):
    """The process of the one flow that is served."""

    def found():
        children = psutil.Process(served.process.pid).children()
        return [child for child in children if "prefect.engine" in child.cmdline()]

    (process,) = until(found, "process of the flow")
    return process


def guardians(home):
    """The guardians of all processes with a home."""
    found = []
    for process in psutil.process_iter():
        try:
            if GUARDIAN in process.cmdline() and process.environ().get("PACELINE_HOME") == str(home):
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def slots(served):
    """How many of the deployment's slots are held, as Prefect has it; 0 without a limit."""
    limit = served.deployment["global_concurrency_limit"]
    return limit["active_slots"] if limit else 0


def mlflow_run(home, flow_run, experiment="nights"):
    """The MLflow run of a flow run, once it has one."""
    until(lambda: list(home.glob("runs/*/lock")), "MLflow run")  # its database is not to be made by two at once
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")

    def found():
        entity = client.get_experiment_by_name(experiment)
        return entity and client.search_runs([entity.experiment_id], f"tags.`prefect.flow_run_id` = '{flow_run}'")

    return until(found, "MLflow run")[0]


def status_of(home, flow_run, experiment="nights"):
    """The status in MLflow of a flow run, once it has one."""
    return mlflow_run(home, flow_run, experiment).info.status
