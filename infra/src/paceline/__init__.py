"""Training pipelines that account for their own speed: settings, flows and tasks under one import name.

`run(load("digits"))` is `paceline run digits`, and `run_own("config.yaml", code=".")` trains your own Lightning code.
The stages `prepare`, `train`, `evaluate` and `account` share a `session`, or the `own_session` of your code; with them
you compose a Prefect flow of your own: see the guide "Your own flow". `step()` marks the end of a training step in any
program, for `paceline judge`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from paceline.tasks.measure.step_marks import step

if TYPE_CHECKING:
    from paceline.conf.load import load
    from paceline.flows.interface import account, evaluate, own_session, prepare, run, run_own, session, train
    from paceline.flows.run.lightning import OwnEvaluation, OwnSummary
    from paceline.flows.run.session import OwnSession, Session
    from paceline.flows.run.stages import Summary

_PLACES = {
    "load": ".conf.load",
    **dict.fromkeys(
        ("account", "evaluate", "own_session", "prepare", "run", "run_own", "session", "train"), ".flows.interface"
    ),
    **dict.fromkeys(("OwnEvaluation", "OwnSummary"), ".flows.run.lightning"),
    **dict.fromkeys(("OwnSession", "Session"), ".flows.run.session"),
    "Summary": ".flows.run.stages",
}
__all__ = [
    *("OwnEvaluation", "OwnSession", "OwnSummary", "Session", "Summary", "account", "evaluate", "load", "own_session"),
    *("prepare", "run", "run_own", "session", "step", "train"),
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, because the engines behind it take seconds."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline.conf.environment import quieten

    quieten()
    return getattr(importlib.import_module(_PLACES[name], __name__), name)
