"""`paceline classify`: linear classifiers on features, fitted on some images and scored on others."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.conf.environment import Environment
from paceline.conf.load import checked
from paceline.flows.commands.console import (
    Command,
    add_json,
    json_stream,
    run_location,
    say_pairs,
    say_table,
    write_json,
)
from paceline.flows.commands.prefect_session import quiet_flow


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("train", metavar="TRAIN", help="directory of features to fit on")
    parser.add_argument("test", metavar="TEST", help="directory of other images' features, to score on")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of track, and the seed")
    parser.add_argument(
        "--kind", action="append", metavar="KIND", help="logistic (regression) or svm (linear); default: both"
    )
    add_json(parser)


def main(options: Namespace) -> None:
    """Carry it out."""
    from paceline.flows.predict.classify import ClassifyRequest, check_classify, run_classify

    site = Environment()
    asked = {name: getattr(options, name) for name in ("train", "test", "overrides")}
    request = checked(ClassifyRequest, asked | ({"kinds": options.kind} if options.kind else {}))
    check_classify(request, site)
    with json_stream(options.json) as stream, quiet_flow(site):
        summary = run_classify(request)
        rows = [
            (one["kind"], f"{one['accuracy']:.4f}", f"{one['fit_seconds']:.2f} s", "yes" if one["converged"] else "no")
            for one in summary["classifiers"]
        ]
        say_table(("classifier", "accuracy", "fitted in", "converged"), rows)
        say_pairs([("run", run_location(summary["run_id"], summary["experiment"]))])
        write_json(stream, summary)


COMMAND = Command(
    "fit linear classifiers on features, and score them",
    ("paceline classify TRAIN_FEATURES TEST_FEATURES", "paceline classify TRAIN_FEATURES TEST_FEATURES --kind svm"),
    add_arguments,
    main,
)
