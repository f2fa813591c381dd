"""Energy that a host has used, from the counters of its GPUs (NVML) and of its processors (RAPL).

The counters count for the whole board or package: others on the same hardware are in the figure too, and are named.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from paceline.tasks.measure.gpu import gpu_joules
from paceline.tasks.measure.validity import families, most_foreign
from paceline.tasks.records.measurement import Energy, Rates

POWERCAP_ROOT = Path("/sys/class/powercap")
SENSOR_ERROR = 0.05
"""Assumed share. NVML states 5 % of the power for GPUs up to Kepler and nothing for later ones, of which it samples a
part of the time only (Yang, Adamek, Armour 2024); for RAPL no figure is stated."""
IDLE_SECONDS = 1.0  # power is averaged over a second on GPUs from Ampere on (NVML)
MIN_NAMED_CORES = 0.05
MAX_NAMED = 5
GPU_TOO_SLOW = "the sensor of a GPU averages over a second (NVML), and a block of the probe is shorter"
NO_BLOCKS = "there is no probe, its ranks are on several hosts, or a counter did not change during one of its blocks"
SECONDS_PER_READ = 60.0
"""Between two looks at the packages' counters. They wrap at 65 to 262 kJ, after four minutes at the very least, and a
wrap is seen only when there is a look in each turn."""

THREAD_NAME = "energy meter"


class EnergyMeter:
    """Measures from its making.

    With GPUs the figure is theirs and the processors', or theirs alone where the processors' counters may not be read
    (most systems keep them for root); `source` says which. Without the GPUs' counters a run on GPUs has no figure:
    the processors' part would pass for the whole.
    """

    def __init__(
        self,
        gpu_uuids: Iterable[str] = (),
        powercap_root: Path = POWERCAP_ROOT,
        own: Callable[[], Iterable[int]] = lambda: (os.getpid(),),
    ) -> None:
        self._uuids = tuple(gpu_uuids)
        self._own = own
        self._gpu_start = gpu_joules(self._uuids)
        self._packages = Packages(powercap_root)
        if self._packages.readable:
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            threading.Thread(target=self._packages.read_until, args=(stop,), name=THREAD_NAME, daemon=True).start()
        self._before = self._spent()
        self._started = time.monotonic()

    @property
    def source(self) -> str | None:
        """The measured hardware; None without a figure."""
        if self._uuids and self._gpu_start is None:
            return None
        names = {"GPUs": bool(self._uuids), "CPU packages": self._packages.readable}
        return " and ".join(name for name, measured in names.items() if measured) or None

    def joules(self) -> float | None:
        """Since the making; None where no counter can be read."""
        gpus = 0.0
        if self._uuids:
            now = gpu_joules(self._uuids)
            if now is None or self._gpu_start is None:
                return None
            gpus = max(0.0, now - self._gpu_start)
        packages = self._packages.read() or 0.0 if self._packages.readable else 0.0
        return gpus + packages if self.source else None

    def energy(self, has_gpu_neighbours: bool) -> Energy | None:
        """The same, with its interval and the neighbours."""
        joules, source, seconds = self.joules(), self.source, time.monotonic() - self._started
        if joules is None or source is None:
            return None
        spent = self._spent()  # in ticks of 10 ms, which over less than a second say nothing of cores
        cores = {process: (spent[process] - self._before.get(process, 0.0)) / max(1.0, seconds) for process in spent}
        named = sorted((process for process in cores if cores[process] >= MIN_NAMED_CORES), key=lambda one: -cores[one])
        is_shared = has_gpu_neighbours or sum(cores.values()) > most_foreign(psutil.cpu_count())
        return Energy(
            joules=joules,
            low=None if is_shared else (1 - SENSOR_ERROR) * joules,
            high=None if is_shared else (1 + SENSOR_ERROR) * joules,
            source=source,
            seconds=seconds,
            neighbours=tuple(f"{process[1]} ({cores[process]:.2f} cores)" for process in named[:MAX_NAMED]),
        )

    def _spent(self) -> dict[tuple[int, str], float]:
        """Processor seconds of other processes; none where the figure does not contain the processors."""
        return _foreign_seconds(self._own()) if self.source and self._packages.readable else {}


class Packages:
    """The processors' energy since the making, through the wraps of their counters under `root` (sysfs)."""

    def __init__(self, root: Path) -> None:
        self._lock = threading.Lock()
        self._zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_package(zone)]
        self._last = [_microjoules(zone / "energy_uj") for zone in self._zones]
        self._ranges = [_microjoules(zone / "max_energy_range_uj") for zone in self._zones]
        self._total = 0.0
        self.readable = bool(self._zones) and None not in self._last

    def read(self) -> float | None:
        """Joules of all packages since the making; None when a counter can no longer be read."""
        with self._lock:
            for number, zone in enumerate(self._zones):
                now, last = _microjoules(zone / "energy_uj"), self._last[number]
                if now is None or last is None:
                    self.readable = False
                    return None
                gained = now - last if now >= last else now - last + (self._ranges[number] or 0)
                self._total += max(0, gained) / 1e6
                self._last[number] = now
            return self._total

    def read_until(self, stop: threading.Event) -> None:
        """Read often enough that no counter wraps twice between two reads."""
        while not stop.wait(SECONDS_PER_READ):
            self.read()


def _is_package(zone: Path) -> bool:
    """Whole processors only: `core`, `dram` and others are parts of them, and `psys` contains them."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _microjoules(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def idle_watts(gpu_uuids: Iterable[str], powercap_root: Path = POWERCAP_ROOT) -> float | None:
    """Measure the power of a host's GPUs and processors for a second; None at once where no counter can be read."""
    started, meter = time.monotonic(), EnergyMeter(gpu_uuids, powercap_root)
    if meter.source is None:
        return None
    time.sleep(IDLE_SECONDS)
    joules = meter.joules()
    return None if joules is None else joules / (time.monotonic() - started)


def merge(hosts: Sequence[Energy | None], idle: Sequence[float | None], per_sample: Rates) -> Energy | None:
    """The energy of all hosts, with their power before the start; None where a host has none."""
    measured = [energy for energy in hosts if energy is not None]
    if len(measured) < len(hosts):
        return None
    columns: dict[str, list[float | None]] = {"idle_watts": [*idle]}
    columns |= {name: [getattr(energy, name) for energy in measured] for name in ("joules", "low", "high")}
    totals = {name: None if None in column else sum(filter(None, column)) for name, column in columns.items()}
    why = "" if per_sample else GPU_TOO_SLOW if "GPU" in measured[0].source else NO_BLOCKS
    neighbours = tuple(name for energy in measured for name in energy.neighbours)
    without_joules = {"neighbours": neighbours, "joules_per_sample": per_sample, "why_no_samples": why}
    return measured[0].model_copy(update=totals | without_joules)


def _foreign_seconds(own: Iterable[int]) -> dict[tuple[int, str], float]:
    """CPU seconds of each process that is not the run's, by its number and name."""
    pids = {process.pid for process in families(own)}
    listed = psutil.process_iter(["name", "cpu_times"])
    return {
        (process.pid, process.info["name"]): sum(process.info["cpu_times"][:2])
        for process in listed
        if process.pid not in pids and process.info["cpu_times"]
    }
