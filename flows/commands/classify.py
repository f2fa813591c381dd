"""`paceline classify`: linear classifiers on features, fitted on some images and scored on others."""

from argparse import Namespace
from typing import Any

from paceline.conf.load import validate_as
from paceline.flows.commands.console import JSON, Command, argument, overrides, run_location, say_pairs, say_table
from paceline.flows.commands.prefect_session import start_flow


def main(options: Namespace) -> None:
    """Fit classifiers on features."""
    from paceline.flows.predict.classify import ClassifyRequest, check_classify, run_classify

    values = {name: getattr(options, name) for name in ("train", "test", "overrides")}
    request = validate_as(ClassifyRequest, values | ({"kinds": options.kind} if options.kind else {}))
    start_flow(options, request, check_classify, run_classify, _show)


def _show(summary: dict[str, Any]) -> None:
    rows = [
        (fit["kind"], f"{fit['accuracy']:.4f}", f"{fit['fit_seconds']:.2f} s", "yes" if fit["converged"] else "no")
        for fit in summary["classifiers"]
    ]
    say_table(("classifier", "accuracy", "fitted in", "converged"), rows)
    say_pairs([("run", run_location(summary["run_id"], summary["experiment"]))])


COMMAND = Command(
    "fit linear classifiers on features, and score them",
    ("paceline classify TRAIN_FEATURES TEST_FEATURES", "paceline classify TRAIN_FEATURES TEST_FEATURES --kind svm"),
    (
        argument("train", metavar="TRAIN", help="directory of features to fit on"),
        argument("test", metavar="TEST", help="directory of other images' features, to score on"),
        overrides("settings of track, and the seed"),
        argument(
            "--kind", action="append", metavar="KIND", help="logistic (regression) or svm (linear); default: both"
        ),
        JSON,
    ),
    main,
)
