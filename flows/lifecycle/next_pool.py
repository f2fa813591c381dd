"""Whether the process of a run leaves a warm pool for the next one, and what that pool prepares for."""

import json
import math
import subprocess
import sys
from contextlib import suppress
from typing import Any

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle import pool
from paceline.tasks.errors import InputError
from paceline.tasks.records.execution import Plan

KEEPER = "paceline.flows.lifecycle.pool_keeper"

next_facts: dict[str, Any] = {}  # what the next pool prepares for, and how long it waits; empty for no pool


def set_waiting_time(environment: Environment) -> None:
    """Let this process leave a pool, if the user wants one. Raises InputError: PACELINE_WARM is wrong."""
    given = pool.waiting_time(environment.warm_given)
    next_facts.pop("seconds", None)
    if given == pool.OFF:
        return
    seconds = None
    if given != pool.SESSION:
        try:
            seconds = 60 * float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            fault = f"{pool.VARIABLE}={given} must be a number of minutes above 0, {pool.SESSION} or {pool.OFF}"
            raise InputError(fault, hint=f"{pool.VARIABLE}={pool.OFF}", setting=pool.VARIABLE)
    next_facts.update(seconds=seconds, session=pool.session if given == pool.SESSION else None)


def note_run(config: Config, plan: Plan) -> None:
    """Note the run of this process: the next pool prepares for one like it."""
    if "seconds" in next_facts:
        next_facts.update(config=config.model_dump(mode="json"), plan=plan.model_dump(mode="json"))


def start_next() -> None:
    """Start the keeper of the next pool, whose pool starts when this process has ended."""
    if not {"config", "seconds"} <= set(next_facts):
        return
    with suppress(OSError):
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", KEEPER],  # the user's folder may have modules with names of ours
            stdin=subprocess.PIPE,  # open until this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=pool.environment,
            start_new_session=True,
        )
        assert keeper.stdin is not None
        keeper.stdin.write(json.dumps(next_facts).encode())
        keeper.stdin.flush()
