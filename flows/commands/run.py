"""`paceline run`: prepare data, train, evaluate, and account for the speed of it."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.conf.load import apply, load, preset_names, validate
from paceline.flows.commands.console import add_preset, json_stream, run_location, say_pairs, write_json
from paceline.flows.commands.prefect_session import quiet_flow
from paceline.flows.commands.resumed import take_cluster
from paceline.tasks.errors import InputError, RegressionError

if TYPE_CHECKING:
    from paceline.conf.config import Config

HELP = "prepare data, train, evaluate, and account for the speed of it"
# What may change when an unfinished run goes on: how it is run, never what is learned.
RESUMABLE_SECTIONS = ("execution.", "cluster.", "limits.")
KEY_WIDTH = 30


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    add_preset(parser, optional=True)
    parser.add_argument("--show", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--diagnose", action="store_true", help="measure what limits the step (speedup.diagnose=true)")
    parser.add_argument("--resume", metavar="RUN_ID", help="go on with an unfinished run from its newest checkpoint")
    parser.add_argument("-h", "--help", action="store_true", help="print this help and every setting")


def main(options: Namespace) -> None:
    """Carry it out."""
    started = time.monotonic()
    if options.help:
        _help(options)
        return
    if (options.preset is None) == (options.resume is None):
        if options.resume is None:
            raise InputError("paceline run needs a preset; one of " + ", ".join(preset_names()) + ", or a YAML file")
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    site = Environment()
    if options.diagnose and options.resume is None:
        options.overrides.append("speedup.diagnose=true")
    config = _resumed(site, options) if options.resume else load(options.preset, options.overrides)
    if options.show:
        print(_describe(config))
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


def _help(options: Namespace) -> None:
    options.parser.print_help()
    preset = options.preset or "digits"
    config = load(preset, options.overrides)
    print(f"\nsettings, as paceline run {preset} would have them here:\n\n{_describe(config)}")


def _describe(config: Config) -> str:
    from paceline.flows.show_config import describe

    return describe(config, KEY_WIDTH)


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.summary import summary_table

    where = run_location(summary["run_id"], summary["experiment"])
    say_pairs([*summary_table(summary), ("run", where), ("view", summary["view"])])
