"""Faults of a cluster against the program itself, on all that a site has: nothing is lost and nothing is left.

    pytest -m slow tests/integration/faults/test_chaos.py --faults 500 --faults-record chaos.jsonl

--faults-seed draws another list. With a record, faults of another call follow those that it has, so that a long list
can be injected in parts; several lists can run next to each other. The summary is of the complete record: what came of
each fault, and the time of restarts.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.metrics_file import FILE
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.integration.conftest import SMALL
from tests.integration.faults.test_recovery import told_steps
from tests.support.faults import Faults, clock_settings
from tests.support.hosts import skip_unless_permitted, two_hosts
from tests.support.jobs import PLANTED
from tests.support.patience import until
from tests.support.services import started
from tests.support.small_disk import small_disk

EPOCHS_PER_FAULT, MOST_EPOCHS = 12, 240
SLOW = "rank-0=0.0015"
"""Seconds that one rank waits for each sample, and the other one with it. A fault lasts for seconds in any case. Ranks
that compute all the time would only make the machine busy, and restarts slow."""
NUM_TEST = 359
RUN = [*SMALL, "execution.num_nodes=2", "execution.num_threads=1", "execution.checkpoint_steps=10"]
RUN += ["execution.memory_format=contiguous", "execution.loading=resident", "execution.compile=off"]  # no search
RUN += ["track.experiment=chaos", "cluster.kind=address", "limits.min_free_gib=0"]  # the disk is small
LATEST = 3.0
"""Seconds between progress and the next fault, at most."""
CLEAR = ("error: ", "hint: ")
RESTART = re.compile(
    r"Resuming from step \d+ ([\d.]+) s after the failure"
    r"(?: \(([\d.]+) s of them waiting for the cluster\))?; at least (\d+) steps are repeated"
)
LONGEST_START = 60.0
"""Seconds; what seems longer had the clock set in between."""


class Record:
    """Faults that were injected, one on a line; a file, where one is named.

    Args:
        path: Of the file.
        seed: Of the list of faults.
    """

    def __init__(self, path, seed):
        self._path = path
        self.seed = seed
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.facts = [json.loads(line) for line in lines]
        assert {facts["seed"] for facts in self.facts} <= {seed}, f"{path} is of another --faults-seed"

    def add(self, **facts):
        """Add a fault or the end of a training."""
        self.facts.append({"seed": self.seed} | facts)
        if self._path:
            with self._path.open("a") as stream:
                stream.write(json.dumps(self.facts[-1]) + "\n")

    @property
    def faults(self):
        return [facts for facts in self.facts if "fault" in facts]

    def __str__(self):
        by_fault = defaultdict(list)
        for facts in self.faults:
            by_fault[facts["fault"]].append(facts)
        lines = []
        for fault, found in sorted(by_fault.items()):
            seconds = [facts["seconds"] for facts in found]
            ended = sum(facts["ended"] for facts in found)
            times = f"progress again after {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
            lines.append(f"{len(found):4} {fault}: {ended} flows ended; {times}")
        restarts = [one for facts in self.facts for one in facts.get("restarts", [])]
        trainings = [facts for facts in self.facts if "finished" in facts]
        lines.append(f"{len(self.faults)} faults in {len(trainings)} trainings, {len(restarts)} restarts within a run")
        waits = [one.get("wait_seconds", 0.0) for one in restarts]
        own = [one["seconds"] - wait for one, wait in zip(restarts, waits, strict=True)]
        lines.append(f"from the failure to the start of the ranks: {_distribution(own)}")
        lines.append(f"the wait for the cluster, which is not in it: {_distribution(waits)}")
        started = [seconds for facts in self.facts for seconds in facts.get("seconds_to_train", [])]
        lines.append(f"from the start of the ranks to the first losses: {_distribution(started)}")
        lines.append(f"most steps known to be done again: {max((one['lost_steps'] for one in restarts), default=0)}")
        return "\n".join(lines)


def _distribution(values):
    values = sorted(values)
    if not values:
        return "none"
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f"median {statistics.median(values):.2f} s, p99 {p99:.2f} s, most {values[-1]:.2f} s"


class Course:
    """Training after training, each with several faults.

    Args:
        start: Starts the program with arguments.
        faults: `Faults`.
        record: `Record`.
        address: Of the scheduler.
        directory: For what the program prints.
    """

    def __init__(self, start, faults, record, address, directory):
        self._start, self._faults, self._record = start, faults, record
        self._cluster = ["cluster.kind=address", f"cluster.address={address}", "cluster.tls=off"]
        self._output = directory / "output"
        self._client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])

    def train(self, last):
        """One training, with faults up to a number of the list."""
        remaining = last - len(self._record.faults)
        self._epochs = min(MOST_EPOCHS, EPOCHS_PER_FAULT * remaining)
        flow, num_resumed = self._begin(), 0
        while (status := self._wait(flow)) != 0:
            if status is None:
                if len(self._record.faults) < last:
                    self._disturb(flow)
                else:
                    flow.wait(600)
                continue
            said = self._said()
            self._record_restarts()
            assert status < 0 or status > 128 or any(line.startswith(CLEAR) for line in said.splitlines()[-3:]), said
            flow, num_resumed = self._resume(), num_resumed + 1
            assert num_resumed <= len(self._record.faults), f"a resume does not help: {said}"
        self._record_restarts()
        self._check()

    def check_nothing_is_left(self):
        site = Environment()
        assert self._faults._ranks() == []
        assert [path for path in site.leases.iterdir() if DeviceLock(site.leases, path.stem).owner()] == []
        assert self._unfinished() == []
        assert list(site.root.glob("runs/*/checkpoints/.*")) == [], "temporary files"

    def _begin(self):
        settings = [*RUN, f"recipe.num_epochs={self._epochs}", *self._cluster]
        return self._start(self._output, "run", "digits", *settings, "--json")

    def _resume(self):
        left = self._unfinished()
        if not left:  # it ended before its run began
            return self._begin()
        return self._start(self._output, "run", "--resume", left[0].info.run_id, *self._cluster, "--json")

    def _wait(self, flow):
        """Wait for progress of the training or the end of the flow; its status, None while it runs."""
        before = self._progress()
        until(
            lambda: flow.poll() is not None or self._progress() > before, f"progress\n{self._said()}", 400, every=0.05
        )
        return flow.poll()

    def _progress(self):
        """The newest checkpoint's time: steps that are repeated count."""
        found = Environment().root.glob("runs/*/checkpoints/step-*.ckpt")
        return max((path.stat().st_mtime_ns for path in found if path.exists()), default=0)

    def _disturb(self, flow):
        number = len(self._record.faults)
        fault, chance = Faults.draw(self._record.seed, number)
        time.sleep(chance.uniform(0.0, LATEST))
        if flow.poll() is not None:
            return
        began = time.monotonic()
        getattr(self._faults, fault)(flow, chance)
        status = self._wait(flow)
        seconds, ended = time.monotonic() - began, status not in (None, 0)
        self._record.add(number=number, fault=fault, seconds=seconds, ended=ended)
        sys.stdout.write(f"{number:4} {fault}: {seconds:.1f} s{', the flow ended' if ended else ''}\n")
        sys.stdout.flush()

    def _check(self):
        summary = json.loads(Path(self._output).read_text().splitlines()[-1])
        run = self._client.get_run(summary["run_id"])
        restarts = summary["train"]["restarts"]  # of the last process of the flow
        assert len(restarts) == len(self._restarts())
        assert run.info.status == "FINISHED"
        assert run.data.metrics.get("recovery/seconds") == max((one["seconds"] for one in restarts), default=None)
        assert summary["evaluate"]["num_samples"] == NUM_TEST
        steps = sorted(one.step for one in self._client.get_metric_history(run.info.run_id, "train/loss"))
        assert steps == told_steps(self._epochs), "no step is missing or logged twice"
        self._record.add(finished=run.info.run_id, seconds_to_train=seconds_to_train())

    def _restarts(self):
        """Each restart in the log of the current flow process."""
        log = self._output.with_suffix(".err").read_text()
        return [
            {"seconds": float(seconds), "wait_seconds": float(waited or 0), "lost_steps": int(steps)}
            for seconds, waited, steps in RESTART.findall(log)
        ]

    def _record_restarts(self):
        self._record.add(restarts=self._restarts())

    def _said(self):
        path = self._output.with_suffix(".err")
        return path.read_text()[-5000:] if path.exists() else ""

    def _unfinished(self):
        """Runs that are not finished, the newest first."""
        experiment = self._client.get_experiment_by_name("chaos")
        if experiment is None:
            return []
        return list(self._client.search_runs([experiment.experiment_id], "attributes.status != 'FINISHED'"))


def seconds_to_train():
    """Seconds from the start of rank 0 to its first losses, of each attempt that came so far, the first excepted.

    Five steps of 0.05 s lie before them. The times of files are of the kernel's clock; the rank's clock differs by as
    much when it writes the last line of a file as when it writes the first, unless the clock is set in between.
    """
    found = []
    for path in Environment().root.glob(f"runs/*/attempt-*/rank-0/{FILE}"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        losses = [when / 1000 for name, _, when, _ in lines if name == "train/loss"]
        if losses and path.parents[1].name != "attempt-0":
            trained = losses[0] + path.stat().st_mtime - lines[-1][2] / 1000
            found.append(trained - (path.parent / "spec.json").stat().st_mtime)
    return [seconds for seconds in found if 0 < seconds < LONGEST_START]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Services, hosts and faults; this process and the program use them."""
    skip_unless_permitted()
    clock = clock_settings(tmp_path / "clock")
    for name, folder in (("PACELINE_HOME", "home"), ("PACELINE_LEASES", "leases")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "hosts").mkdir()
    runs = Environment().root / "runs"
    with small_disk(runs, megabytes=512) as filler, started() as services:
        for name, value in services.environment().items():
            monkeypatch.setenv(name, value)
        path = os.pathsep.join(filter(None, [PLANTED, os.environ.get("PYTHONPATH")]))
        with two_hosts(tmp_path / "hosts", clock | {"PYTHONPATH": path, "PLANT": SLOW}) as hosts:
            yield hosts, Faults(hosts, services, filler, tmp_path / "clock"), clock


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as the list of faults
def test_chaos(site, tmp_path, request):
    hosts, faults, clock = site
    record = Record(request.config.getoption("--faults-record"), request.config.getoption("--faults-seed"))
    last = len(record.faults) + request.config.getoption("--faults")

    def start(output, *arguments):
        with output.open("w") as out, output.with_suffix(".err").open("w") as err:
            words = [str(Path(sys.executable).with_name("paceline")), *arguments]
            return subprocess.Popen(words, stdout=out, stderr=err, env=os.environ | clock)

    course = Course(start, faults, record, hosts.address, tmp_path)
    try:
        while len(record.faults) < last:
            course.train(last)
    finally:
        sys.stdout.write(f"\n{record}\n")
    course.check_nothing_is_left()


def test_the_list_of_faults_has_every_fault_and_follows_from_its_seed():
    names = Faults.names()
    drawn = [Faults.draw("1", number)[0] for number in range(2 * len(names))]
    assert sorted(drawn) == sorted(2 * names)
    assert drawn == [Faults.draw("1", number)[0] for number in range(2 * len(names))]
    assert drawn != [Faults.draw("2", number)[0] for number in range(2 * len(names))]


def test_a_record_continues_where_it_ended(tmp_path):
    first = Record(tmp_path / "record", "1")
    first.add(number=0, fault="kill_a_rank", seconds=2.0, ended=False)
    first.add(restarts=[{"seconds": 4.5, "wait_seconds": 3.0, "lost_steps": 7}])
    first.add(finished="0123", seconds_to_train=[2.25])
    again = Record(tmp_path / "record", "1")
    assert len(again.faults) == 1
    assert "to the start of the ranks: median 1.50 s, p99 1.50 s" in str(again)
    assert "not in it: median 3.00 s" in str(again)
    assert "to the first losses: median 2.25 s" in str(again)
    assert "1 faults in 1 trainings, 1 restarts" in str(again)
    with pytest.raises(AssertionError, match="another --faults-seed"):
        Record(tmp_path / "record", "2")
