"""Fresh processes after a training: how starts differ, and whether an alarm holds against the last good run."""

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from pydantic import ValidationError

from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run import history
from paceline.flows.run.record import Outcome
from paceline.tasks import deadline
from paceline.tasks.errors import PacelineError, RunError, TimeLimitError, one_line
from paceline.tasks.files import load_result, save_result
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.execution import Plan, baseline_of
from paceline.tasks.records.measurement import FurtherStarts, Measurement, ProbeResult
from paceline.tasks.records.training import TrainResult
from paceline.tasks.speedup.between_starts import NextStart, next_start
from paceline.tasks.speedup.nights.confirmation import ORDER, Confirmation, confirm, not_timed
from paceline.tasks.speedup.nights.regression import is_measure
from paceline.tasks.track import run as tracking
from paceline.tasks.track.queries import get_runs, read_document
from paceline.tasks.track.rebuild import rebuild
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.prefect_tasks import measure

STARTS_FILE = "starts.json"  # file in the run's directory
NUM_CYCLES = 3  # of old, new, new, old
PROBE_SECONDS = 5.0  # of the measured blocks of one process


def measure_starts(job: TrainJob, trained: TrainResult, address: str) -> FurtherStarts:
    """Probe in as many further groups of ranks as the training's time allows, one after the other.

    A process that fails or takes too long ends this: the training is finished, and the run continues with what is
    known. A resumed run measures only what is missing.
    """
    path, settings = job.directory / STARTS_FILE, job.config.speedup
    done = (load_result(path, FurtherStarts) if job.resume else None) or FurtherStarts()
    if trained.probe is None:
        return done
    if trained.world_size != job.config.execution.world_size:
        settings = settings.model_copy(update={"starts": 0})  # other workers than the training had may answer now
    while (planned := next_start(settings, trained, done)).num_rounds:
        started, reason, probes = time.monotonic(), "", done.probes
        try:
            with deadline.time_limit("speedup.starts", planned.seconds):
                probes += (measure(probe_job(job, trained.probe, planned), address).probe,)
        except PacelineError as error:
            if is_interruption(error):
                raise
            reason = f"a further process failed: {error}"
        done = FurtherStarts(probes=probes, seconds=done.seconds + time.monotonic() - started, reason=reason)
        save_result(path, done, [])
        if reason:
            break
    done = done.model_copy(update={"reason": done.reason or planned.reason})
    get_run_logger().info("speedup.starts=%d: %s", len(done.probes), done.reason)
    return done


def probe_job(job: TrainJob, probe: ProbeResult, planned: NextStart) -> TrainJob:
    """The job of one further group, which probes the same two arms in blocks of as many steps and does not restart."""
    blocks = {"num_blocks": planned.num_rounds, "steps_per_block": probe.rounds[0][0].num_steps}
    speedup = job.config.speedup.model_copy(update=blocks | {"max_seconds": planned.block_seconds, "diagnose": False})
    execution = job.config.execution.model_copy(update={"max_restarts": 0})
    config = job.config.model_copy(update={"speedup": speedup, "execution": execution})
    measurement = Measurement(arms={"baseline": probe.baseline, "candidate": probe.candidate})
    changes = {"config": config, "measurement": measurement, "search": None, "may_search": False, "resume": False}
    return job.model_copy(update=changes)


def confirm_regression(
    outcome: Outcome, job: TrainJob, address: str, handle: RunHandle, summary: dict[str, Any]
) -> dict[str, Any]:
    """Confirm the alarm of a FINISHED run if `track.on_regression=confirm`; its summary with the confirmation."""
    judged = summary["regression"]
    if outcome.config.track.on_regression != "confirm" or not judged or judged["verdict"] != "regression":
        return summary
    try:
        found = _confirm(outcome, job, address, handle, judged)
    except BaseException:  # the alarm is sent as it is
        history.report_regression(outcome, _with(summary, not_timed("it was interrupted")))
        raise
    get_run_logger().warning("The alarm is %s", found.text)
    summary = _with(summary, found)
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


def _confirm(outcome: Outcome, job: TrainJob, address: str, handle: RunHandle, judged: dict[str, Any]) -> Confirmation:
    if all(change["measure"] == "score" for change in judged["changes"]):
        return not_timed("a score does not depend on speed, so nothing was timed")
    try:
        past = history.past_runs(handle, outcome.series)
        last = next((run.run_id for run in reversed(past) if is_measure(run)), None)
        with deadline.time_limit("track.confirm_seconds", outcome.config.track.confirm_seconds):
            return _against(last, outcome, job, address) if last else not_timed("the series has no good run any more")
    except Exception as error:
        if is_interruption(error):
            raise
        return not_timed(f"the last good run could not be executed again: {one_line(error)}")


def _against(run_id: str, outcome: Outcome, job: TrainJob, address: str) -> Confirmation:
    (earlier,) = get_runs(job.tracking_uri, [run_id], is_patient=True)
    names = Artifact.SUMMARY, Artifact.ENVIRONMENT
    summary, record = (read_document(job.tracking_uri, run_id, name) for name in names)
    if not summary or not record:
        return not_timed(f"the records of the last good run {run_id[:8]} are gone")
    plan, rebuilt, missing = outcome.plan, [], []
    try:
        plan = Plan.model_validate({key: summary["execution"][key] for key in Plan.model_fields})
    except (KeyError, ValidationError):
        missing.append("execution (recorded by another version of Paceline)")
    if arm_of(plan) != arm_of(outcome.plan):
        rebuilt.append(f"execution ({arm_of(plan).label})")
    with tempfile.TemporaryDirectory(prefix="rebuilt-", dir=job.directory) as folder:
        packages = rebuild(record, outcome.config.packages, Path(folder))
        sides = {"old": _probe_of(job, outcome, plan, python_path=packages.path, packages=packages.identities)}
        rebuilt, missing = [*rebuilt, *packages.rebuilt], [*missing, *packages.missing]
        if rebuilt:
            sides["new"] = _probe_of(job, outcome, outcome.plan)
        rates, host = _time(sides, address)
    then = summary["speedup"]["candidate_samples_per_second"]
    track, number = outcome.config.track, len(rates["old"]) + len(rates["new"])
    result = confirm(rates["old"], rates["new"], then, track.max_throughput_loss)
    before = earlier.tags.get(Tag.HOSTS, "unknown")
    parts = [
        f"{number} fresh processes on {host or 'no host'} within track.confirm_seconds={track.confirm_seconds:g}",
        f"the last good run ({run_id[:8]}) was on {before}" if before != host else "",
        f"rebuilt: {', '.join(rebuilt)}" if rebuilt else "",
        f"not rebuilt, so the same on both sides: {', '.join(missing)}" if missing else "",
    ]
    return result.model_copy(update={"earlier_run_id": run_id, "text": "; ".join([result.text, *filter(None, parts)])})


def _probe_of(job: TrainJob, outcome: Outcome, plan: Plan, **options: Any) -> TrainJob:
    """The probe of an execution, as each run has it before its training, but shorter."""
    arm = arm_of(plan, outcome.trained.worker_load)
    arms = {"baseline": baseline_of(arm), "candidate": arm}
    speedup = outcome.config.speedup
    shorter = speedup.model_copy(update={"max_seconds": min(PROBE_SECONDS, speedup.max_seconds)})
    options |= {"config": outcome.config.model_copy(update={"speedup": shorter}), "plan": plan}
    return job.model_copy(update=options | {"measurement": Measurement(arms=arms), "search": None, "resume": False})


def _time(sides: dict[str, TrainJob], address: str) -> tuple[dict[str, list[float]], str]:
    """Samples per second of each side in fresh processes, as often as the time limit allows; and their host."""
    rates: dict[str, list[float]] = {"old": [], "new": []}
    hosts = {""}
    with suppress(TimeLimitError):
        for side in ORDER * NUM_CYCLES:
            if side in sides:
                deadline.check()
                try:
                    measured = measure(sides[side], address)
                except PacelineError:
                    deadline.check()  # near the end of the time, workers seem not to answer
                    raise
                hosts.add(measured.host)
                rates[side].append(1 / measured.probe.seconds_per_sample("candidate"))
    if len(hosts - {""}) > 1:
        raise RunError(f"the processes ran on different hosts: {', '.join(sorted(hosts - {''}))}")
    return rates, max(hosts)
