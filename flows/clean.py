"""The clean-up as a flow: of the state directory, of MLflow's store, and a look at that of Prefect's server."""

import json
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.settings.models.server.services import ServerServicesDBVacuumSettings
from pydantic import Field

from paceline.conf.environment import Environment
from paceline.flows.lifecycle.outage import guard_flow, publish
from paceline.flows.lifecycle.prefect_api import prefect_server
from paceline.tasks.clean.removal import clean_home
from paceline.tasks.http import ask
from paceline.tasks.track.garbage import remove_deleted_runs

VACUUM = "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"


@flow(name="paceline-clean", persist_result=False)
@guard_flow
def clean_up(keep: Annotated[int, Field(ge=0)] = 10, older_than: Annotated[float, Field(ge=0)] = 0.0) -> dict[str, Any]:
    """Free disk space of PACELINE_HOME, MLflow and Prefect.

    Args:
        keep: Number of newest trainings of which prepared sets and logs stay.
        older_than: Remove only what was not changed or used for so many days.
    """
    environment = Environment()
    done = clean_home(environment.root, environment.tracking_uri, keep, older_than)
    rows = [(f"{number} {kind}, {size} MiB", outcome) for kind, number, size, outcome in done.rows()]
    database = environment.mlflow_database.get_secret_value() if environment.mlflow_database else None
    rows += [("MLflow", remove_deleted_runs(environment.tracking_uri, database)), ("Prefect", _vacuum(environment))]
    for name, text in rows:
        get_run_logger().info("%s: %s", name, text)
    publish(rows, "clean-up", "What the clean-up removed, and why the rest stays")
    return {"freed_bytes": done.freed_bytes, "outcome": dict(rows)}


def _vacuum(environment: Environment) -> str:
    """What Prefect's server itself removes of old flow runs."""
    user = environment.prefect_user.get_secret_value() if environment.prefect_user else None
    try:
        answer = json.loads(ask(f"{prefect_server(environment)}/admin/settings", user))
        vacuum = ServerServicesDBVacuumSettings.model_validate(answer["server"]["services"]["db_vacuum"])
    except (OSError, ValueError, KeyError) as error:
        return f"its server does not report what it removes ({error})"
    if "flow_runs" in vacuum.enabled_vacuum_types:
        return f"its server removes flow runs, logs and artifacts after {vacuum.retention_period.days} days"
    return f"its server does not remove flow runs; start it with {VACUUM}=events,flow_runs"
