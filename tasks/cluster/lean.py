"""Dask's own work kept small: what it does fifty times a second on a worker's core, a rank on that core waits for.

With Dask's defaults the scheduler and two workers take 7 to 11 % of a core while ranks train, and since ranks wait for
each other in every step, all of them lose what one of them loses. See infra/LOG.md.
"""

from __future__ import annotations

LEAN = {
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.worker.profile.enabled": False,
}
"""For `dask.config.set`, around the start of a cluster: nannies and SSH hand it on to the workers."""


def exports() -> list[str]:
    """The same as lines of a shell, for a worker that a batch system starts."""
    names = {name: name.replace(".", "__").replace("-", "_").upper() for name in LEAN}
    return [f"export DASK_{names[name]}={value}" for name, value in LEAN.items()]
