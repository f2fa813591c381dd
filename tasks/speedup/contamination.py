"""Who else used the CPUs during a measurement: the hypervisor's steal and the work of other processes.

Knows nothing of arms and steps. What the platform does not tell stays None. Inside a container /proc/stat may show
the whole host, so that neighbours on other cores are counted too: a warning then errs on the careful side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Contamination:
    """Use of the CPUs by others; None where the platform does not say."""

    steal_fraction: float | None
    foreign_load: float | None


def _own_seconds(pids: frozenset[int]) -> dict[int, float]:
    """CPU seconds of each living process among `pids` and their descendants."""
    seconds: dict[int, float] = {}
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.Error:
            continue
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds[process.pid] = times.user + times.system
    return seconds


class CpuWatch:
    """Measures from its making to `stop()`."""

    def __init__(self, own_pids: Iterable[int]) -> None:
        """Start.

        Args:
            own_pids: Processes whose work, and whose descendants' work, belongs to the measurement or to its run.
        """
        self._pids = frozenset(own_pids)
        self._own = _own_seconds(self._pids)
        self._cpu = psutil.cpu_times()
        self._started = time.perf_counter()

    def stop(self) -> Contamination:
        """Shares since the start; the time between must be some ticks of 10 ms for them to mean anything."""
        elapsed = time.perf_counter() - self._started
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._cpu, name) for name in now._fields}
        used = sum(spent.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        total = used + sum(spent.get(name, 0.0) for name in ("idle", "iowait", "steal"))
        if total <= 0 or elapsed <= 0:
            return Contamination(None, None)
        own = _own_seconds(self._pids)
        own_used = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own.items())
        foreign = max(0.0, used - own_used) / elapsed if own else None
        steal = max(0.0, spent["steal"]) / total if "steal" in spent else None
        return Contamination(steal, foreign)
