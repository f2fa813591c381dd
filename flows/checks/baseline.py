"""Check of the run that `speedup.baseline` names, before any work starts."""

from __future__ import annotations

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.names import Tag
from paceline.tasks.track.queries import get_runs

ROLES = ("run", "arm", "trial")


def check_baseline(config: Config, environment: Environment) -> None:
    """Raise InputError if the named run is unknown, has not finished, or is not a training."""
    run_id = config.speedup.baseline
    if run_id in (*SELF_CONTAINED_BASELINES, "matched"):
        return
    try:
        (run,) = get_runs(environment.tracking_uri, [run_id])
    except InputError as error:
        raise InputError(f"speedup.baseline: {error}") from error
    role = run.tags.get(Tag.ROLE, "")
    if role not in ROLES or run.status != "FINISHED":
        was = f"is a {role or 'foreign run'}" if role not in ROLES else f"is {run.status}"
        raise InputError(f"speedup.baseline={run_id} {was}; name a training that has finished (see paceline ui)")
