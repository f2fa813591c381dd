"""Validity of a measurement: other work on the machine, and its clocks.

What the platform does not report stays None. Inside a container /proc/stat may show the whole host, so that neighbours
on other cores are counted too: a warning then errs on the careful side.
"""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil

from paceline.tasks.measure.gpu import HARDWARE_SLOWDOWN, THERMAL, GpuWatch
from paceline.tasks.records.measurement import Validity

MAX_STEAL_FRACTION = 0.02  # of CPU time; more contaminates. As large as the width the probe aims for
MAX_FOREIGN_CORES = 0.25  # busy with others; more contaminate. An eighth of the smallest supported machine (two cores)
MAX_FOREIGN_SHARE = 0.05  # on machines of many cores, above this share of them instead
MAX_FOREIGN_DEVICE_PROCESSES = 0  # on a GPU of the run: kernels of two processes take turns, so one is too many
MIN_GPU_CLOCK_FRACTION = 0.5
"""Below this share of its highest clock a busy GPU counts as held back. Not nearer to 1: dense arithmetic at the
board's power cap lowers the clock by some tenths in any run, and lowers it for all arms alike."""
HELD_BACK = (THERMAL, HARDWARE_SLOWDOWN)
"""Brakes that come and go with heat and supply, so that they hit one arm and not the other. A power cap or a clock
setting stays as long as the load does: recorded, no contamination."""
CPU_ROOT = Path("/sys/devices/system/cpu")
MAX_FILES, MAX_BYTES_PER_FILE = 64, 8 * 2**20
"""Together half a gigabyte of files is looked at, in milliseconds: a window per file, at another place in each."""
GOLDEN = 0.618034  # steps of this share spread the windows evenly over the files' lengths, however many there are


class ValidityWatch:
    """Watches the machine from its making to `stop()`."""

    def __init__(
        self,
        own_pids: Iterable[int],
        num_cores: int | None = None,
        gpu_uuids: Iterable[str] = (),
        data_files: Iterable[str | Path] = (),
    ) -> None:
        self._pids = frozenset(own_pids)
        self._num_cores = num_cores or psutil.cpu_count()
        self._cached = cached_fraction(data_files)
        pids = self._pids  # not `self`, which the thread of the GPUs would keep alive
        self._gpus = GpuWatch(gpu_uuids, lambda: frozenset(process.pid for process in families(pids)))
        self._clocks, self._brakes = _cpu_clocks(), _num_cpu_brakes()
        self._own, self._cpu, self._started = _own_seconds(self._pids), psutil.cpu_times(), time.perf_counter()

    def stop(self) -> Validity:
        """What went on since the start; shares mean something when the time between is long against ticks of 10 ms."""
        elapsed = time.perf_counter() - self._started
        steal, foreign = self._cpu_shares(elapsed)
        clocks, gpus = self._clocks + _cpu_clocks(), self._gpus.stop()
        heat = {THERMAL} if _num_cpu_brakes() > self._brakes else set[str]()
        figures = {
            "steal_fraction": steal,
            "foreign_load": foreign,
            "num_cores": self._num_cores,
            "min_cpu_mhz": min(clocks, default=None),
            "max_cpu_mhz": max(clocks, default=None),
            "throttled": tuple(sorted({*gpus.throttled, *heat})),
            "cached_fraction": self._cached,
        }
        return judge(gpus.model_copy(update=figures))

    def _cpu_shares(self, elapsed: float) -> tuple[float | None, float | None]:
        """Stolen share of CPU time; cores busy with others."""
        now = psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(self._cpu, name) for name in now._fields}
        used = sum(spent.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        total = used + sum(spent.get(name, 0.0) for name in ("idle", "iowait", "steal"))
        if total <= 0 or elapsed <= 0:
            return None, None
        own_seconds = _own_seconds(self._pids)
        own_used = sum(own_seconds.values()) - sum(
            seconds for pid, seconds in self._own.items() if pid in own_seconds or pid not in self._pids
        )
        foreign = max(0.0, used - own_used) / elapsed if own_seconds else None
        steal = max(0.0, spent["steal"]) / total if "steal" in spent else None
        return steal, foreign


def judge(validity: Validity) -> Validity:
    """The same figures with `contaminated` and `reasons` by this module's limits."""
    reasons = tuple(_reasons(validity))
    observed = (validity.steal_fraction, validity.foreign_load, validity.foreign_device_processes)
    is_known = bool(reasons) or any(figure is not None for figure in observed)
    return validity.model_copy(update={"contaminated": bool(reasons) if is_known else None, "reasons": reasons})


def most_foreign(num_cores: int | None) -> float:
    """Cores that others may keep busy before a measurement cannot be trusted."""
    return max(MAX_FOREIGN_CORES, MAX_FOREIGN_SHARE * (num_cores or 0))


def _reasons(validity: Validity) -> Iterator[str]:
    limit = most_foreign(validity.num_cores)
    if (validity.foreign_load or 0.0) > limit:
        of_cores = f" of {validity.num_cores}" if validity.num_cores else ""
        yield f"{validity.foreign_load:.2f}{of_cores} cores busy with other processes (limit {limit:.2f})"
    if (validity.steal_fraction or 0.0) > MAX_STEAL_FRACTION:
        yield f"{validity.steal_fraction:.1%} of CPU time stolen by the hypervisor (limit {MAX_STEAL_FRACTION:.0%})"
    if (validity.foreign_device_processes or 0) > MAX_FOREIGN_DEVICE_PROCESSES:
        yield f"{validity.foreign_device_processes} other processes on a GPU of the run"
    fraction = validity.min_gpu_clock_fraction
    if fraction is not None and fraction < MIN_GPU_CLOCK_FRACTION:
        yield f"a busy GPU at {fraction:.0%} of its highest clock (limit {MIN_GPU_CLOCK_FRACTION:.0%})"
    for brake in validity.throttled:
        if brake in HELD_BACK:
            yield f"clocks were lowered ({brake})"


def families(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """The living processes among `pids` and their descendants; some may come twice."""
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            yield from (parent, *parent.children(recursive=True))
        except psutil.Error:
            continue


def _own_seconds(pids: frozenset[int]) -> dict[int, float]:
    """CPU seconds of each living process among `pids` and their descendants.

    Each with those of its children that have ended: a loader or a compiler that came and went is in its parent's sum.
    """
    seconds: dict[int, float] = {}
    for process in families(pids):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        gone = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        seconds[process.pid] = times.user + times.system + gone
    return seconds


def _cpu_clocks() -> tuple[float, ...]:
    """Current clock of each core in MHz; empty where the platform does not report it."""
    try:
        cores = psutil.cpu_freq(percpu=True)
    except (AttributeError, NotImplementedError, OSError, RuntimeError):  # as the platforms have it
        return ()
    return tuple(core.current for core in cores or () if core.current > 0)


def _num_cpu_brakes(root: Path = CPU_ROOT) -> int:
    """Number of thermal throttling events of the processors since boot; 0 where not reported."""
    count = 0
    for path in root.glob("cpu[0-9]*/thermal_throttle/package_throttle_count"):
        try:
            count += int(path.read_text())
        except (OSError, ValueError):
            continue
    return count


def cached_fraction(files: Iterable[str | Path]) -> float | None:
    """Share of the files' bytes in the page cache, from an even sample; None when unknown, as outside Linux."""
    paths = [Path(file) for file in files]
    chosen = paths[:: max(1, -(-len(paths) // MAX_FILES))]
    cached = total = 0.0
    for number, path in enumerate(chosen):
        try:
            size = path.stat().st_size
            share = _share_of_window(path, size, (number * GOLDEN) % 1.0) if size else 0.0
        except (OSError, ValueError, AttributeError):  # gone, unreadable, no mincore
            return None
        cached += share * size
        total += size
    return cached / total if total else None


def _share_of_window(path: Path, size: int, place: float) -> float:
    """Share of resident pages in one window of the file.

    Raises OSError: they are unknown. Linux (from 5.2 on) calls every page resident for a caller who neither owns the
    file nor may write to it, so that nobody learns what others read.
    """
    if sys.platform != "linux" or not (path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)):
        raise OSError(f"the pages of {path} are unknown")
    length = min(size, MAX_BYTES_PER_FILE)
    start = int((size - length) * place) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    flags = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as mapped:
        window = np.frombuffer(mapped, dtype=np.uint8)
        addresses = ctypes.c_void_p(window.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(flags.ctypes.data)
        failed = ctypes.CDLL(None, use_errno=True).mincore(*addresses)
        del window  # a mapping with a view on it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return float(np.mean(flags & 1))
