"""The study: trains every arm several times in a balanced order. Each training is a run nested in the study's run."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from prefect import flow

from paceline.conf.environment import Environment, quieten
from paceline.conf.load import make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.results import result_of, reusable
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.outage import outlive_outages
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.lifecycle.prefect_artifacts import publish
from paceline.flows.lifecycle.signals import stop_on_signal
from paceline.flows.study.record import StudyOutcome, log_study
from paceline.flows.study.request import StudyRequest
from paceline.flows.study.trainings import PlannedArm, open_study, run_all, train_arm
from paceline.tasks.data.key import describe
from paceline.tasks.errors import InputError
from paceline.tasks.redact import redact_errors
from paceline.tasks.report.study_report import study_notes
from paceline.tasks.speedup.study.design import expand


@reusable
def check_study(request: StudyRequest, environment: Environment) -> list[PlannedArm]:
    """Check every arm before any work starts.

    Raises:
        InputError: naming the arm that cannot run.
    """
    if request.repeats < 1:
        raise InputError(
            f"repeats={request.repeats}; every arm is trained at least once: use 3 or more for intervals",
            setting="--repeats",
        )
    arms = expand(lambda overrides: make_config(request.config, overrides), request.axes, ladder=request.ladder)
    base = request.config.model_copy(update={"speedup": request.config.speedup.model_copy(update={"baseline": "none"})})
    if request.config.speedup.diagnose:
        base = request.config
    list_data = cache(describe)  # most arms have the same data
    planned = []
    for arm in arms:
        config = make_config(base, list(arm.overrides))
        try:
            checked = preflight.check(config, environment, list_data=list_data)
            planned.append(PlannedArm(arm, config, checked, train_arm))
        except InputError as error:
            raise InputError(f"arm {arm.name}: {error}") from error
    return planned


@flow(name="paceline-study", flow_run_name="study {request.config.name}", persist_result=False)
@stop_on_signal
@outlive_outages
@redact_errors
def run_study(request: StudyRequest, resume: str | None = None) -> dict[str, Any]:
    """Train every arm several times in a balanced order, and report the speedup of each factor.

    Args:
        request: Arms, repeats and what they have in common.
        resume: Id of an unfinished study to resume.
    """
    quieten()
    started = time.monotonic()
    environment = Environment()
    arms = result_of(check_study, request, environment)
    cancel_older()
    with open_study("study", request, arms, environment, resume) as (work, arms):
        run_all(work, arms)
        outcome = StudyOutcome(
            request=request,
            arms=[arm.arm for arm in arms],
            runs=work.ledger.runs(),
            prepared={prepared.fingerprint: prepared for prepared in work.prepared.values()},
            hardware=arms[0].checked.hardware,
            seconds=time.monotonic() - started,
        )
        result, summary = log_study(outcome, work.parent)
    publish([("", note) for note in study_notes(result)], "study", "What the arms gave")
    mlflow_views.link(summary["view"], "The trainings of this study")
    return summary | {"result": result.model_dump(mode="json")}
