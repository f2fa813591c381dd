"""`paceline run`: prepare data, train, evaluate, and account for the speed of it."""

import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from typing import Any

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import apply, validate
from paceline.flows.commands import console
from paceline.flows.commands.console import argument, command, preset, write_json
from paceline.flows.commands.lookup import print_common
from paceline.flows.commands.own_code import CODE, load_config
from paceline.flows.commands.prefect_session import quiet_flow, take_cluster, take_code
from paceline.flows.lifecycle import next_pool
from paceline.tasks.errors import InputError, RegressionError

RESUMABLE_SECTIONS = ("execution.", "cluster.", "limits.")
"""Settings that may change when an unfinished run resumes: how it is run, never what is learned."""


@command(
    ("paceline run digits", "paceline run folder data.root=DIR recipe.num_epochs=5"),
    *preset(resume="resume an unfinished run from its newest checkpoint"),
    argument("--show", "print the configuration as YAML that can be saved as a preset, and stop"),
    argument("--diagnose", "measure what limits the step (speedup.diagnose=true)"),
    CODE,
    argument("-h --help", "print this help and the most common settings"),
    own_help=True,
)
def run(options: Namespace) -> None:
    """Train, evaluate, and measure the speed."""
    started = time.monotonic()
    if options.help:
        options.parser.print_help()
        print_common(options.preset or "digits", options.overrides)
        return
    next_pool.set_waiting_time(Environment())
    with ExitStack() as stack:
        if options.resume is None:
            console.require(options, "preset")
            if options.diagnose:
                options.overrides.append("speedup.diagnose=true")
            config = load_config(options, None if options.show else partial(_prepare_own, stack))
        else:
            config = _load_run(options)
        _run(options, config, started)


def _run(options: Namespace, config: Config, started: float) -> None:
    if options.show:
        from paceline.flows.show_config import show_json, show_yaml

        if options.json:
            write_json(sys.stdout, show_json(config))
        else:
            print(show_yaml(config))
        return
    with console.json_stream(options.json) as stream:
        regression = None
        try:
            summary = start(config, options.resume)
        except RegressionError as error:  # done and recorded all the same
            summary, regression = error.summary, error
        summary["seconds"] = time.monotonic() - started
        _show(summary)
        write_json(stream, summary)
        if regression is not None:
            raise regression


def start(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Check a configuration and run its flow, or resume it; the summary of the run as JSON."""
    from paceline.flows.lifecycle import prefect_api

    environment = Environment()
    with ExitStack() as stack:
        stack.callback(prefect_api.stop_unused_api)
        prefect_api.import_api(environment)  # while the imports below need one core
        from paceline.flows.checks import preflight
        from paceline.flows.checks.prestart import Prestart

        prestart = stack.enter_context(Prestart(config, environment))
        checked = preflight.check_run(config, environment, prestart=prestart)  # wrong input leaves no flow run
        next_pool.note_run(config, checked.plan)
        with quiet_flow(environment):
            if config.lightning.settings:
                from paceline.flows.run.lightning import run_lightning

                return run_lightning(config, resume)
            from paceline.flows.run.flow import run_pipeline

            return run_pipeline(config, resume)


def _prepare_own(stack: ExitStack, known: Config | None) -> None:
    """Start and import what a run of own Lightning code needs, while another process imports that code."""
    from paceline.flows.checks import prestart
    from paceline.flows.lifecycle.prefect_api import prepare_api

    environment = Environment()
    if known is not None and known.cluster.kind == "local":
        stack.callback(prestart.close_ahead)
        if (plan := prestart.plan_of(known, environment)) is not None:
            prestart.open_ahead(known, plan, environment)
    prepare_api(environment)  # it ends with this process
    import paceline.flows.run.lightning  # noqa: F401


def _load_run(options: Namespace) -> Config:
    from paceline.tasks.track import run as tracking

    if options.preset is not None:
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    _, tree = tracking.reopen(Environment().tracking_uri, options.resume)
    for override in options.overrides:
        if not override.startswith(RESUMABLE_SECTIONS):
            raise InputError(
                f"--resume {options.resume}: {override} would change what the run is; "
                f"only {' and '.join(section + '*' for section in RESUMABLE_SECTIONS)} may change"
            )
    before = validate({name: section for name, section in tree.items() if name != "cluster"})
    take_cluster(tree, options)
    take_code(tree, options)
    config = validate(apply(tree, *options.overrides))
    if config.lightning.settings and config.execution.world_size != before.execution.world_size:
        fault = f"--resume {options.resume}: your own Lightning code resumes on as many devices as before"
        raise InputError(f"{fault}; keep execution.num_nodes x num_devices = {before.execution.world_size}")
    if config.global_batch_size != before.global_batch_size:
        raise InputError(
            f"--resume {options.resume}: the run has {before.global_batch_size} samples per step and would have "
            f"{config.global_batch_size}; keep execution.num_nodes x num_devices = {before.execution.world_size}"
        )
    return config


def _show(summary: dict[str, Any]) -> None:
    from paceline.tasks.report.summary import summary_table

    where = console.run_location(summary["run_id"], summary["experiment"])
    view = [("view", summary["view"])] if summary.get("view") else []
    console.say_pairs(*summary_table(summary), ("run", where), *view)
