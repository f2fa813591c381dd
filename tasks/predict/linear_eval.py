"""A classifier on a frozen backbone: features of a prepared set's splits, and a logistic regression on them.

A program for a fresh process. It is fitted on the training split; the predictions of the test split are written as by
ranks. Shapes: N samples, D values of the layer, K classes.
"""

import os
import resource
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.conf.config import Config
from paceline.conf.execution import Precision
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.split import Split
from paceline.tasks.evaluate.linear_classifier import Fit, fit
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.pretrained import initial_state
from paceline.tasks.model_bundle import digest_of, write_model
from paceline.tasks.predict.job import Settings, batch_size_for
from paceline.tasks.predict.predictor import Predictor
from paceline.tasks.predict.subprocess_job import since_start, subprocess_main
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.measurement import Validity
from paceline.tasks.records.record import Record

MODEL, PREDICTIONS = "model", "predictions.npz"
CHUNK = 16  # forward passes for which images are read at once
UNKNOWN_LOGIT = -1e9  # of a class that the training split has no sample of


class LinearEvalJob(Record):
    """Specification of a linear evaluation."""

    config: Config
    prepared: PreparedSet
    pretrained: Pretrained
    layer: str
    precision: Precision
    num_threads: int
    directory: str
    own_pids: tuple[int, ...]  # processes of the run on this host, whose load is not foreign


class LinearEvalResult(Record):
    """Result of a linear evaluation. Seconds are counted from the start of the process."""

    settings: Settings  # how the features are computed
    startup_seconds: float  # until the first image is read
    extract_seconds: float  # features of the training split
    fit_seconds: float
    ended_seconds: float  # from the start until it is scored on the validation split
    validation_score: float
    predictions: str
    prediction_samples_per_second: float  # features and classes of the test split
    joules: float | None  # from the first image until it is scored on the validation split
    peak_memory_bytes: int
    validity: Validity
    num_train: int
    num_features: int
    converged: bool


def fit_linear_head(job: LinearEvalJob) -> LinearEvalResult:
    """Extract, fit, score, predict."""
    config, directory = job.config, Path(job.directory) / MODEL
    state = initial_state(config.model, job.prepared, job.pretrained, config.seed)
    facts = write_model(directory, config, job.prepared, state)
    settings = Settings(
        model_directory=str(directory),
        model_digest=digest_of(facts),
        precision=job.precision,
        gpu=False,
        num_threads=job.num_threads,
        batch_size=batch_size_for(facts.image_shape),
        package=config.model.plugin.identity if config.model.plugin else None,
        layer=job.layer,
    )
    predictor = Predictor(settings)
    train, validation, test = (open_split(job.prepared, name) for name in ("train", "validation", "test"))
    startup = since_start()
    energy, validity = EnergyMeter(), ValidityWatch((os.getpid(), os.getppid(), *job.own_pids))
    values_ND = features_of(predictor, train)
    extracted = since_start()
    fitted = fit("logistic", values_ND, train.labels_N, job.config.seed)
    right_N = fitted.pipeline.predict(features_of(predictor, validation)) == validation.labels_N
    ended = since_start()
    joules, observed = energy.joules(), validity.stop()
    started = time.perf_counter()
    logits_NK = _logits(fitted, features_of(predictor, test), len(job.prepared.class_names))
    rate = test.num_samples / (time.perf_counter() - started)
    predictions = Path(job.directory) / PREDICTIONS
    np.savez(predictions, index=np.arange(test.num_samples), kept=logits_NK)
    return LinearEvalResult(
        settings=settings,
        startup_seconds=startup,
        extract_seconds=extracted - startup,
        fit_seconds=fitted.seconds,
        ended_seconds=ended,
        validation_score=float(right_N.mean()),
        predictions=str(predictions),
        prediction_samples_per_second=rate,
        joules=joules,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        validity=observed,
        num_train=train.num_samples,
        num_features=values_ND.shape[1],
        converged=fitted.converged,
    )


def features_of(predictor: Predictor, split: Split) -> npt.NDArray[np.float32]:
    """Features of all samples (N, D) of a split, in order."""
    size = CHUNK * batch_size_for(predictor.facts.image_shape)
    chunks = [np.arange(first, min(first + size, split.num_samples)) for first in range(0, split.num_samples, size)]
    return np.concatenate([predictor(pictures(predictor, split, chunk))[0] for chunk in chunks])


def pictures(predictor: Predictor, split: Split, indices_N: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Samples of a split as the model takes them."""
    return np.ascontiguousarray(split.gather(indices_N)[..., : predictor.facts.image_shape[2]])


def _logits(fitted: Fit, values_ND: npt.NDArray[np.float32], num_classes: int) -> npt.NDArray[np.float32]:
    """Log-probabilities (N, K), by the numbers of the classes."""
    logits_NK = np.full((len(values_ND), num_classes), UNKNOWN_LOGIT, dtype=np.float32)
    with np.errstate(divide="ignore"):  # a probability may be too small for a number
        log_probabilities_NK = fitted.pipeline.predict_log_proba(values_ND)
    logits_NK[:, fitted.pipeline.classes_] = np.maximum(log_probabilities_NK, UNKNOWN_LOGIT)
    return logits_NK


if __name__ == "__main__":
    subprocess_main(LinearEvalJob, fit_linear_head)
