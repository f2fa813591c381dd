"""Prediction: a trained model over a folder of images or a configuration's test split, into Parquet; one MLflow run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prefect import flow, get_run_logger
from prefect.utilities.annotations import quote

from paceline.conf.environment import Environment, quieten
from paceline.flows.checks.results import result_of
from paceline.flows.lifecycle.mlflow_run import new_run
from paceline.flows.lifecycle.outage import outlive_outages
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.lifecycle.retries import with_retries
from paceline.flows.lifecycle.signals import stop_on_signal
from paceline.flows.predict.request import PREDICTIONS_FILE, PredictionPlan, PredictRequest, check_predict
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.cluster.start import open_cluster
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.prepare.chunks import chunks_of
from paceline.tasks.files import write_durably
from paceline.tasks.predict.job import Part, cut
from paceline.tasks.predict.prefect_tasks import Predicted, predict
from paceline.tasks.redact import redact_errors
from paceline.tasks.scores import mean_iou
from paceline.tasks.track import run as tracking
from paceline.tasks.track.models import DIGEST_TAG, is_recorded

FLOAT_BYTES = 4
COUNTS = {"num_samples", "num_rejected", "num_unread", "num_known", "num_correct"}
EXECUTION = {"accelerator", "device_name", "world_size", "num_threads", "precision", "compile"}
"""Of a plan, what concerns prediction."""
LARGE_BYTES = 2**20
"""Decoded, of an image at its own size, which nobody knows: a part has few of them, for it keeps what is told."""


@flow(name="paceline-predict", flow_run_name="predict {request.source}", persist_result=False)
@stop_on_signal
@outlive_outages
@redact_errors
def run_predict(request: PredictRequest) -> dict[str, Any]:
    """Predict every image of a source with a trained model.

    Args:
        request: What is asked.
    """
    quieten()
    started = time.monotonic()
    environment = Environment()
    checked = result_of(check_predict, request, environment)
    cancel_older()
    parts = _parts(checked)
    config = checked.config
    with (
        _cluster(checked, environment) as address,
        new_run(config, environment, checked.experiment_id, "predict") as handle,
    ):
        tags = {"paceline.model": request.model, DIGEST_TAG: checked.settings.model_digest}
        tracking.set_tags(handle, tags | {"paceline.predictions": str(checked.out)})
        if checked.other_package is not None:
            get_run_logger().warning("%s: what it predicts may be other than it was", checked.other_package)
        checked.out.mkdir(parents=True, exist_ok=True)
        said: dict[str, Any] = {
            "key": checked.key,
            "model": request.model,
            "model_digest": checked.settings.model_digest,
            "model_recorded": is_recorded(request.model),
        }
        task = checked.facts.model.task
        said |= {"source": request.source, "task": task, "class_names": list(checked.facts.class_names)}
        said |= {"layer": request.layer, "num_values": checked.num_values, "own_size": request.own_size}
        _say(checked.out, said)
        if not said["model_recorded"]:
            get_run_logger().warning(
                "%s is a directory: no run vouches for it, and it is taken as it is; its digest is %s",
                request.model,
                checked.settings.model_digest,
            )
        # Quoted, or Prefect would look into every name.
        stage = with_retries(predict, config.limits)
        limit = config.limits.predict_seconds
        found = stage(quote(parts), checked.settings, address, limit)  # type: ignore[call-overload]
        summary = {
            "run_id": handle.run_id,
            "experiment": handle.experiment,
            "tracking_uri": handle.public_uri,
            **said,
            "out": str(checked.out),
            **_numbers(found),
            "execution": checked.plan.model_dump(mode="json", include=EXECUTION),
            "seconds": time.monotonic() - started,
        }
        _say(checked.out, summary)
        tracking.log_document(handle, "summary.json", summary)
        tracking.log_facts(handle, _metrics(summary, found), {})
    return summary


def _parts(checked: PredictionPlan) -> list[Part]:
    """The work, in parts that a worker holds in memory."""
    images, size = checked.images, checked.facts.image_shape[0]
    num_bytes = size * size * (images.channels + images.num_planes) + FLOAT_BYTES * checked.num_values
    if checked.settings.own_size:
        num_bytes = max(num_bytes, LARGE_BYTES)
    return list(cut(images, checked.out, checked.key, chunks_of(images.samples, images.origin, num_bytes)))


@contextmanager
def _cluster(checked: PredictionPlan, environment: Environment) -> Iterator[str]:
    """The address of a cluster whose workers have what the model and the source need."""
    config = checked.config
    with open_cluster(config.cluster, demand_of([config.execution], checked.plan.accelerator), environment) as address:
        require_packages(address, config.packages)
        yield address


def _numbers(found: Predicted) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for record in found.records:
        counts.update(record.model_dump(include=COUNTS))
    pixels = np.sum([record.class_pixels for record in found.records if record.class_pixels], axis=0)
    predicted_now = counts["num_samples"] + counts["num_rejected"] - found.num_reused
    return {
        "num_samples": counts["num_samples"],
        "num_rejected": counts["num_rejected"],
        "num_unread": counts["num_unread"],
        "num_reused": found.num_reused,
        "accuracy": counts["num_correct"] / counts["num_known"] if counts["num_known"] else None,
        "mean_iou": mean_iou(pixels.tolist()) if pixels.any() else None,
        "samples_per_second": predicted_now / found.seconds if predicted_now else None,
        "reads": found.reads.model_dump(mode="json"),
        "parity": found.parity.model_dump(mode="json") if found.parity else None,
    }


def _metrics(summary: dict[str, Any], found: Predicted) -> dict[str, float | None]:
    names = ("num_samples", "num_rejected", "num_unread", "num_reused", "accuracy", "mean_iou")
    metrics = {f"predict/{name}": summary[name] for name in names}
    metrics["throughput/prediction_samples_per_second"] = summary["samples_per_second"]
    metrics["time/wall_seconds"] = summary["seconds"]
    metrics |= found.reads.metrics
    if found.parity is not None:
        metrics["predict/parity_agreement"] = found.parity.agreement
        metrics["predict/parity_max_difference"] = found.parity.max_difference
    return metrics


def _say(out: Path, facts: dict[str, Any]) -> None:
    write_durably(out / PREDICTIONS_FILE, json.dumps(facts, indent=2).encode())
