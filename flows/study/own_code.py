"""Arms of a study that train the user's own Lightning code: their data, their trainings, and the metric they log."""

import math
from typing import Any

from paceline.conf.config import Config
from paceline.conf.lightning import Objective
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.run.lightning import prepare_own
from paceline.flows.run.metrics import training_metrics
from paceline.flows.study.trainings import PlannedArm, StudyContext, add_cause, arm_run, time_metrics
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.scores import SCORE, logged_score, own_name
from paceline.tasks.speedup.study.records import ArmRun
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.lightning import code
from paceline.tasks.train.prefect_tasks import fit_module


def prepare_arms(work: StudyContext, arms: list[PlannedArm], *, resume: bool) -> None:
    """Copy the code into the study's directory, and prepare the data of all arms, those of equal settings once."""
    prepared: list[Any] = []
    own, study = work.request.config.lightning, work.environment.root / "runs" / work.parent.run_id
    code.copy_own(own, study)  # an arm with other data would not copy these as code
    for arm in arms:
        settings = arm.config.lightning.settings
        data = settings.get("data", settings)
        if data not in prepared:
            of_study = work.parent.run_id, work.environment
            prepare_own(train_job(arm.config, arm.checked, None, *of_study, resume=resume), work.address)
            prepared.append(data)


def own_quality(trained: ModuleResult, named: Objective | None) -> dict[str, Any]:
    """The metric that stands for the quality of a training, as fields of its record.

    Raises InputError or RankError as `logged_score` does.
    """
    logged = logged_score(trained.metrics | dict.fromkeys(trained.not_finite, math.nan), named)
    if logged is None:
        return {"score_name": SCORE}
    objective, score = logged
    return {"score_name": own_name(objective), "objective": objective, "score": score}


def train_own_arm(work: StudyContext, arm: PlannedArm, config: Config, handle: RunHandle) -> ArmRun:
    """Train in fresh ranks, with the code as it was when the study started.

    Raises InputError or RankError: the training has not logged the metric that the study names, or no number.
    """
    job = train_job(config, arm.checked, None, handle.run_id, work.environment)
    code.copy_own(config.lightning, job.directory, job.directory.with_name(work.parent.run_id))
    trained = fit_module(job, work.address)
    quality = own_quality(trained, work.request.objective)
    if trained.startup_seconds is not None:
        quality["end_to_end_seconds"] = trained.startup_seconds + trained.seconds
    run = arm_run(arm.arm, trained, **quality)
    tracking.log_facts(handle, training_metrics(trained) | time_metrics(run), {})
    return add_cause(run, arm, trained, handle)
