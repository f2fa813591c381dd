"""Number of concurrent trials of a sweep, their places, and the resources of each."""

from dataclasses import dataclass
from typing import Literal

from paceline.conf.config import Config
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.resources import ClusterResources
from paceline.tasks.errors import InputError
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.record import Choice

TRIAL_BYTES = 3 * 2**29
"""Memory that a rank on a CPU is reckoned with, before its data: torch, Lightning, MLflow and activations."""


@dataclass(frozen=True)
class TrialConcurrency:
    """Resources of the trials."""

    at_once: Choice
    demand: ClusterResources  # workers for all that run at once
    share: Hardware
    """What one trial may take to be its host: its part of the cores and of the memory, and all GPUs to choose from."""

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
    choice = _choice(fits, num_trials, asked, f"{hosts * devices} {unit} over {each * across} of each trial")
    by_memory = max(1, hosts * int(hardware.memory_bytes // TRIAL_BYTES) // (each * across))
    if asked is None and accelerator == "cpu" and int(choice.value) > by_memory:
        choice = Choice(value=by_memory, reason=f"{hardware.memory_bytes / 2**30:.0f} GiB of memory on each host")
    per_host = -(-int(choice.value) * across // hosts)
    demand = ClusterResources(num_hosts=max(hosts, across), workers_per_host=per_host * each, gpus=accelerator == "gpu")
    cores, memory = max(1, hardware.num_cores // per_host), hardware.memory_bytes // per_host
    share = hardware.model_copy(update={"num_cores": cores, "memory_bytes": memory})
    return TrialConcurrency(choice, demand, share)


def _devices(
    config: Config, hardware: Hardware, accelerator: Literal["cpu", "gpu"], workers_by_host: dict[str, int] | None
) -> tuple[int, int, str]:
    """Hosts, devices on each, and what to call these."""
    devices = len(hardware.gpus) if accelerator == "gpu" else hardware.num_cores
    unit = "GPUs" if accelerator == "gpu" else "cores"
    if workers_by_host is not None:
        return max(1, len(workers_by_host)), min(workers_by_host.values(), default=0), "workers"
    hosts, limit = kind_of(config.cluster).num_hosts(config), config.cluster.num_workers
    return (hosts, devices, unit) if limit == "auto" else (hosts, min(devices, limit), "workers")


def _choice(fits: int, num_trials: int, asked: int | None, why: str) -> Choice:
    if asked is None:
        chosen = min(fits, num_trials)
        return Choice(value=chosen, reason=why if chosen == fits else f"as many as there are trials, of {why}")
    if asked > fits:
        raise InputError(f"--at-once {asked} exceeds the {fits} trials that there are devices for ({why}); use fewer")
    return Choice(value=min(asked, num_trials), reason="as asked for")
