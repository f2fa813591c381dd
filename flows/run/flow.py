"""The pipeline: prepare, train, evaluate, account. Each stage is a Prefect task, the flow is one MLflow run."""

from typing import Any

from prefect import flow

from paceline.conf.config import Config
from paceline.flows.lifecycle.outage import guard_flow
from paceline.flows.run.session import Session, open_session
from paceline.flows.run.stages import evaluate, judge, prepare, train


@flow(name="paceline-run", flow_run_name="{config.name}", persist_result=False)
@guard_flow
def run_pipeline(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Prepare data, train, evaluate, and account for the speed of it.

    Args:
        config: All settings of the run; see the help of each field.
        resume: Id of an unfinished MLflow run, which continues from its newest checkpoint.
    """
    with open_session(Session, config, resume) as stages:
        prepared = prepare(stages)
        trained = train(stages, prepared)
        evaluated = evaluate(stages, prepared, trained)
        judge(stages, prepared, trained, evaluated)
    return stages.summary
