"""Fits linear classifiers on features of some images, and scores them on others, in one MLflow run."""

import json
import time
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.conf.section import Section, Text
from paceline.flows.checks import preflight
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.outage import guard_flow
from paceline.tasks.errors import InputError
from paceline.tasks.evaluate import linear_classifier
from paceline.tasks.evaluate.linear_classifier import Features, Fitted, Kind
from paceline.tasks.measure.energy import EnergyMeter
from paceline.tasks.names import PREDICTIONS_FILE, Artifact, Metric, Tag
from paceline.tasks.track import run as tracking

SAME = ("model_digest", "layer")  # facts that both sets of features must share


class ClassifyRequest(Section):
    """Parameters of a classification."""

    train: Text
    """Directory that `paceline features` has written, to fit on."""
    test: Text
    """Directory of other images' features, to score on."""
    kinds: tuple[Kind, ...] = ("logistic", "svm")
    """Classifiers: `logistic` regression, `svm` (linear)."""
    overrides: tuple[Text, ...] = ()
    """Settings of `track` and the seed, as key=value."""


@preflight.reusable
def check_classify(request: ClassifyRequest, environment: Environment) -> tuple[Config, str, dict[str, Any]]:
    """Check the features, the settings and the store; return configuration, experiment id and facts."""
    train, test = _read_facts(Path(request.train), "TRAIN"), _read_facts(Path(request.test), "TEST")
    if any(train[name] != test[name] for name in SAME):
        fault = f"{request.train} and {request.test} are features of other models or layers"
        raise InputError(f"{fault}; write both with the same", setting="TEST")
    if train["key"] == test["key"]:
        fault = f"{request.train} and {request.test} are of the same images ({train['source']})"
        raise InputError(f"{fault}; a classifier is scored on images that it was not fitted on", setting="TEST")
    linear_classifier.check_classes(Path(request.train), Path(request.test))
    config = load("folder", [*request.overrides, f"name={train['layer']}"])
    return config, preflight.check_servers(config, environment), train


def _read_facts(directory: Path, argument: str) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((directory / PREDICTIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fault = f"{directory}: holds no features; write them with paceline features --out"
        raise InputError(fault, setting=argument) from error
    if not facts.get("layer") or "num_samples" not in facts:
        what = "features that are not finished" if facts.get("layer") else "predictions"
        raise InputError(f"{directory}: holds {what}; write features with paceline features --out", setting=argument)
    return facts


@flow(name="paceline-classify", flow_run_name="classify {request.train}", persist_result=False)
@guard_flow
def run_classify(request: ClassifyRequest) -> dict[str, Any]:
    """Fit classifiers on the features of some images, and score them on those of others.

    Args:
        request: Features, classifiers and settings.
    """
    started = time.monotonic()
    environment = Environment()
    config, experiment_id, facts = preflight.result_of(check_classify, request, environment)
    train, all_test = (linear_classifier.read_features(Path(path)) for path in (request.train, request.test))
    test = linear_classifier.of_classes(all_test, set(train.labels))
    num_test, shared = len(all_test.labels), linear_classifier.count_common_images(train, test)
    with new_run(config, environment, experiment_id, "classify") as handle:
        warn, left_out = get_run_logger().warning, num_test - len(test.labels)
        if left_out:
            warn("%d of %d test images are of classes that are not fitted on, and are left out", left_out, num_test)
        if shared:
            words = "are, by their features, among those that are fitted on: the accuracy is too good"
            warn("%d of %d test images " + words, shared, len(test.labels))
        tracking.set_tags(handle, {Tag.MODEL: facts["model"], Tag.LAYER: facts["layer"]})
        fitted = [_fit(kind, train, test, config.seed) for kind in request.kinds]
        summary = {
            "run_id": handle.run_id,
            "experiment": handle.experiment,
            "tracking_uri": handle.public_uri,
            **{name: facts[name] for name in ("model", "model_digest", "layer")},
            "train": request.train,
            "test": request.test,
            "num_shared": shared,
            "num_left_out": train.num_left_out + test.num_left_out,
            "classifiers": [classifier.model_dump(mode="json") for classifier in fitted],
            "seconds": time.monotonic() - started,
        }
        tracking.log_document(handle, Artifact.SUMMARY, summary)
        metrics: dict[str, float | None] = {Metric.TEST_ACCURACY: max(fit.accuracy for fit in fitted)}
        for fit in fitted:
            metrics |= {f"{fit.kind}/{name}": getattr(fit, name) for name in ("accuracy", "fit_seconds", "joules")}
        tracking.log_facts(handle, metrics, {})
    return summary


def _fit(kind: Kind, train: Features, test: Features, seed: int) -> Fitted:
    energy = EnergyMeter()
    fitted = linear_classifier.fit_and_score(kind, train, test, seed).model_copy(update={"joules": energy.joules()})
    get_run_logger().info("%s: accuracy %.4f, fitted in %.1f s", kind, fitted.accuracy, fitted.fit_seconds)
    if not fitted.converged:
        get_run_logger().warning("%s has not converged; its accuracy is that of where it stopped", kind)
    return fitted
