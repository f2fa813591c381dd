import os
import resource
import subprocess
import sys
import time

import pytest

from paceline.tasks.measure import validity
from paceline.tasks.measure.gpu import gpu_joules
from paceline.tasks.measure.validity import MAX_FILES, ValidityWatch, cached_fraction, judge
from paceline.tasks.records.measurement import Validity

SPIN = "import time\nwhile time.process_time() < {}: pass"


@pytest.fixture
def idle():
    """A process that does nothing, as the whole of a run."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def hog():
    with subprocess.Popen([sys.executable, "-c", SPIN.format(30)]) as process:
        yield process.pid
        process.kill()


def test_a_cpu_hog_is_marked(idle, hog):
    # Two watches over the same time differ by the hog's work, whatever else the machine does meanwhile.
    strange, ours = ValidityWatch([idle]), ValidityWatch([idle, hog])
    started, worked = time.perf_counter(), sum(validity._own_seconds(frozenset([hog])).values())
    time.sleep(1.0)
    share = sum(validity._own_seconds(frozenset([hog])).values()) - worked
    seen, known = strange.stop(), ours.stop()
    share /= time.perf_counter() - started
    assert seen.foreign_load - known.foreign_load == pytest.approx(share, abs=0.2)
    assert seen.contaminated is True
    assert any("cores busy with other processes (limit" in reason for reason in seen.reasons)


def seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_child_that_came_and_went_is_the_runs_own(idle):
    ours, theirs = ValidityWatch([os.getpid()]), ValidityWatch([idle])
    started, before = time.perf_counter(), seconds_of_children()
    subprocess.run([sys.executable, "-c", SPIN.format(0.5)], check=True)
    own, foreign = ours.stop().foreign_load, theirs.stop().foreign_load
    # What it had of a core, which is less than half a second where a hypervisor takes some.
    share = (seconds_of_children() - before) / (time.perf_counter() - started)
    assert foreign - own == pytest.approx(share, abs=0.2)


def test_without_own_processes_there_is_no_telling():
    for pids in ([], [2**22 + 1]):
        watch = ValidityWatch(pids)
        time.sleep(0.05)
        assert watch.stop().foreign_load is None


def test_platform_facts_are_recorded_and_a_missing_gpu_is_none():
    watch = ValidityWatch([os.getpid()], gpu_uuids=["GPU-00000000-0000-0000-0000-000000000000"])
    time.sleep(0.05)
    seen = watch.stop()
    assert seen.num_cores == os.cpu_count()
    assert (seen.foreign_device_processes, seen.min_gpu_clock_fraction, seen.cached_fraction) == (None, None, None)
    assert (seen.min_cpu_mhz is None) == (seen.max_cpu_mhz is None)
    assert seen.min_cpu_mhz is None or 0 < seen.min_cpu_mhz <= seen.max_cpu_mhz
    assert gpu_joules(["GPU-none"]) is None
    assert gpu_joules([]) is None


def test_heat_of_the_processor_is_counted(tmp_path):
    for core, count in (("cpu0", 3), ("cpu1", 4)):
        (tmp_path / core / "thermal_throttle").mkdir(parents=True)
        (tmp_path / core / "thermal_throttle" / "package_throttle_count").write_text(f"{count}\n")
    assert validity._num_cpu_brakes(tmp_path) == 7
    assert validity._num_cpu_brakes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("figures", "reasons"),
    [
        ({"foreign_load": 0.26, "num_cores": 2}, ["0.26 of 2 cores busy with other processes (limit 0.25)"]),
        ({"foreign_load": 0.26}, ["0.26 cores busy with other processes (limit 0.25)"]),
        ({"foreign_load": 0.9, "num_cores": 64}, []),
        ({"steal_fraction": 0.03}, ["3.0% of CPU time stolen by the hypervisor (limit 2%)"]),
        ({"foreign_device_processes": 1}, ["1 other processes on a GPU of the run"]),
        ({"min_gpu_clock_fraction": 0.4}, ["a busy GPU at 40% of its highest clock (limit 50%)"]),
        ({"throttled": ("power cap", "thermal")}, ["clocks were lowered (thermal)"]),
        ({"throttled": ("clock setting", "power cap"), "foreign_load": 0.0}, []),
        ({"cached_fraction": 0.0, "steal_fraction": 0.0}, []),  # a cold cache is no contamination
    ],
)
def test_limits(figures, reasons):
    judged = judge(Validity(**figures))
    assert list(judged.reasons) == reasons
    assert judged.contaminated is bool(reasons)


def test_nothing_observed_is_unknown():
    assert judge(Validity(cached_fraction=1.0, min_cpu_mhz=2000)).contaminated is None


def test_page_cache_is_looked_at(tmp_path):
    files = [tmp_path / f"{number}.npy" for number in range(MAX_FILES + 3)]
    for file in files:
        file.write_bytes(os.urandom(3 * 4096 + 5))
    assert cached_fraction(files) == 1.0
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold = cached_fraction(files)
    if cold == 1.0:
        pytest.skip("this file system keeps its pages in memory")
    assert cold < 0.1


def test_page_cache_that_cannot_be_told_is_none(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    assert cached_fraction([]) is None
    assert cached_fraction([empty]) is None
    assert cached_fraction([tmp_path / "gone"]) is None
