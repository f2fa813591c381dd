"""The confirmation of an alarm: the last good run is rebuilt and timed, and the cause of the slowdown is searched."""

import tempfile
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from pydantic import ValidationError

from paceline.conf.hints import typed
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run import history
from paceline.flows.run.outcome import Outcome
from paceline.tasks import deadline
from paceline.tasks.errors import InputError, PacelineError, RankError, RunError, TimeLimitError, one_line
from paceline.tasks.judge.bisection import Bisection, Search
from paceline.tasks.judge.minimal_set import Change, find_minimal_set
from paceline.tasks.judge.records import ProcessRun, Question, Side, SideName
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.execution import Plan, baseline_of
from paceline.tasks.records.measurement import Measurement, MeasureResult, Validity
from paceline.tasks.speedup.nights.confirmation import ORDER, Confirmation, confirm, not_timed
from paceline.tasks.speedup.nights.regression import is_measure
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import get_runs, read_document
from paceline.tasks.track.rebuild import Rebuilt, rebuild
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.prefect_tasks import measure

NUM_CYCLES = 3  # of old, new, new, old
PROBE_SECONDS = 5.0  # of the measured blocks of one process
SETTINGS = ("precision", "compile", "memory_format", "loading", "micro_batch", "num_threads")
"""Settings of a plan by which two runs of one series can differ, because `auto` chose them."""
LAST_ROUND = 1.1  # times the limit of a search, after which a round that has started is stopped


@dataclass(frozen=True)
class _GoodRun:
    """The last good run, as far as it can be executed today; `job` and `outcome` are the new run's."""

    job: TrainJob
    outcome: Outcome
    plan: Plan
    packages: Rebuilt

    @property
    def changes(self) -> list[Change]:
        """All differences of the new run from what can be executed again."""
        before, now = (
            {name: _shown(getattr(plan, name)) for name in SETTINGS} for plan in (self.plan, self.outcome.plan)
        )
        changes = [
            Change(name=f"execution.{name}", good=before[name], bad=now[name])
            for name in SETTINGS
            if before[name] != now[name]
        ]
        for name, old, new, _ in self.packages.packages:
            changes.append(Change(name=name, good=old.removeprefix(f"{name} "), bad=new.removeprefix(f"{name} ")))
        return changes

    def probe_with(self, changed: Collection[str], max_restarts: int | None = None) -> TrainJob:
        """The probe of a run, shortened, for the last good run with the named changes."""
        config, now = self.outcome.config, self.outcome.plan
        settings = {name: getattr(now, name) for name in SETTINGS if f"execution.{name}" in changed}
        if "compile" in settings:  # whether a graph can be recorded belongs to it
            settings["failed_capture"] = now.failed_capture
        plan, packages = self.plan.model_copy(update=settings), self.packages.without(changed)
        arm = arm_of(plan, self.outcome.trained.worker_load)
        shorter = config.speedup.model_copy(update={"max_seconds": min(PROBE_SECONDS, config.speedup.max_seconds)})
        config = config.model_copy(update={"speedup": shorter})
        if max_restarts is not None:
            execution = config.execution.model_copy(update={"max_restarts": max_restarts})
            config = config.model_copy(update={"execution": execution})
        measurement = Measurement(arms={"baseline": baseline_of(arm), "candidate": arm})
        options = {"config": config, "plan": plan, "measurement": measurement, "search": None, "resume": False}
        return self.job.model_copy(update=options | {"python_path": packages.path, "packages": packages.identities})


def _shown(value: object) -> str:
    return "off" if value is None else typed(value)


def confirm_regression(
    outcome: Outcome, job: TrainJob, address: str, handle: RunHandle, summary: dict[str, Any]
) -> dict[str, Any]:
    """Confirm the alarm of a FINISHED run if `track.on_regression` is `confirm` or `bisect`; returns its summary then.

    Before a search over several changes, which may take hours, the alarm is sent with the confirmation alone.
    """
    judged, track = summary["regression"], outcome.config.track
    if not track.confirms or not judged or judged["verdict"] != "regression":
        return summary
    with ExitStack() as stack:
        try:
            found, good = _confirm(outcome, job, address, handle, judged, stack)
        except BaseException:  # the alarm is sent as it is
            history.report_regression(outcome, _with(summary, not_timed("it was interrupted")))
            raise
        get_run_logger().warning("The alarm is %s", found.text)
        confirmed = _record(handle, _with(summary, found), found)
        if good is None or found.verdict != "confirmed" or track.on_regression != "bisect":
            return confirmed
        if len(good.changes) > 1:
            searched = found.model_copy(update={"text": f"{found.text}; the search for the cause has started"})
            history.report_regression(outcome, _with(summary, searched))
        causes, text = _find_cause(good, address, handle)
        get_run_logger().warning("%s", text)
        found = found.model_copy(update={"causes": causes, "text": f"{found.text}; {text}"})
        return _record(handle, _with(summary, found), found)


def _record(handle: RunHandle, summary: dict[str, Any], found: Confirmation) -> dict[str, Any]:
    try:
        tracking.set_tags(handle, {Tag.CONFIRMATION: found.text})
        tracking.log_document(handle, Artifact.SUMMARY, summary)
    except Exception:  # noqa: BLE001  the store may have gone since the run was recorded: the alarm is sent all the same
        get_run_logger().exception("The confirmation could not be recorded")
    return summary


def _with(summary: dict[str, Any], found: Confirmation) -> dict[str, Any]:
    judged = summary["regression"]
    facts = {"confirmation": found.model_dump(mode="json"), "text": f"{judged['text']}; {found.text}"}
    return summary | {"regression": judged | facts}


def _confirm(
    outcome: Outcome, job: TrainJob, address: str, handle: RunHandle, judged: dict[str, Any], stack: ExitStack
) -> tuple[Confirmation, _GoodRun | None]:
    """The confirmation, and the last good run, whose packages exist until `stack` closes."""
    if all(change["measure"] == "score" for change in judged["changes"]):
        return not_timed("a score does not depend on speed, so nothing was timed"), None
    try:
        past = history.past_runs(handle, outcome.series)
        last = next((run.run_id for run in reversed(past) if is_measure(run)), None)
        if last is None:
            return not_timed("the series has no good run any more"), None
        with deadline.time_limit("track.confirm_seconds", outcome.config.track.confirm_seconds):
            return _against(last, outcome, job, address, stack)
    except Exception as error:
        if is_interruption(error):
            raise
        return not_timed(f"the last good run could not be executed again: {one_line(error)}"), None


def _against(
    run_id: str, outcome: Outcome, job: TrainJob, address: str, stack: ExitStack
) -> tuple[Confirmation, _GoodRun | None]:
    (earlier,) = get_runs(job.tracking_uri, [run_id], is_patient=True)
    names = Artifact.SUMMARY, Artifact.ENVIRONMENT
    summary, record = (read_document(job.tracking_uri, run_id, name) for name in names)
    if not summary or not record:
        return not_timed(f"the records of the last good run {run_id[:8]} are gone"), None
    plan, missing = outcome.plan, []
    try:
        plan = Plan.model_validate({key: summary["execution"][key] for key in Plan.model_fields})
    except (KeyError, ValidationError):
        missing.append("execution (recorded by another version of Paceline)")
    folder = tempfile.TemporaryDirectory(prefix="rebuilt-", dir=job.directory, ignore_cleanup_errors=True)
    packages = rebuild(record, outcome.config.packages, Path(stack.enter_context(folder)))
    good = _GoodRun(job, outcome, plan, packages)
    missing += good.packages.missing
    sides = {"old": good.probe_with(())}
    if changes := good.changes:
        sides["new"] = good.probe_with([change.name for change in changes])
    rates, host = _time(sides, address)
    then, number = summary["speedup"]["candidate_samples_per_second"], len(rates["old"]) + len(rates["new"])
    track, before = outcome.config.track, earlier.tags.get(Tag.HOSTS, "unknown")
    result = confirm(rates["old"], rates["new"], then, track.max_throughput_loss)
    rebuilt = ", ".join(f"{change.name} {change.good}" for change in changes)
    parts = [
        result.text,
        f"{number} fresh processes on {host or 'no host'} within track.confirm_seconds={track.confirm_seconds:g}",
        f"the last good run ({run_id[:8]}) was on {before}" if before != host else "",
        f"rebuilt: {rebuilt}" if rebuilt else "",
        f"not rebuilt, so the same on both sides: {', '.join(missing)}" if missing else "",
    ]
    text = "; ".join(filter(None, parts))
    return result.model_copy(update={"earlier_run_id": run_id, "text": text}), good


def _time(sides: dict[str, TrainJob], address: str) -> tuple[dict[str, list[float]], str]:
    """Samples per second of each side in fresh processes, as often as the time limit allows; and their host."""
    rates: dict[str, list[float]] = {"old": [], "new": []}
    measured: list[MeasureResult] = []
    with suppress(TimeLimitError):
        for side in ORDER * NUM_CYCLES:
            if side in sides:
                deadline.check()
                measured.append(_measure(sides[side], address))
                rates[side].append(1 / measured[-1].probe.seconds_per_sample("candidate"))
    return rates, _host_of(measured)


def _measure(job: TrainJob, address: str) -> MeasureResult:
    try:
        return measure(job, address)
    except PacelineError:
        deadline.check()  # near the end of the time, workers seem not to answer
        raise


def _host_of(measured: Iterable[MeasureResult]) -> str:
    hosts = {each.host for each in measured if each.host}
    if len(hosts) > 1:
        raise RunError(f"the processes ran on different hosts: {', '.join(sorted(hosts))}")
    return max(hosts, default="")


def _find_cause(good: _GoodRun, address: str, handle: RunHandle) -> tuple[tuple[str, ...], str]:
    """Labels of the changes that make the new run slower, none if they are not found; and a text for the message."""
    changes, seconds = good.changes, good.outcome.config.track.bisect_seconds
    if len(changes) == 1:
        label = changes[0].commit.label
        return (label,), f"the cause: {label}, the only change that could be rebuilt"
    try:
        with deadline.time_limit("track.bisect_seconds", LAST_ROUND * seconds):
            found = _search(good, changes, address, seconds)
    except Exception as error:
        if is_interruption(error):
            raise
        return (), f"the cause was not found: {one_line(error)}"
    try:
        tracking.log_document(handle, Artifact.BISECTION, found.model_dump(mode="json"))
    except Exception:  # noqa: BLE001  as in `_record`
        get_run_logger().exception("The search could not be recorded")
    labels = tuple(commit.label for commit in found.commits)
    if found.outcome == "FOUND":
        return labels, f"the cause: {found.reason}"
    left = f"; what remains is {', '.join(labels)}" if found.outcome == "UNDECIDED" else ""
    return (), f"the cause was not found: {found.reason}{left}"


def _search(good: _GoodRun, changes: list[Change], address: str, seconds: float) -> Bisection:
    """Search for a minimal set of changes that make the training slower, by fresh processes with a part of them."""
    jobs: dict[str, TrainJob] = {}
    watch = _ProbesWatch()

    def open_side(name: SideName, changed: Collection[Change]) -> Side:
        label = ", ".join(change.commit.label for change in changes if change in changed) or "the last good run"
        jobs[label] = good.probe_with([change.name for change in changed], max_restarts=0)
        return Side(name=name, command="a probe of the training", directory=str(good.job.directory), revision=label)

    def run(side: Side, question: Question) -> ProcessRun:
        left, limit, job = deadline.seconds_left() or 0.0, question.limit_seconds, jobs[str(side.revision)]
        try:
            with deadline.time_limit("limit of one probe", min(left, limit)):
                watch.measured.append(_measure(job, address))
        except (RankError, TimeLimitError) as error:  # versions may not work together
            if is_interruption(error):
                raise
            deadline.check()  # of all of it
            raise InputError(one_line(error)) from error
        _host_of(watch.measured)
        return ProcessRun(seconds=watch.measured[-1].probe.seconds_per_sample("candidate"))

    note = get_run_logger().info
    start_search = partial(Search, note=note, run=run, watch=watch, what="change", budget_name="track.bisect_seconds=")
    question = Question(
        old=open_side("good", ()), new=open_side("bad", changes), budget_seconds=seconds, limit_seconds=seconds
    )
    return find_minimal_set(changes, question, open_side, start_search)


class _ProbesWatch:
    """Collects signs of other work on the host of the probes, which may be another host."""

    def __init__(self) -> None:
        self.measured: list[MeasureResult] = []
        self._num_before = 0

    def __call__(self, _: list[int]) -> "_ProbesWatch":
        self._num_before = len(self.measured)
        return self

    def stop(self) -> Validity:
        """The first sign of it, if there is one."""
        seen = (each.probe.validity for each in self.measured[self._num_before :])
        return next((validity for validity in seen if validity.contaminated), Validity())
