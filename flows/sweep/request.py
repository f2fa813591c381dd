"""The parameters of a sweep, from the command, the form or the store."""

from pydantic import Field

from paceline.conf.config import Config
from paceline.conf.credentials import Text
from paceline.conf.section import Section
from paceline.tasks.sweep.records import Pruner, Sampler


class SweepRequest(Section):
    """Parameters of a sweep."""

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """Settings that all trials share."""
    parameters: dict[str, Text]
    """Setting -> its values: log(a,b), lin(a,b), int(a,b[,step]) or [x,y,z]."""
    # The bounds are for Prefect's form; `check_sweep` gives better messages.
    num_trials: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Trials; None for 20, or all of a grid."""
    sampler: Sampler = "tpe"
    """What chooses the values: `tpe` learns from the trials before, `random`, or every combination as a `grid`."""
    pruner: Pruner = "none"
    """What ends a trial early whose validation score falls behind: `median` (of the others at that epoch), `asha` (the
    best third continues after 1, 3, 9 ... epochs) or `hyperband` (the same from several first epochs)."""
    at_once: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Trials at the same time; None for as many as there are devices for."""
