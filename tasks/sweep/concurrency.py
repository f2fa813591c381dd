"""Trials of a sweep at the same time: their number and places, and their throughput side by side.

That throughput is a paired measurement: all arms are steps of the same recipe, in blocks that alternate
(`paceline.tasks.measure.probe`): one model alone on one device; one on each device, side by side; one on all devices,
which share its batches; and on CPUs one on a device of all cores.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.conf.config import Config
from paceline.tasks.cluster.client import ClusterResources
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.errors import InputError
from paceline.tasks.measure.paired_ratio import Interval, arm_ratio
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import Measurement, ProbeResult
from paceline.tasks.records.record import Choice, Record
from paceline.tasks.train.plan import arm_of

TRIAL_BYTES = 3 * 2**29  # reckoned for a rank on a CPU, before its data: torch, Lightning, MLflow and activations
Layout = Literal["one model per device", "one model on all devices", "no certain difference"]
ALONE, BESIDE, TOGETHER, WHOLE = "baseline", "candidate", "together", "whole"
"""Arms by their roles in the probe: see above."""


@dataclass(frozen=True)
class TrialConcurrency:
    """Resources of the trials."""

    at_once: Choice
    demand: ClusterResources  # workers for all that run at once
    share: Hardware  # a trial's host: its part of the cores and of the memory, and all GPUs to choose from

    @property
    def num_at_once(self) -> int:
        """Trials at the same time."""
        return int(self.at_once.value)


def plan_concurrency(
    config: Config,
    hardware: Hardware,
    accelerator: Literal["cpu", "gpu"],
    num_trials: int,
    asked: int | None,
    workers_by_host: dict[str, int] | None = None,
) -> TrialConcurrency:
    """Decide how many trials run at once. Raises InputError: as many as asked for do not fit."""
    hosts, devices, unit = _devices(config, hardware, accelerator, workers_by_host)
    each, across = config.execution.num_devices, config.execution.num_nodes
    fits = max(1, hosts * (devices // each) // across)
    why = f"{hosts * devices} {unit} over {each * across} of each trial"
    if asked is not None and asked > fits:
        raise InputError(f"--at-once {asked} exceeds the {fits} trials that there are devices for ({why}); use fewer")
    chosen, reason = min(fits if asked is None else asked, num_trials), "as asked for"
    by_memory = max(1, hosts * int(hardware.memory_bytes // TRIAL_BYTES) // (each * across))
    if asked is None:
        reason = why if chosen == fits else f"as many as there are trials, of {why}"
        if accelerator == "cpu" and chosen > by_memory:
            chosen, reason = by_memory, f"{hardware.memory_bytes / 2**30:.0f} GiB of memory on each host"
    per_host = -(-chosen * across // hosts)
    demand = ClusterResources(num_hosts=max(hosts, across), workers_per_host=per_host * each, gpus=accelerator == "gpu")
    share = hardware.model_copy(
        update={
            "num_cores": max(1, hardware.num_cores // per_host),
            "num_physical_cores": max(1, hardware.compute_threads // per_host),
            "memory_bytes": hardware.memory_bytes // per_host,
        }
    )
    return TrialConcurrency(Choice(value=chosen, reason=reason), demand, share)


def _devices(
    config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], workers_by_host: dict[str, int] | None
) -> tuple[int, int, str]:
    """Hosts, devices on each, and what to call these."""
    devices, unit = (len(hardware.gpus), "GPUs") if accelerator == "gpu" else (hardware.num_cores, "cores")
    if workers_by_host is not None:
        return max(1, len(workers_by_host)), min(workers_by_host.values(), default=0), "workers"
    hosts, limit = kind_of(config.cluster).num_hosts(config), config.cluster.num_workers
    return (hosts, devices, unit) if limit == "auto" else (hosts, min(devices, limit), "workers")


class Colocation(Record):
    """Measured throughput of trials side by side."""

    num_devices: int
    over_alone: Interval  # samples per second of all models side by side, over those of one alone on one such device
    over_together: Interval  # over those of one model on all devices, of the same batch
    over_whole: Interval | None  # over those of one model on a device of all cores; None where a device is a GPU
    num_rounds: int
    seconds: float
    contaminated: bool | None  # others used the machine meanwhile; None where nothing could be observed
    reasons: tuple[str, ...] = ()  # what was seen of them

    @property
    def over_best(self) -> Interval:
        """Over the faster of the ways to have one model on all devices."""
        return min(filter(None, (self.over_together, self.over_whole)), key=lambda way: way.value)

    @property
    def layout(self) -> Layout:
        """The layout with more samples per second over all trials."""
        ratio = self.over_best
        if not ratio.significant:
            return "no certain difference"
        return "one model per device" if ratio.value > 1 else "one model on all devices"


def colocation_of(plan: Plan, batch_size: int, num_threads: int) -> Measurement:
    """The measurement for a sweep; `num_threads` are those of a training on the whole host."""
    side_by_side = arm_of(plan).model_copy(update={"batch_size": batch_size, "variant": "no_sync"})
    alone = side_by_side.model_copy(update={"num_devices": 1, "variant": "full"})
    share = {"batch_size": max(1, batch_size // plan.world_size), "variant": "full"}
    arms = {ALONE: alone, BESIDE: side_by_side, TOGETHER: side_by_side.model_copy(update=share)}
    if plan.accelerator == "cpu" and plan.num_threads < num_threads:
        arms[WHOLE] = alone.model_copy(update={"num_threads": num_threads})
    return Measurement(arms=arms)


def judge_colocation(probe: ProbeResult) -> Colocation | None:
    """Judge the measurement; None if it was too short."""
    roles = (ALONE, TOGETHER, WHOLE)
    alone, together, all_cores = (arm_ratio(probe.rounds, role, BESIDE) for role in roles)
    if alone is None or together is None:
        return None
    return Colocation(
        num_devices=probe.candidate.num_devices,
        over_alone=alone,
        over_together=together,
        over_whole=all_cores,
        num_rounds=len(probe.rounds),
        seconds=probe.seconds,
        contaminated=probe.validity.contaminated,
        reasons=probe.validity.reasons,
    )
