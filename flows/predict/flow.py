"""Predicts a folder of images or a preset's test split with a trained model, into Parquet, in one MLflow run."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from prefect import flow, get_run_logger
from prefect.utilities.annotations import quote

from paceline.conf.environment import Environment
from paceline.flows.checks.results import result_of
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.outage import guard_flow, with_retries
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.lifecycle.retries import with_retries
from paceline.flows.lifecycle.signals import stop_on_signal
from paceline.flows.predict.request import PREDICTIONS_FILE, PredictRequest, check_predict
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.prepare.chunks import chunks_of
from paceline.tasks.files import write_durably
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.predict.job import cut
from paceline.tasks.predict.prefect_tasks import Predicted, predict
from paceline.tasks.scores import mean_iou
from paceline.tasks.track import run as tracking
from paceline.tasks.track.models import has_recorded_digest

FLOAT_BYTES = 4
COUNTS = {"num_samples", "num_rejected", "num_unread", "num_known", "num_correct"}
EXECUTION = {"accelerator", "device_name", "world_size", "num_threads", "precision", "compile"}
LARGE_BYTES = 2**20  # assumed size of a decoded image at its own size, so that a part has few of them


@flow(name="paceline-predict", flow_run_name="predict {request.source}", persist_result=False)
@guard_flow
def run_predict(request: PredictRequest) -> dict[str, Any]:
    """Predict every image of a source with a trained model.

    Args:
        request: Model, source and settings.
    """
    started = time.monotonic()
    environment = Environment()
    checked = result_of(check_predict, request, environment)
    cancel_older()
    images, config, size = checked.images, checked.config, checked.facts.image_shape[0]
    num_bytes = size * size * (images.channels + images.num_planes) + FLOAT_BYTES * checked.num_values
    if checked.settings.own_size:
        num_bytes = max(num_bytes, LARGE_BYTES)
    parts = list(cut(images, checked.out, checked.key, chunks_of(images.samples, images.origin, num_bytes)))
    demand = demand_of([config.execution], checked.plan.accelerator)
    with open_cluster(config.cluster, demand, environment) as address:
        require_packages(address, config.packages)
        with new_run(config, environment, checked.experiment_id, "predict") as handle:
            digest = checked.settings.model_digest
            tags = {Tag.MODEL: request.model, Tag.MODEL_DIGEST: digest, Tag.PREDICTIONS: str(checked.out)}
            tracking.set_tags(handle, tags)
            log = get_run_logger()
            if checked.other_package is not None:
                log.warning("%s: its predictions may have changed", checked.other_package)
            checked.out.mkdir(parents=True, exist_ok=True)
            facts: dict[str, Any] = {
                **{name: getattr(request, name) for name in ("model", "source", "layer", "own_size")},
                "key": checked.key,
                "model_digest": digest,
                "model_recorded": has_recorded_digest(request.model),
                "task": checked.facts.model.task,
                "class_names": list(checked.facts.class_names),
                "num_values": checked.num_values,
            }
            _write_facts(checked.out, facts)
            if not facts["model_recorded"]:
                log.warning(
                    "%s is a directory, which no run of MLflow records; its digest is %s", request.model, digest
                )
            # Quoted, or Prefect would inspect every name.
            stage = with_retries(predict, config.limits)
            limit = config.limits.predict_seconds
            predicted = stage(quote(parts), checked.settings, address, limit)  # type: ignore[call-overload]
            summary = {
                "run_id": handle.run_id,
                "experiment": handle.experiment,
                "tracking_uri": handle.public_uri,
                **facts,
                "out": str(checked.out),
                **_numbers(predicted),
                "execution": checked.plan.model_dump(mode="json", include=EXECUTION),
                "seconds": time.monotonic() - started,
            }
            _write_facts(checked.out, summary)
            tracking.log_document(handle, Artifact.SUMMARY, summary)
            tracking.log_facts(handle, _metrics(summary, predicted), {})
    return summary


def _numbers(predicted: Predicted) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for record in predicted.records:
        counts.update(record.model_dump(include=COUNTS))
    pixels = np.sum([record.class_pixels for record in predicted.records if record.class_pixels], axis=0)
    predicted_now = counts["num_samples"] + counts["num_rejected"] - predicted.num_reused
    return {
        **{name: counts[name] for name in ("num_samples", "num_rejected", "num_unread")},
        "num_reused": predicted.num_reused,
        "accuracy": counts["num_correct"] / counts["num_known"] if counts["num_known"] else None,
        "mean_iou": mean_iou(pixels.tolist()) if pixels.any() else None,
        "samples_per_second": predicted_now / predicted.seconds if predicted_now else None,
        "reads": predicted.reads.model_dump(mode="json"),
        "parity": predicted.parity.model_dump(mode="json") if predicted.parity else None,
    }


def _metrics(summary: dict[str, Any], predicted: Predicted) -> dict[str, float | None]:
    names = ("num_samples", "num_rejected", "num_unread", "num_reused", "accuracy", "mean_iou")
    metrics = {f"predict/{name}": summary[name] for name in names}
    metrics |= {Metric.PREDICTION_THROUGHPUT: summary["samples_per_second"], Metric.WALL_SECONDS: summary["seconds"]}
    metrics |= predicted.reads.metrics
    if predicted.parity is not None:
        metrics[Metric.PARITY_AGREEMENT] = predicted.parity.agreement
        metrics[Metric.PARITY_MAX_DIFFERENCE] = predicted.parity.max_difference
    return metrics


def _write_facts(out: Path, facts: dict[str, Any]) -> None:
    write_durably(out / PREDICTIONS_FILE, json.dumps(facts, indent=2).encode())
