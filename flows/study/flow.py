"""The study: trains every arm several times in a balanced order. Each training is a run nested in the study's run."""

import time
from functools import cache
from typing import Any

from prefect import flow

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.lightning import configure
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.outage import guard_flow, publish
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.study.no_gpu import check_arms
from paceline.flows.study.own_code import prepare_arms, train_own_arm
from paceline.flows.study.record import log_no_gpu, log_study, unconfirmed_winners
from paceline.flows.study.trainings import PlannedArm, StudyRequest, confirm, open_study, run_all, train_arm
from paceline.tasks.data.key import describe
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.speedup.comparability import EXECUTION
from paceline.tasks.speedup.study.design import expand


@preflight.reusable
def check_study(request: StudyRequest, environment: Environment, *, resume: str | None = None) -> list[PlannedArm]:
    """Check every arm before any work starts; raise InputError naming the arm that cannot run."""
    if request.repeats < 1:
        fault = f"repeats={request.repeats}; every arm is trained at least once: use 3 or more for intervals"
        raise InputError(fault, setting="--repeats")
    if bool(request.axes) == bool(request.arms):
        raise InputError("a study has either axes or arms", hint="--axis execution.num_devices=1,2", setting="--axis")
    if request.is_own and (request.arms or request.target is not None):
        name, value = ("--plan", " with arms") if request.arms else ("--target", f" {request.target:g}")
        fault = f"{name}{value} cannot be used with your own Lightning code so far"
        raise InputError(fault, hint=f"remove {name}", setting=name)
    if not request.is_own and (request.same_work or request.objective):
        name = f"--{request.objective.goal}" if request.objective else "--same-work"
        fault = f"{name} is for your own Lightning code, and {request.preset} is a preset"
        raise InputError(fault, hint=f"remove {name}", setting=name)
    planned = check_arms(request, environment) if request.arms else _check_axes(request, environment)
    if resume is None:  # a resume has some of them
        sizes = [arm.checked.checkpoint_bytes for arm in planned]
        checkpoints = request.repeats * sum(size.kept for size in sizes) + max(size.written for size in sizes)
        require_space(request.config.limits, environment.root, {"checkpoints of all trainings": checkpoints})
    return planned


def _check_axes(request: StudyRequest, environment: Environment) -> list[PlannedArm]:
    is_own, same_work = request.is_own, request.same_work
    if unknown := set(same_work) - set(request.axes):
        raise InputError(f"--same-work {unknown.pop()} is not an axis", hint="name an --axis", setting="--same-work")

    def check_arm(overrides: list[str]) -> Config:
        return make_config(request.config, [one for one in overrides if not is_own or one.startswith(EXECUTION)])

    arms = expand(check_arm, request.axes, ladder=request.ladder, is_own=is_own, same_work=same_work)
    base = request.config if request.config.speedup.diagnose else make_config(request.config, ["speedup.baseline=none"])
    list_data = cache(describe)  # most arms have the same data
    planned = []
    for arm, config in zip(arms, configure(base, [arm.overrides for arm in arms]), strict=True):
        try:
            if is_own:
                checked, train_fn = preflight.check_lightning(config, environment), train_own_arm
            else:
                checked, train_fn = preflight.check(config, environment, list_data=list_data), train_arm
            planned.append(PlannedArm(arm, config, checked, train_fn))
        except InputError as error:
            raise InputError(f"arm {arm.name}: {error}") from error
    return planned


@flow(name="paceline-study", flow_run_name="study {request.config.name}", persist_result=False)
@guard_flow
def run_study(request: StudyRequest, resume: str | None = None) -> dict[str, Any]:
    """Train every arm several times in a balanced order, and report the speedup of each factor or way.

    Args:
        request: Arms, repeats and what they have in common.
        resume: Id of an unfinished study to resume.

    Raises RunError: no training has succeeded.
    """
    started = time.monotonic()
    environment = Environment()
    arms = preflight.result_of(check_study, request, environment, resume=resume)
    cancel_older()
    with open_study(request, arms, environment, resume) as (work, arms):
        if request.is_own:
            prepare_arms(work, arms, resume=resume is not None)
        run_all(work, arms)
        if request.axes:
            confirm(work, arms, unconfirmed_winners(work, arms))
        summary, notes = (log_no_gpu if request.arms else log_study)(work, arms, started)
        title = "What to do without a GPU" if request.arms else "What the arms gave"
        publish([("", note) for note in notes], request.kind, title)
        runs = work.ledger.runs()
        if runs and all(run.status == "failed" for run in runs):
            raise RunError(f"all {len(runs)} trainings failed; the last error: {runs[-1].error}")
    mlflow_views.link(summary["view"], "The trainings of this study")
    return summary
