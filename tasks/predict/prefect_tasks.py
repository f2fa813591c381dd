"""The prediction stage as Prefect tasks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from paceline.tasks import deadline
from paceline.tasks.errors import InputError, OutsideError, RunError, one_line
from paceline.tasks.files import is_full
from paceline.tasks.predict.dask_graph import call_on_worker, predict_parts
from paceline.tasks.predict.job import Parity, Part, PartRecord, Settings
from paceline.tasks.predict.linear_eval import LinearEvalJob, LinearEvalResult
from paceline.tasks.predict.module_job import ModuleJob
from paceline.tasks.predict.part import check_parity, finished_record
from paceline.tasks.predict.subprocess_job import SubprocessJob, run_in_subprocess
from paceline.tasks.predict.throughput import PredictionThroughputs, ThroughputJob
from paceline.tasks.progress import progress_of_samples
from paceline.tasks.records.data import Reads
from paceline.tasks.records.hardware import Gpu
from paceline.tasks.records.prediction import ModulePredicted
from paceline.tasks.records.record import Record
from paceline.tasks.redact import redact_errors

MIN_AGREEMENT = 0.99
NUM_PARITY = 256
SAME = {  # what agrees, by the unit of a parity
    "samples": "{} samples get the same class",
    "pixels": "the pixels of {} images get the same class",
    "values": "the values of {} images are the same",
    "features": "the features of {} images point the same way",
}


class Predicted(Record):
    """Result of a prediction."""

    records: tuple[PartRecord, ...]  # one for each part
    num_reused: int  # samples of parts that an earlier call has left
    reads: Reads  # what this call had the workers read from afar
    parity: Parity | None  # None where nothing was left to predict, or nothing can be read
    seconds: float  # wall time of the parts that were predicted now


@task(name="predict", cache_policy=NO_CACHE)
@redact_errors
def predict(parts: list[Part], settings: Settings, address: str, seconds: float | None = None) -> Predicted:
    """Predict the missing parts, after comparing the executed model with the plain one.

    Raises:
        RunError: The executed model predicts other classes than the plain one, or the disk is full.
        OutsideError: The cluster or a file system failed, or a worker can read nothing of a part; finished parts stay.
        TimeLimitError: It took longer than its limit.
    """
    with deadline.time_limit("limits.predict_seconds", seconds), _explain_disk_errors(Path(parts[0].path).parent):
        predicted = _predict(parts, settings, address)
    unread = [record for record in predicted.records if record.num_unread]
    if unread:
        number = sum(record.num_unread for record in unread)
        words = f"{number} images could not be read (why: column error); the next call tries them again"
        if any(record.num_samples == 0 for record in unread):
            raise OutsideError(f"{words}; there are parts of which none could: check that every worker reaches them")
        get_run_logger().warning(words)
    return predicted


@contextmanager
def _explain_disk_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise RunError(f"{place}: the disk is full; finished parts stay; free space and call again") from error
        fix = "check that every worker can read the data and write there"
        raise OutsideError(f"{place}: {one_line(error)}; {fix}") from error


def _predict(parts: list[Part], settings: Settings, address: str) -> Predicted:
    logger = get_run_logger()
    finished_parts = {part.number: record for part in parts if (record := finished_record(part)) is not None}
    missing = [part for part in parts if part.number not in finished_parts]
    num_reused = sum(record.num_samples + record.num_rejected for record in finished_parts.values())
    if finished_parts:
        logger.info("%d samples in %d parts are predicted already", num_reused, len(finished_parts))
    checked, reads = None, Reads()
    if missing:
        images = missing[0].images
        few = replace(missing[0], images=images._replace(samples=images.samples[:NUM_PARITY]))
        checked, reads = call_on_worker(address, "prediction", check_parity, few, settings)
    if checked is not None:
        what = SAME[checked.unit].format(checked.num_samples)
        if not _agrees(checked):
            fault = f"in {settings.precision}, {100 * checked.agreement:.1f} % of {what} as in float32"
            raise RunError(f"{fault}, and {100 * MIN_AGREEMENT:.0f} % must; use execution.precision=32-true")
        text = "Against float32, eager: %.2f %% of %s; the largest difference is %.4g"
        logger.info(text, 100 * checked.agreement, what, checked.max_difference)
    started = time.perf_counter()
    with progress_of_samples("predict", logger.info) as show:
        records = predict_parts(address, missing, settings, show)
    reads = Reads.total([reads, *(record.reads for record in records)])
    if reads.summary:
        logger.info("Read %s", reads.summary)
    took = time.perf_counter() - started if missing else 0.0
    done = tuple(sorted([*finished_parts.values(), *records], key=lambda record: record.number))
    return Predicted(records=done, num_reused=num_reused, reads=reads, parity=checked, seconds=took)


def _agrees(result: Parity) -> bool:
    """Whether it is near enough. Of few samples one is many per cent, and may differ; pixels are always many."""
    if result.unit in ("samples", "features") and 1 < result.num_samples < 1 / (1 - MIN_AGREEMENT):
        return round((1 - result.agreement) * result.num_samples) <= 1
    return result.agreement >= MIN_AGREEMENT


@task(name="classify features", cache_policy=NO_CACHE)
@redact_errors
def classify_features(job: LinearEvalJob, address: str, seconds: float | None = None) -> LinearEvalResult:
    """Fit a classifier on the features of a frozen backbone, in a fresh process on a worker."""
    with deadline.time_limit("limits.train_seconds", seconds):
        result = LinearEvalResult.model_validate_json(_run_alone(job, address))
    log = get_run_logger()
    text = "%d features of %d training samples in %.1f s, fitted in %.1f s: validation accuracy %.4f"
    times = result.extract_seconds, result.fit_seconds
    log.info(text, result.num_features, result.num_train, *times, result.validation_score)
    if not result.converged:
        log.warning("The classifier has not converged; its accuracy is that of where it stopped")
    return result


@task(name="time prediction", cache_policy=NO_CACHE)
@redact_errors
def time_prediction(job: ThroughputJob, address: str, seconds: float | None = None) -> PredictionThroughputs:
    """Time trained networks' predictions, plain and as they are executed, in a fresh process on a worker."""
    with deadline.time_limit("limits.predict_seconds", seconds):
        answer = _run_alone(job, address, tuple(gpu.uuid for gpu in job.gpus[:1]))
    result = PredictionThroughputs.model_validate_json(answer)
    for name, pace in result.paces.items():
        text = "%s: prediction %.0f samples/s eager in float32, %.0f as it is executed"
        get_run_logger().info(text, name, pace.eager, pace.executed)
    return result


@task(name="predict", cache_policy=NO_CACHE)
@redact_errors
def predict_with_module(
    job: ModuleJob, gpus: tuple[Gpu, ...], address: str, seconds: float | None = None
) -> ModulePredicted:
    """Predict with own Lightning code in a fresh process on a worker.

    Raises InputError: the code or its data cannot be predicted with, and no row is written.
    """
    with deadline.time_limit("limits.predict_seconds", seconds):
        result = ModulePredicted.model_validate_json(_run_alone(job, address, tuple(gpu.uuid for gpu in gpus)))
    if result.refused is not None:
        raise InputError(result.refused[0], hint=result.refused[1])
    text = "Predicted %d samples in %d batches in %.1f s"
    get_run_logger().info(text, result.num_samples, result.num_batches, result.seconds)
    return result


def _run_alone(job: LinearEvalJob | ThroughputJob | ModuleJob, address: str, devices: tuple[str, ...] = ()) -> str:
    """Run a job on a worker, in a fresh process of the job's own module; return its result as JSON."""
    module, spec, place, num_threads = type(job).__module__, job.model_dump_json(), job.directory, job.num_threads
    process = SubprocessJob(module=module, spec=spec, directory=place, num_threads=num_threads, devices=devices)
    with _explain_disk_errors(Path(place)):
        return call_on_worker(address, "a measurement", run_in_subprocess, process, deadline.seconds_left())
