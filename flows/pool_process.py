"""The process of a warm pool: it imports the engines, starts what a run needs, and becomes the process of a run.

`lifecycle.pool_keeper` starts it as a program, and sends it the facts of the last run, then a command.
"""

import gc
import importlib
import json
import logging
import os
import socket
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from paceline.conf.config import Config
from paceline.conf.environment import Environment, quieten
from paceline.conf.load import validate
from paceline.flows.lifecycle import next_pool, pool
from paceline.tasks.host import die_with
from paceline.tasks.records.execution import Plan

ENGINES = ("flows.checks.preflight", "flows.run.flow", "flows.run.lightning", "tasks.track.store")


def main(keeper: int) -> NoReturn:
    """Prepare, wait for a command from the process `keeper`, and become the process of its run."""
    die_with(keeper)
    quieten()
    with socket.socket(fileno=os.dup(0)) as orders:
        facts = json.loads(orders.recv(pool.MAX_BYTES))
        gc.disable()
        _prepare(validate(facts["config"]), Plan.model_validate(facts["plan"]))
        orders.send(json.dumps(_imported_files()).encode())
        text, descriptors, _, _ = socket.recv_fds(orders, pool.MAX_BYTES, pool.NUM_DESCRIPTORS)
    if not text:
        os._exit(0)
    next_pool.next_facts.update(config=facts["config"], plan=facts["plan"])
    order = json.loads(text)
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environment"])
    pool.environment, pool.session, sys.argv[:] = order["environment"], order["session"], order["arguments"]
    from prefect.logging.configuration import setup_logging

    logging.getLogger("paceline").handlers.clear()  # it gets new ones
    setup_logging(incremental=False)  # it has looked whether stderr is a terminal with colours
    from paceline.flows import cli

    cli.program()


def _prepare(config: Config, plan: Plan) -> None:
    from paceline.flows.checks import prestart

    for name in ENGINES:
        importlib.import_module(f"paceline.{name}")
    prestart.was_started_ahead = True
    prestart.start_ahead(config, plan, Environment())


def _imported_files() -> list[tuple[str, int, int]]:
    """Files of imported modules that are neither Python's, nor installed packages, nor part of this program."""
    known = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    names = [getattr(module, "__file__", None) for module in tuple(sys.modules.values())]
    files = {Path(name) for name in names if name}
    own = {file for file in files if not any(map(file.is_relative_to, (*known, pool.PROGRAM)))}
    return [pool.stamp(file) for file in sorted(own) if file.is_file()]


if __name__ == "__main__":
    main(int(sys.argv[1]))
