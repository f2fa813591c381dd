"""`paceline run`: prepare data, train, evaluate, and account for the speed of it."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import apply, load, validate
from paceline.flows.commands.console import Command, add_preset, json_stream, run_location, say_pairs, write_json
from paceline.flows.commands.lookup import print_common
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.flows.commands.resumed import take_cluster
from paceline.tasks.errors import InputError, RegressionError

if TYPE_CHECKING:
    from paceline.conf.config import Config

# What may change when an unfinished run goes on: how it is run, never what is learned.
RESUMABLE_SECTIONS = ("execution.", "cluster.", "limits.")


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser, optional=True)
    parser.add_argument(
        "--show", action="store_true", help="print the configuration as YAML that can be saved as a preset, and stop"
    )
    parser.add_argument("--diagnose", action="store_true", help="measure what limits the step (speedup.diagnose=true)")
    parser.add_argument("--resume", metavar="RUN_ID", help="resume an unfinished run from its newest checkpoint")
    parser.add_argument("-h", "--help", action="store_true", help="print this help and the most common settings")


def main(options: Namespace) -> None:
    """Carry it out."""
    started = time.monotonic()
    if options.help:
        options.parser.print_help()
        print_common(options.preset or "digits", options.overrides)
        return
    if (options.preset is None) == (options.resume is None):
        if options.resume is None:
            raise InputError(
                "paceline run needs a preset", hint="list the presets with: paceline presets", setting="preset"
            )
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    site = Environment()
    if options.diagnose and options.resume is None:
        options.overrides.append("speedup.diagnose=true")
    config = _resumed(site, options) if options.resume else load(options.preset, options.overrides)
    if options.show:
        from paceline.flows.show_config import show_json, show_yaml

        if options.json:
            write_json(sys.stdout, show_json(config))
        else:
            print(show_yaml(config))
        return
    with json_stream(options.json) as stream:
        try:
            summary, worse = _execute(config, site, options.resume), None
        except RegressionError as error:  # done and recorded all the same
            summary, worse = error.summary, error
        summary["seconds"] = time.monotonic() - started
        _show(summary)
        write_json(stream, summary)
        if worse is not None:
            raise worse


def _resumed(site: Environment, options: Namespace) -> Config:
    from paceline.tasks.track import run as tracking

    _, tree = tracking.reopen(site.tracking_uri, options.resume)
    for override in options.overrides:
        if not override.startswith(RESUMABLE_SECTIONS):
            raise InputError(
                f"--resume {options.resume}: {override} would change what the run is; "
                f"only {' and '.join(section + '*' for section in RESUMABLE_SECTIONS)} may change"
            )
    before = validate({name: section for name, section in tree.items() if name != "cluster"})
    take_cluster(tree, options)
    for override in options.overrides:
        apply(tree, override)
    config = validate(tree)
    if config.global_batch_size != before.global_batch_size:
        raise InputError(
            f"--resume {options.resume}: the run has {before.global_batch_size} samples per step and would have "
            f"{config.global_batch_size}; keep execution.num_nodes x num_devices = {before.execution.world_size}"
        )
    return config


def _execute(config: Config, site: Environment, resume: str | None) -> dict[str, Any]:
    from paceline.flows.checks import preflight
    from paceline.flows.checks.prestart import Prestart

    with Prestart(config, site) as prestart:
        preflight.check(config, site, prestart=prestart)  # before the flow: wrong input leaves no flow run behind
        from paceline.flows.run.flow import run_pipeline

        with quiet_flow(site):
            return run_pipeline(config, resume)


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.summary import summary_table

    where = run_location(summary["run_id"], summary["experiment"])
    say_pairs([*summary_table(summary), ("run", where), ("view", summary["view"])])


COMMAND = Command(
    "train, evaluate, and measure the speed",
    ("paceline run digits", "paceline run folder data.root=DIR recipe.num_epochs=5"),
    add_arguments,
    main,
    settings=True,
)
