"""`paceline predict` and `paceline features`: a trained model, or a layer of it, over many images, into Parquet.

Classes of images are columns of numbers. Masks, and images without their noise, are columns of PNG files.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from paceline.conf.environment import Environment
from paceline.conf.load import checked
from paceline.flows.commands.console import Command, add_json, json_stream, run_location, say_pairs, write_json
from paceline.flows.commands.prefect_session import quiet_flow


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_common(parser)
    parser.add_argument(
        "--own-size",
        action="store_true",
        help="each image as large as it is, not scaled to what the model was trained on; for models of pixels",
    )


def add_common(parser: ArgumentParser) -> None:
    """Options of all that goes over many images with a model."""
    parser.add_argument(
        "model", metavar="MODEL", help="a run's id, runs:/RUN_ID/model, models:/NAME@ALIAS, or a directory"
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder or URL of images, signals or clips, or a preset (its test split)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of execution, cluster and data")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the Parquet files go (default: by content, under PACELINE_HOME); an interrupted call resumes there",
    )
    add_json(parser)


def add_features_arguments(parser: ArgumentParser) -> None:
    """Add the options of `paceline features`."""
    add_common(parser)
    parser.add_argument(
        "--layer",
        required=True,
        metavar="NAME",
        help="layer whose output is written, flattened; a wrong name lists all layers",
    )


def main(options: Namespace) -> None:
    """Predict."""
    run_prediction(options, layer=None, own_size=options.own_size)


def write_features(options: Namespace) -> None:
    """Write the output of a layer."""
    run_prediction(options, layer=options.layer)


def run_prediction(options: Namespace, *, layer: str | None, own_size: bool = False) -> None:
    """Write what the model tells, or what a layer of it gives."""
    from paceline.flows.predict.request import PredictRequest, check_predict

    site = Environment()
    asked = {name: getattr(options, name) for name in ("model", "source", "overrides", "out")} | {"layer": layer}
    asked |= {"own_size": own_size}
    request = checked(PredictRequest, asked)
    check_predict(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        from paceline.flows.predict.flow import run_predict

        summary = run_predict(request)
        rate = summary["samples_per_second"]
        say_pairs(
            [
                (
                    "predicted" if layer is None else "written",
                    f"{summary['num_samples']:,} images, {summary['num_reused']:,} of them before",
                ),
                ("rejected", f"{summary['num_rejected']:,}"),
                _quality(summary),
                ("throughput", "nothing was left to do" if rate is None else f"{rate:,.0f} images/s"),
                ("files", summary["out"]),
                ("run", run_location(summary["run_id"], summary["experiment"])),
            ]
        )
        write_json(stream, summary)


def _quality(summary: dict[str, Any]) -> tuple[str, str]:
    """How right it is, as far as the source tells; of a layer, which is neither right nor wrong, its size."""
    accuracy, mean_iou = summary["accuracy"], summary["mean_iou"]
    if summary["layer"] is not None:
        return "layer", f"{summary['layer']}, {summary['num_values']:,} values of each image"
    if summary["task"] == "segment":
        return "mean IoU", "the source has no masks" if mean_iou is None else f"{mean_iou:.4f}"
    if summary["task"] == "denoise":
        return "images", "taken as they are: no noise was added, so there is nothing to measure it by"
    return "accuracy", "the source tells no classes" if accuracy is None else f"{accuracy:.4f}"


COMMAND = Command(
    "predict a folder of images, or a preset's test split, with a trained model",
    ("paceline predict RUN_ID DIR", "paceline predict models:/NAME@champion DIR --out predictions"),
    add_arguments,
    main,
)
FEATURES = Command(
    "write a layer's output for a folder of images, or a preset's test split",
    ("paceline features RUN_ID DIR --layer pool", "paceline features RUN_ID digits --layer pool --out features"),
    add_features_arguments,
    write_features,
)
