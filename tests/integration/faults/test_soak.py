"""Many short scheduled runs through one `paceline serve`: nothing grows, nothing is left.

SOAK_RUNS sets another number than 50. Prints what was counted after each run and what came of it.

A run takes what a run takes, so it is the growth per run that is judged. Resources that are counted (files, processes,
connections, leases, directories) must not be more at the end than after the first runs; memory may not grow by more per
run than `MAX_GROWTH_BYTES`, at the lower end of the 95 % interval of its slope over the runs: noise alone does not
fail, nor does it hide what grows for good.
"""

import os
import sys
import time

import psutil
import pytest
from mlflow.tracking import MlflowClient
from scipy import stats

from paceline.conf.environment import Environment
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.support.deployments import Served
from tests.support.disk_use import disk_use

NUM_RUNS = int(os.environ.get("SOAK_RUNS", "50"))
NUM_FIRST = 3
"""Runs in which caches fill, connections are made and modules are imported."""
MAX_GROWTH_BYTES = {"serve": 2**17, "prefect": 2**20}
"""Of each process per run. Ours looks for runs all day long: without a collector of garbage it grew by 2**18.4 in half
a minute of looks each second, which is 60 MiB a day at the pace that Prefect has."""
SECONDS_PER_RUN = 240
RUN = ["digits", "data.image_size=16", "model.width=4", "model.depth=1", "recipe.num_epochs=1"]
RUN += ["speedup.baseline=none", "track.experiment=soak", "cluster.num_workers=1"]


def counted(process):
    """What a process and its children hold now."""
    children = process.children(recursive=True)
    connections = [one for one in process.net_connections("inet") if one.status != psutil.CONN_TIME_WAIT]
    return {
        "memory": process.memory_full_info().uss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(children),
        "connections": len(connections),
    }


def settled(process):
    """Counted once nothing of a run is left to end, or as it is after 15 s."""
    deadline = time.monotonic() + 15
    while process.children() and time.monotonic() < deadline:
        time.sleep(0.2)
    return counted(process)


def left(temporary):
    """Leases that are held, temporary files of all processes, and preparations under way."""
    site = Environment()
    return {
        "leases": sum(DeviceLock(site.leases, path.stem).owner() is not None for path in site.leases.glob("*.lease")),
        "temporary": len([*temporary.iterdir()]),
        "unfinished": len([*(site.root / "prepared").glob(".*")]),
    }


def server_of(url):
    """The process that serves a Prefect API."""
    port = int(url.split(":")[2].partition("/")[0])
    for process in psutil.Process().children(recursive=True):
        listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        if any(one.laddr.port == port for one in listening):
            return process
    raise LookupError(f"nobody of ours listens on {url}")


def growth(values):
    """Per run: (slope, lower end of its 95 % interval); Theil and Sen's, which a few odd runs do not move."""
    slope, _, low, _ = stats.theilslopes(values, alpha=0.95)
    return slope, low


@pytest.mark.slow
@pytest.mark.timeout(NUM_RUNS * SECONDS_PER_RUN + 600)
def test_nothing_grows_over_many_runs(paceline, prefect_url, tmp_path, monkeypatch):
    log = (tmp_path / "serve.log").open("w")
    arguments = ["serve", *RUN, "--name", "soak", "--cron", "0 2 * * *", "--timezone", "UTC"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "TMPDIR": str(temporary)}
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))  # other tests beside this one hold theirs
    served = Served(prefect_url, "soak", paceline(*arguments, output=log, **environment))
    processes = {"serve": psutil.Process(served.process.pid)}
    try:
        processes["prefect"] = server_of(prefect_url)
        rows, ids = [], []
        for number in range(NUM_RUNS):
            ids.append(served.begin_with())
            state = served.end_of(ids[-1], SECONDS_PER_RUN)
            assert state["type"] == "COMPLETED", (tmp_path / "serve.log").read_text()[-3000:]
            row = {
                name: settled(process) if name == "serve" else counted(process) for name, process in processes.items()
            }
            rows.append(row | {"left": left(temporary)})
            sizes = disk_use(Environment().root)
            sys.stdout.write(f"{number + 1:3} {rows[-1]}, {sizes.total()} bytes: {dict(sizes)}\n")
            sys.stdout.flush()
    finally:
        served.process.terminate()
        served.process.wait(120)
        log.close()
    check_mlflow(ids)
    for name in processes:
        check_counts(name, [row[name] for row in rows[NUM_FIRST:]])
    check_counts("left", [row["left"] for row in rows])
    assert served.process.returncode == 0


def check_mlflow(flow_runs):
    client = MlflowClient(Environment().tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name("soak").experiment_id], max_results=1000)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert sorted(run.data.tags["prefect.flow_run_id"] for run in runs) == sorted(flow_runs)


def check_counts(name, rows):
    for what in rows[0]:
        values = [row[what] for row in rows]
        slope, low = growth(values)
        sys.stdout.write(
            f"{name} {what}: {values[0]:,} to {values[-1]:,}, {slope:+,.1f} per run (at least {low:+,.1f})\n"
        )
        if what == "memory":
            assert low < MAX_GROWTH_BYTES[name], f"{name} grows by at least {low / 2**20:.2f} MiB per run"
        else:  # pools of connections and threads breathe; what is lost with each run does not come back
            assert low <= 0 or values[-1] <= max(values[: max(1, len(values) // 2)]), f"{name} {what}: {values}"
