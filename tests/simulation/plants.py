"""Defects that are planted into the real modules, to show that the simulator finds each kind of violation."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

from paceline.flows.lifecycle import flow_run_lock, guardian, mlflow_run
from paceline.tasks import files
from paceline.tasks.track import metrics_upload
from paceline.tasks.train import prefect_tasks
from paceline.tasks.train.launch import coordinator, device_lock, rank_group, run_lock, supervisor
from paceline.tasks.train.rank import checkpoint, checkpoint_io
from tests.simulation.system import process


@dataclass(frozen=True)
class Plant:
    """A defect: what stands in for which names, and where it shows: site, faults, violations."""

    violations: str
    replacements: tuple[tuple[object, str, object], ...]
    kinds: tuple[str, ...] = ()
    changes: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def planted(self):
        with ExitStack() as stack:
            for target, name, replacement in self.replacements:
                stack.enter_context(patch.object(target, name, replacement))
            yield


def do_nothing(*_, **__):
    pass


def make_any_attempt(attempts):
    """`_Attempts._start_attempt` before there was fencing."""
    attempts._number += 1
    return attempts._number - 1


_connect = coordinator._Attempts.connect


def connect_and_choose(attempts, *arguments):
    """Choose the checkpoint before the wait for the devices."""
    answer = _connect(attempts, *arguments)
    process().memory["chosen"] = checkpoint.newest_valid_checkpoint(attempts._job.checkpoints)
    return answer


def oldest_checkpoint(directory):
    return next((path for path in sorted(directory.glob("step-*.ckpt")) if checkpoint.verify(path)), None)


def make_plainly(directory):
    directory.mkdir(parents=True, exist_ok=True)


def finish_well(handle, status, error):
    mlflow_run.tracking.finish(handle, "FINISHED")


ONE_RANK = {"num_nodes": 1, "num_devices": 1, "min_workers": None, "trainings": ("a",), "has_two_clusters": False}
TWO_RANKS = {"is_single": False, "num_nodes": 2, "num_devices": 1, "num_spare": 0, "min_workers": None}
TWO_TRAININGS = TWO_RANKS | {"trainings": ("a", "b"), "start_together": True, "step_seconds": 0.3}
ONE_HOST = ONE_RANK | {"is_single": True, "has_locks": True, "num_spare": 0, "checkpoint_steps": 1}
WITH_SPARE = ONE_RANK | {"is_single": False, "num_spare": 1, "step_seconds": 4.0, "checkpoint_steps": 1}
WITHOUT_LOCKS = WITH_SPARE | {"num_spare": 0, "step_seconds": 0.8, "has_locks": False, "is_impatient": True}
POWER = ("power off",)
PLANTS = {
    "devices are not locked": Plant(
        "device",
        ((device_lock, "fcntl", SimpleNamespace(flock=do_nothing, LOCK_EX=2, LOCK_NB=4, LOCK_SH=1)),),
        changes=TWO_TRAININGS | {"has_two_clusters": True},
    ),
    "nothing is fenced": Plant(
        "fencing, newest",
        (
            (coordinator._Attempts, "_start_attempt", make_any_attempt),
            (coordinator, "require_newest", do_nothing),
            (checkpoint_io, "require_newest", do_nothing),
            (prefect_tasks, "require_newest", do_nothing),
        ),
        ("stop a worker",),
        WITH_SPARE,
    ),
    "no rank is stopped": Plant(
        "all or none, waits for ever",
        ((rank_group.RankGroup, "end", do_nothing), (supervisor._Watch, "check_coordinator", do_nothing)),
        ("power off", "isolate a host"),
        TWO_RANKS,
    ),
    "the checkpoint is chosen before the wait": Plant(
        "newest",
        (
            (coordinator._Attempts, "connect", connect_and_choose),
            (coordinator, "newest_valid_checkpoint", lambda directory: process().memory["chosen"]),
        ),
        ("stop a flow",),
        WITHOUT_LOCKS,
    ),
    "the oldest checkpoint is chosen": Plant(
        "newest", ((coordinator, "newest_valid_checkpoint", oldest_checkpoint),), ("kill a rank",)
    ),
    "names are not synced": Plant("newest, result, status", ((files, "sync_directory", do_nothing),), POWER, ONE_HOST),
    "directories are not synced": Plant(
        "newest, result, status",
        tuple((module, "make_directory", make_plainly) for module in (checkpoint_io, coordinator, run_lock)),
        POWER,
        ONE_HOST,
    ),
    "locks are not synced": Plant("status", ((run_lock, "sync_directory", do_nothing),), POWER, ONE_HOST),
    "metrics are not synced": Plant(
        "result", ((checkpoint_io, "os", SimpleNamespace(fsync=do_nothing)),), POWER, ONE_HOST
    ),
    "claims are never withdrawn": Plant(
        "waits for ever", ((rank_group.RankGroup, "_withdraw", do_nothing),), ("jump a clock",), TWO_TRAININGS
    ),
    "lost workers are not noticed": Plant(
        "waits for ever",
        ((rank_group.RankGroup, "_check_workers", do_nothing), (rank_group, "SILENT_SECONDS", 1e9)),
        ("kill a worker",),
        ONE_HOST,
    ),
    "metrics are sent again": Plant(
        "result", ((metrics_upload._Delivery, "_last_step", lambda delivery, name: -1),), ("kill a rank",)
    ),
    "a failed run is FINISHED": Plant("status, result", ((mlflow_run, "_finish", finish_well),), ("interrupt a flow",)),
    "lost flow runs stay RUNNING": Plant("status", ((flow_run_lock, "end_lost_run", do_nothing),), ("power off",)),
    "nobody guards a flow": Plant("status", ((guardian, "GRACE_SECONDS", 1e9),), ("kill a flow",)),
}
