"""`paceline predict` and `features`: a model, or a layer of it, over images; `classify`: classifiers on features."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import validate_as
from paceline.flows.commands.console import JSON, argument, command, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow

ARGUMENTS = (
    argument("model MODEL", "a run's id, runs:/RUN_ID/model, models:/NAME@ALIAS, or a directory"),
    argument(
        "source SOURCE",
        "a folder or URL of images, signals or clips, or a preset (its test split); none for own Lightning code",
        nargs="?",
    ),
    argument("overrides key=value ...", "settings of execution, cluster and data; of own Lightning code also model"),
    argument(
        "--out DIR",
        "where the Parquet files go (default: by content, under PACELINE_HOME); an interrupted call resumes there",
    ),
    JSON,
)


@command(
    ("paceline predict RUN_ID DIR", "paceline predict models:/NAME@champion DIR --out predictions"),
    *ARGUMENTS,
    argument(
        "--own-size",
        "each image as large as it is, not scaled to what the model was trained on; for models of pixels",
    ),
)
def predict(options: Namespace) -> None:
    """Predict a folder of images, a preset's test split, or the batches of own Lightning code."""
    _predict(options, own_size=options.own_size)


@command(
    ("paceline features RUN_ID DIR --layer pool", "paceline features RUN_ID digits --layer pool --out features"),
    *ARGUMENTS,
    argument("--layer NAME", "layer whose output is written, flattened; a wrong name lists all layers", required=True),
)
def features(options: Namespace) -> None:
    """Write a layer's output for a folder of images, or a preset's test split."""
    _predict(options, layer=options.layer)


def _predict(options: Namespace, **more: Any) -> None:
    from paceline.flows.predict.flow import check_predict, run_predict
    from paceline.flows.predict.request import PredictRequest

    values = {name: getattr(options, name) for name in ("model", "source", "overrides", "out")}
    start_flow(options, validate_as(PredictRequest, values | more), check_predict, run_predict, _show)


def _show(summary: dict[str, Any]) -> None:
    rate = summary["samples_per_second"]
    where = ("files", summary["out"]), ("run", run_location(summary["run_id"], summary["experiment"]))
    if "columns" in summary:
        say_pairs(
            ("predicted", f"{summary['num_samples']:,} samples in {summary['num_batches']:,} batches"),
            ("columns", ", ".join(f"{name} ({kind})" for name, kind in summary["columns"].items())),
            ("throughput", f"{rate:,.0f} samples/s"),
            *where,
        )
        return
    done = "predicted" if summary["layer"] is None else "written"
    say_pairs(
        (done, f"{summary['num_samples']:,} images, {summary['num_reused']:,} of them before"),
        ("rejected", f"{summary['num_rejected']:,}"),
        _quality(summary),
        ("throughput", "nothing was left to do" if rate is None else f"{rate:,.0f} images/s"),
        *where,
    )


def _quality(summary: dict[str, Any]) -> tuple[str, str]:
    """The score, if the source has classes or masks; the size of a layer, which has no score."""
    accuracy, mean_iou = summary["accuracy"], summary["mean_iou"]
    if summary["layer"] is not None:
        return "layer", f"{summary['layer']}, {summary['num_values']:,} values of each image"
    if summary["task"] == "segment":
        return "mean IoU", "the source has no masks" if mean_iou is None else f"{mean_iou:.4f}"
    if summary["task"] == "denoise":
        return "images", "taken as they are: no noise was added, so there is nothing to measure it by"
    return "accuracy", "the source has no classes" if accuracy is None else f"{accuracy:.4f}"


@command(
    ("paceline classify TRAIN_FEATURES TEST_FEATURES", "paceline classify TRAIN_FEATURES TEST_FEATURES --kind svm"),
    argument("train TRAIN", "directory of features to fit on"),
    argument("test TEST", "directory of other images' features, to score on"),
    argument("overrides key=value ...", "settings of track, and the seed"),
    argument("--kind KIND ...", "logistic (regression) or svm (linear); default: both"),
    JSON,
)
def classify(options: Namespace) -> None:
    """Fit linear classifiers on features, and score them."""
    from paceline.flows.predict.classify import ClassifyRequest, check_classify, run_classify

    values = {name: getattr(options, name) for name in ("train", "test", "overrides")}
    request = validate_as(ClassifyRequest, values | ({"kinds": options.kind} if options.kind else {}))
    start_flow(options, request, check_classify, run_classify, _show_classifiers)


def _show_classifiers(summary: dict[str, Any]) -> None:
    rows = [
        (fit["kind"], f"{fit['accuracy']:.4f}", f"{fit['fit_seconds']:.2f} s", "yes" if fit["converged"] else "no")
        for fit in summary["classifiers"]
    ]
    say_table(("classifier", "accuracy", "fitted in", "converged"), rows)
    say_pairs(("run", run_location(summary["run_id"], summary["experiment"])))
