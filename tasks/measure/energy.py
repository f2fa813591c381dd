"""Energy that a host has used, from the counters of its GPUs (NVML) and of its processors (RAPL).

The counters count for the whole board or package: others on the same hardware are in the figure too.
"""

import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from paceline.tasks.measure.gpu import gpu_joules

POWERCAP_ROOT = Path("/sys/class/powercap")
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

    def __init__(self, gpu_uuids: Iterable[str] = (), powercap_root: Path = POWERCAP_ROOT) -> None:
        self._uuids = tuple(gpu_uuids)
        self._gpu_start = gpu_joules(self._uuids)
        self._packages = Packages(powercap_root)
        if self._packages.readable:
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            threading.Thread(target=self._packages.read_until, args=(stop,), name=THREAD_NAME, daemon=True).start()

    @property
    def source(self) -> str | None:
        """The measured hardware; None without a figure."""
        if self._uuids and self._gpu_start is None:
            return None
        names = (["GPUs"] if self._uuids else []) + (["CPU packages"] if self._packages.readable else [])
        return " and ".join(names) or None

    def joules(self) -> float | None:
        """Since the making; None where no counter can be read."""
        gpus = packages = 0.0
        if self._uuids:
            now = gpu_joules(self._uuids)
            if now is None or self._gpu_start is None:
                return None
            gpus = max(0.0, now - self._gpu_start)
        if self._packages.readable:
            packages = self._packages.read() or 0.0
        return gpus + packages if self.source else None


class Packages:
    """The processors' energy since the making, through the wraps of their counters."""

    def __init__(self, root: Path) -> None:
        """Start at the counters under `root` (sysfs `class/powercap`)."""
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
