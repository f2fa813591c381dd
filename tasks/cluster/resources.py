"""The hosts and workers that a run needs of a cluster."""

from collections.abc import Iterable, Mapping
from typing import Literal

from paceline.conf.execution import Execution
from paceline.tasks.records.record import Record


class ClusterResources(Record):
    """Hosts, and on each of them workers: one worker is one device and one thread."""

    num_hosts: int
    workers_per_host: int
    gpus: bool  # a worker holds a GPU, else an equal share of its host's cores

    @property
    def num_workers(self) -> int:
        """Workers on all hosts."""
        return self.num_hosts * self.workers_per_host

    def is_met(self, workers_by_host: Mapping[str, int]) -> bool:
        """Whether so many workers by host can seat the run."""
        enough = [host for host, number in workers_by_host.items() if number >= self.workers_per_host]
        return len(enough) >= self.num_hosts


def demand_of(executions: Iterable[Execution], accelerator: Literal["cpu", "gpu"]) -> ClusterResources:
    """Resources that suffice for each of the executions, one after the other."""
    listed = list(executions)
    return ClusterResources(
        num_hosts=max(execution.num_nodes for execution in listed),
        workers_per_host=max(execution.num_devices for execution in listed),
        gpus=accelerator == "gpu",
    )
