"""Arms of a study that train the user's own Lightning code: their data, their trainings, and the metric they log."""

from pathlib import Path
from typing import Any

from paceline.conf.config import Config
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.run.metrics import training_metrics
from paceline.flows.study.trainings import PlannedArm, StudyContext, add_cause, arm_run, time_metrics
from paceline.tasks.scores import SCORE, is_share, logged_score
from paceline.tasks.speedup.study.records import ArmRun
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.lightning import code
from paceline.tasks.train.prefect_tasks import fit_module, prepare_module_data


def prepare_arms(work: StudyContext, arms: list[PlannedArm]) -> None:
    """Copy the code into the study's directory, and prepare the data of all arms, those of equal settings once."""
    prepared: list[Any] = []
    for arm in arms:
        own = arm.config.lightning
        job = train_job(arm.config, arm.checked, None, work.parent.run_id, work.environment)
        if own.code is not None:
            code.copy(Path(own.code), job.directory)
        data = own.settings.get("data", own.settings)
        if own.prepares_data and data not in prepared:
            prepare_module_data(job, work.address)
            prepared.append(data)


def train_own_arm(work: StudyContext, arm: PlannedArm, config: Config, handle: RunHandle) -> ArmRun:
    """Train in fresh ranks, with the code as it was when the study started.

    Raises InputError: the training has not logged the metric that the study names.
    """
    job = train_job(config, arm.checked, None, handle.run_id, work.environment)
    if config.lightning.code is not None:
        code.copy(work.environment.root / "runs" / work.parent.run_id / code.FOLDER, job.directory)
    trained = fit_module(job, work.address)
    quality: dict[str, Any] = {"score_name": SCORE}
    if (logged := logged_score(trained.metrics, work.request.objective)) is not None:
        objective, score = logged
        name = f"logged {objective.name}" if is_share(objective.name) else objective.name  # not Paceline's score
        quality = {"score_name": name, "objective": objective, "score": score}
    if trained.startup_seconds is not None:
        quality["end_to_end_seconds"] = trained.startup_seconds + trained.seconds
    run = arm_run(arm.arm, trained, **quality)
    tracking.log_facts(handle, training_metrics(trained) | time_metrics(run), {})
    return add_cause(run, arm, trained, handle)
