"""Warm pools, started as the end of a run starts them."""

import json
import subprocess
import sys

from paceline.conf.load import load
from paceline.flows.lifecycle import pool
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.train.plan import resolve

START = """
import json, sys
from paceline.flows.lifecycle import next_pool
next_pool.next_facts.update(json.loads(sys.argv[1]))
next_pool.start_next()
"""


def facts_for_pool(*overrides, seconds=900.0, session=None):
    """What the end of a run of the digits leaves for its pool."""
    config = load("digits", [*overrides])
    plan = resolve(config, describe(), 1_000)
    facts = {"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    return json.dumps(facts | {"seconds": seconds, "session": session})


def start_pool(*overrides, python=sys.executable, how=None, variables=None, **terms):
    """Start a pool for runs of the digits; its keeper listens some moments later."""
    command = [python, "-P", "-c", START, facts_for_pool(*overrides, **terms)]
    subprocess.run(command, env=pool.environment | (variables or {}), check=True, **(how or {}))
