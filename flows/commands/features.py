"""`paceline features`: what a layer of a trained model gives for many images, into Parquet."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.flows.commands import predict

HELP = "write what a layer of a trained model gives for a folder of images, or a preset's test split"


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    predict.add_common(parser)
    parser.add_argument(
        "--layer", required=True, metavar="NAME", help="whose output is written, flattened; a wrong name tells them all"
    )


def main(options: Namespace) -> None:
    """Carry it out."""
    predict.run_prediction(options, layer=options.layer)
