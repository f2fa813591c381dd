"""Fresh processes after a training, which show how starts differ."""

import time

from prefect import get_run_logger

from paceline.flows.lifecycle.signals import is_interruption
from paceline.tasks import deadline
from paceline.tasks.errors import PacelineError
from paceline.tasks.files import load_result, save_result
from paceline.tasks.records.measurement import FurtherStarts, Measurement, ProbeResult
from paceline.tasks.records.training import TrainResult
from paceline.tasks.speedup.between_starts import NextStart, next_start
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.prefect_tasks import measure

STARTS_FILE = "starts.json"  # file in the run's directory


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
