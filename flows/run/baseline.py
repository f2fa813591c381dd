"""Speedup of a run over a baseline run from the store."""

from itertools import islice

from paceline.flows.checks.preflight import ROLES
from paceline.flows.compare import read_compared_run
from paceline.flows.run.outcome import Outcome
from paceline.flows.run.record import judged_metrics
from paceline.tasks.measure.validity import most_foreign
from paceline.tasks.names import Tag
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.speedup.compare import ComparedRun, is_plain, speedup_across
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track.queries import find_runs, get_runs
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.plan import arm_of

MAX_BASES = 10
MAX_SEEN = 50  # runs of the same work among which to look for plain executions
HOW = (
    "execution.num_devices=1 execution.precision=32-true execution.compile=off execution.memory_format=contiguous "
    "execution.loading=foreground speedup.baseline=none"
)


def speedup_over_others(outcome: Outcome, handle: RunHandle) -> SpeedupResult:
    """Compute the speedup over the named run, or over runs of the same work with the baseline's execution."""
    baseline = outcome.config.speedup.baseline
    if baseline == "matched":
        condition = f"tags.`paceline.workload` = '{outcome.workload}' and attributes.status = 'FINISHED'"
        runs = find_runs(handle.tracking_uri, handle.experiment, condition, MAX_SEEN)
        same = (read_compared_run(handle.tracking_uri, run) for run in runs if run.tags.get(Tag.ROLE) in ROLES)
        bases = list(islice((base for base in same if is_plain(base, BASELINE)), MAX_BASES))
        if not bases:
            return SpeedupResult(
                verdict=f"not divided: no run of this work in the experiment was executed as the baseline is; add "
                f"{HOW} for one",
                cause="not divided",
            )
    else:
        bases = [read_compared_run(handle.tracking_uri, run) for run in get_runs(handle.tracking_uri, [baseline])]
    now = ComparedRun(
        run_id=handle.run_id,
        name=outcome.config.name,
        status="FINISHED",
        start_time=0.0,
        facts=outcome.facts,
        metrics={name: value for name, value in judged_metrics(outcome).items() if value is not None},
        tags={Tag.DISTURBED: str(outcome.is_disturbed)},
    )
    limit = most_foreign(outcome.hardware.num_cores)
    return speedup_across(now, bases, limit, arm_of(outcome.plan).label)
