"""Prefect tasks of the training stage, in the flow's process: on a Dask worker they would occupy one of its devices."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from paceline.conf.config import Limits
from paceline.conf.lightning import Lightning
from paceline.tasks import deadline
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError, RunError, StoppedError
from paceline.tasks.files import load_result, save_result
from paceline.tasks.metrics_file import require_newest
from paceline.tasks.names import Metric
from paceline.tasks.progress import progress_bar
from paceline.tasks.records.data import PreparedPartitions
from paceline.tasks.records.measurement import AutotuneResult, Measurement, MeasureResult
from paceline.tasks.records.record import Choice
from paceline.tasks.records.training import ModuleResult, TrainResult
from paceline.tasks.redact import redact_errors
from paceline.tasks.track.metrics_upload import upload_rest
from paceline.tasks.train.launch.coordinator import TrainJob, measure_group, train_group, train_module
from paceline.tasks.train.launch.module_data import prepare_on_hosts, prepare_partitions
from paceline.tasks.train.lightning.code import FOLDER
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


@task(name="train", cache_policy=NO_CACHE)
@redact_errors
def train(job: TrainJob, address: str) -> TrainResult:
    """Train on the cluster, one process per rank; a finished training is not repeated.

    Raises:
        RankError: A rank failed and would fail again; no process of the run is left.
        LostError: A worker, a host or the scheduler was lost and did not come back.
        TimeLimitError: It took longer than its limit.
    """
    return _train_once(job, address)


@task(name="trial", cache_policy=NO_CACHE)
@redact_errors
def train_trial(job: TrainJob, address: str) -> TrainResult | ModuleResult | State[None]:
    """Train, and raise, as `train` does, for a caller that may stop it (`paceline.tasks.deadline.stoppable`).

    A stopped training returns its Prefect state with the reason.
    """
    try:
        return fit_module.fn(job, address) if job.prepared is None else _train_once(job, address)
    except StoppedError as stopped:
        return Completed(name="Stopped", message=str(stopped))  # not Cancelled, which Prefect reports as an error


def _train_once(job: TrainJob, address: str) -> TrainResult:
    logger = get_run_logger()
    done = load_result(job.result_path, TrainResult) if job.resume else None
    if done is not None:
        logger.info("The training has finished before (%s)", job.result_path)
        upload_rest(job.directory, job.tracking_uri, job.run_id)
        return done
    with deadline.time_limit("limits.train_seconds", job.config.limits.train_seconds):
        result = _train(job, address)
    confirm = partial(require_newest, Path(result.predictions[0]).parents[1])
    save_result(job.result_path, result, [file for file in (result.weights, *result.predictions) if file], confirm)
    return result


def _train(job: TrainJob, address: str) -> TrainResult:
    logger, last_epoch = get_run_logger(), -1
    choices = _log_choices(logger, job.plan.reasons, {})
    if job.pretrained is not None:
        logger.info("Initial weights: %s", job.pretrained.summary)
    if job.resume and (checkpoint := newest_valid_checkpoint(job.checkpoints)) is not None:
        logger.info("Resuming from %s", checkpoint)
    elif job.resume:
        logger.warning("No checkpoint in %s; training starts from step 0", job.checkpoints)

    def on_progress(facts: dict[str, Any]) -> None:
        nonlocal last_epoch, choices
        choices = _log_new_choices(logger, facts, choices)
        note = f"loss {facts[Metric.TRAIN_LOSS]:.3f}  {facts[Metric.TRAIN_THROUGHPUT]:,.0f} samples/s"
        if facts["validation_score"] is not None:
            note += f"  validation {facts['score_name'].replace('_', ' ')} {facts['validation_score']:.3f}"
        advance(facts["step"], facts["num_steps"], note)
        if facts["epoch"] > last_epoch:
            last_epoch = facts["epoch"]
            logger.info("Epoch %d of %d: %s", last_epoch + 1, facts["num_epochs"], note)

    with progress_bar("train") as advance:
        result = train_group(job, address, on_progress)
    if result.search is not None and result.search.validity.contaminated:
        busy = f"the machine was busy ({'; '.join(result.search.validity.reasons)})"
        logger.warning("Autotuning result used for precision and memory format of this run only: %s", busy)
    _log_choices(logger, (result.plan or job.plan).reasons, choices)
    num_steps, speed = result.num_steps - result.first_step, result.samples_per_second or 0.0
    trained = f"{num_steps} steps on {result.world_size} ranks in {result.seconds:.1f} s ({speed:.0f} samples/s)"
    logger.info("Trained %s, final loss %.4f", trained, result.final_loss)
    return result


@task(name="prepare-data", cache_policy=NO_CACHE)
@redact_errors
def prepare_module_data(job: TrainJob, address: str) -> TrainJob:
    """Run `prepare_data` of the user's DataModule once on each host of the cluster. Returns the job with these hosts.

    Raises RunError: it raised an error, or a worker was lost; TimeLimitError: it took longer than its limit.
    """
    with deadline.time_limit("limits.prepare_seconds", job.config.limits.prepare_seconds):
        hosts = prepare_on_hosts(job, address)
    for host in hosts:
        get_run_logger().info("prepare_data has run on %s", host)
    return job.model_copy(update={"prepared_on": tuple(hosts)})


@task(name="prepare-partitions", cache_policy=NO_CACHE)
@redact_errors
def prepare_module_partitions(
    module: Lightning,
    copied: str | None,
    home: str,
    address: str,
    limits: Limits,
    *,
    check_content: bool = False,
) -> PreparedPartitions | None:
    """Prepare the partitions of the user's DataModule on all workers, or find them prepared; None where it has none.

    Raises as `prepare_partitions`, and TimeLimitError: it took longer than its limit; RunError: the other partitions
    would fill the disk if they are as large as the mean of those that are prepared.
    """
    if not module.has_partitions:
        return None

    def on_progress(done: int, total: int, num_bytes: int) -> None:
        advance(done, total, "partitions")
        if left := total - done:
            require_space(limits, Path(home), {f"{left} further partitions": left * num_bytes // done}, RunError)

    with deadline.time_limit("limits.prepare_seconds", limits.prepare_seconds), progress_bar("prepare") as advance:
        prepared = prepare_partitions(module, copied, Path(home), address, on_progress, check_content=check_content)
    text = "%s %d partitions in %.1f s: %d files of %d bytes in %s"
    counts = prepared.num_partitions, prepared.seconds, prepared.num_files, prepared.num_bytes
    get_run_logger().info(text, "Reused" if prepared.reused else "Prepared", *counts, prepared.directory)
    return prepared


@task(name="train", cache_policy=NO_CACHE)
@redact_errors
def fit_module(job: TrainJob, address: str) -> ModuleResult:
    """Train the user's own Lightning code on the cluster; a finished training is not repeated. Raises as `train`."""
    logger, last_epoch, noted = get_run_logger(), -1, set[str]()
    choices: Mapping[str, Choice] = job.plan.reasons
    done = load_result(job.result_path, ModuleResult) if job.resume else None
    if done is not None:
        logger.info("The training has finished before (%s)", job.result_path)
        upload_rest(job.directory, job.tracking_uri, job.run_id)
        return done
    job = job if job.partitions else with_partitions(job, address)

    def show(texts: Iterable[str], level: int = logging.WARNING) -> None:
        for text in texts:
            if text not in noted:
                noted.add(text)
                logger.log(level, "%s", text)

    def on_progress(facts: dict[str, Any]) -> None:
        nonlocal last_epoch, choices
        choices = _log_new_choices(logger, facts, choices)
        advance(facts["step"], facts["num_steps"] or 0, _note(facts["metrics"]))
        ended = facts["ended_epoch"]
        if ended and ended["epoch"] > last_epoch:
            last_epoch = ended["epoch"]
            logger.info("Epoch %d: %s", last_epoch + 1, _note(ended["metrics"]))
        show(facts["notes"])
        show(facts["reports"], logging.INFO)

    _log_choices(logger, choices, {})
    speedup = job.config.speedup
    if speedup.baseline == "probe" and not job.resume:
        bound = f"speedup.max_seconds={speedup.max_seconds:g}, and up to twice that on a busy machine"
        logger.info("First measuring the speed (%s, without the start of each arm); then training", bound)
    with deadline.time_limit("limits.train_seconds", job.config.limits.train_seconds), progress_bar("train") as advance:
        result = train_module(job, address, on_progress)
    show(result.notes)
    if result.plan is not None:
        _log_choices(logger, result.plan.reasons, choices)
    confirm = partial(require_newest, Path(result.directory).parent)
    save_result(job.result_path, result, [result.weights] if result.weights else [], confirm)
    trained = f"{result.num_batches} batches on {result.world_size} ranks in {result.seconds:.1f} s"
    rate = f"{result.samples_per_second:,.0f} samples/s" if result.samples_per_second else "samples not counted"
    logger.info("Trained %s (%s)", trained, rate)
    return result


def with_partitions(job: TrainJob, address: str) -> TrainJob:
    """The job with the partitions of the user's DataModule, prepared now or found prepared, where it has some."""
    partitions = partitions_of(job, address)
    if partitions is not None:
        _require_same(job.directory / "partitions.json", partitions)
    return job.model_copy(update={"partitions": partitions})


def partitions_of(job: TrainJob, address: str, *, check_content: bool = False) -> PreparedPartitions | None:
    """Prepare the partitions of a job's DataModule; see `prepare_module_partitions`."""
    module = job.config.lightning
    if not module.has_partitions:
        return None
    copied = str(job.directory / FOLDER) if module.code else None
    return prepare_module_partitions(module, copied, job.home, address, job.config.limits, check_content=check_content)


def _require_same(place: Path, partitions: PreparedPartitions) -> None:
    """Record which data a run uses. Raises InputError: an earlier attempt of the run used other partitions."""
    before = load_result(place, PreparedPartitions)
    if before is None:
        save_result(place, partitions, [])
    elif before.key != partitions.key:
        fault = (
            f"the run began with {before.num_partitions} partitions of data, and now has {partitions.num_partitions}"
        )
        raise InputError(f"{fault}, or others", hint="start a new run")


def _note(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _log_new_choices(logger: Log, facts: Mapping[str, Any], before: Mapping[str, Choice]) -> Mapping[str, Choice]:
    newest = {name: Choice.model_validate(choice) for name, choice in facts["choices"].items()}
    return _log_choices(logger, newest, before)


def _log_choices(logger: Log, choices: Mapping[str, Choice], before: Mapping[str, Choice]) -> Mapping[str, Choice]:
    """Log the choices that differ from those before, and return all; of each checkpoint interval, only the first."""
    for name, choice in choices.items():
        logged = before.get(name)
        is_refined = name == "checkpoint_steps" and logged is not None and isinstance(logged.value, int)
        if choice != logged and not is_refined:
            logger.info("execution.%s=%s: %s", name, choice.value, choice.reason)
    return choices


@task(name="measure", cache_policy=NO_CACHE)
@redact_errors
def measure(job: TrainJob, address: str) -> MeasureResult:
    """Measure on the cluster, one process per rank, without training."""
    logger = get_run_logger()
    assert job.measurement is not None
    arms = "; ".join(arm.label for arm in job.measurement.arms.values())
    own = "the profile" if job.measurement.of_module == "profile" else "single changes"
    logger.info("Measuring %s", arms or f"{own} of your Lightning code")
    result = measure_group(job, address, MeasureResult)
    probe = result.probe
    logger.info("Measured %d rounds in %.1f s (%s)", len(probe.rounds), probe.seconds, probe.stopped_because)
    if probe.validity.contaminated:
        logger.warning("Contaminated: %s", "; ".join(probe.validity.reasons))
    return result


@task(name="time-layers", cache_policy=NO_CACHE)
@redact_errors
def measure_layers(job: TrainJob, address: str) -> AutotuneResult:
    """Time precision, memory format and threads of a network, where they are `auto`."""
    layers = Measurement(arms={})
    result = measure_group(job.model_copy(update={"measurement": layers}), address, AutotuneResult)
    get_run_logger().info("Timed the layers of %s in %.1f s", job.config.name, result.seconds)
    return result
