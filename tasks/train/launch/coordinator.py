"""Coordinator of a training, in the process of the flow: places ranks on the cluster, and restarts a failed group."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.conf.config import Config
from paceline.conf.execution import CAPTURED
from paceline.conf.plugins import model_facts
from paceline.tasks.cluster.client import Request, call_workers, connect
from paceline.tasks.errors import InputError, LostError, RankError, SupersededError
from paceline.tasks.files import TEMPORARY_SUFFIX, compiled_directory, make_directory, sync_directory
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import host_identity
from paceline.tasks.measure.energy import merge as merge_energy
from paceline.tasks.measure.paired_ratio import joules_per_sample
from paceline.tasks.metrics_file import FILE, attempts, require_newest
from paceline.tasks.records.measurement import AutotuneResult, Energy, ProbeResult
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ModuleResult, TrainResult
from paceline.tasks.track.metrics_upload import upload_metrics
from paceline.tasks.train.launch import out_of_memory
from paceline.tasks.train.launch.layout import PROBE_FILE, SEARCH_FILE, Placement, gpus_on_host
from paceline.tasks.train.launch.placement import can_add_ranks, find_placements, has_free_devices, reserve
from paceline.tasks.train.launch.rank_group import ANSWER_SECONDS, RankGroup
from paceline.tasks.train.launch.rank_process import interface_of
from paceline.tasks.train.launch.recovery import Recovery
from paceline.tasks.train.launch.supervisor import PROGRESS_TOPIC, RankOutcome, free_port
from paceline.tasks.train.plan import without_graph
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of
from paceline.tasks.train.rank_spec import RankSpec, Work

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

PROGRESS_FILE = "rank-0/progress.json"  # in the directory of an attempt
LOOK_SECONDS = 3.0  # between checks for more workers, while a group is smaller than the configuration asks for

Progress = Callable[[dict[str, Any]], None]
R = TypeVar("R", bound=Record)


class TrainJob(Work):
    """One training."""

    tracking_uri: str
    resume: bool = False
    cold_compile: bool = False  # compile with an empty cache
    prepared_on: tuple[str, ...] = ()  # hosts on which `prepare_data` has run

    @property
    def directory(self) -> Path:
        """Directory of the run's checkpoints and the ranks' logs."""
        return Path(self.home) / "runs" / self.run_id

    @property
    def result_path(self) -> Path:
        """File with the result of a finished training."""
        return self.directory / "trained.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints. A measurement has none: those of a training are not its progress."""
        return self.directory / ("checkpoints" if self.measurement is None else "measured")


def train_group(job: TrainJob, address: str, on_progress: Progress | None = None) -> TrainResult:
    """Train on the cluster at `address` and return the result.

    After a failure all ranks restart from the newest valid checkpoint, as long as the training makes progress.

    Raises:
        InputError: the cluster cannot place the group, or other code runs there.
        RankError: a rank failed and would fail again; all ranks have been stopped.
        LostError: a worker, a host or the scheduler was lost and did not come back.
        TimeLimitError: limits.train_seconds is over.
        SupersededError: another process has started a newer attempt.
    """
    with upload_metrics(job.directory, job.tracking_uri, job.run_id):
        outcomes, recovery = _train_attempts(job, address, on_progress)
    return _merge(outcomes, recovery, TrainResult)


def train_module(job: TrainJob, address: str, on_progress: Progress | None = None) -> ModuleResult:
    """Train the user's own Lightning code; raises as `train_group` does, and InputError where a rank refuses it."""
    with upload_metrics(job.directory, job.tracking_uri, job.run_id), _refusals():
        outcomes, recovery = _train_attempts(job, address, on_progress)
    return _merge(outcomes, recovery, ModuleResult)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise what a rank refuses as InputError."""
    try:
        yield
    except RankError as error:
        _, refused, refusal = str(error).partition(f" failed: {InputError.__name__}: ")
        if not refused:
            raise
        raise InputError(refusal) from error


def scores_so_far(directory: Path) -> tuple[float, ...]:
    """Validation scores of all finished epochs of a run, earlier attempts included; rank 0 writes them as it trains."""
    for number in reversed(attempts(directory)):
        with suppress(FileNotFoundError):  # this attempt has not written one yet
            facts = json.loads((directory / f"attempt-{number}" / PROGRESS_FILE).read_text(encoding="utf-8"))
            return tuple(facts.get("validation_scores", ()))  # own Lightning code has none
    return ()


def measure_group(job: TrainJob, address: str, kind: type[R]) -> R:
    """Measure what `job.measurement` asks for, and return rank 0's result; raises as `train_module` does."""
    assert job.measurement is not None
    with _refusals():
        outcomes, _ = _train_attempts(job, address, None)
    return kind.model_validate(outcomes[0].result)


def _train_attempts(job: TrainJob, address: str, on_progress: Progress | None) -> tuple[list[RankOutcome], Recovery]:
    recovery = Recovery(job.checkpoints, job.config.execution.max_restarts)
    attempts, topic = _Attempts(job, recovery, on_progress), PROGRESS_TOPIC + job.run_id
    while True:
        try:
            with ExitStack() as stack:
                client, placements = recovery.wait_for_cluster(partial(attempts.connect, stack, address))
                client.subscribe_topic(topic, attempts.note_progress)
                stack.callback(_unsubscribe, client, topic)
                outcomes = attempts.next(client, placements)
                attempts.require_newest()
                return outcomes, recovery
        except (RankError, LostError) as error:
            attempts.require_newest()
            if attempts.adapt(error):
                recovery.restart(error, attempts.num_ranks, attempts.steps_done, attempts.failed_at)
            else:
                recovery.judge(error, attempts.num_ranks, attempts.steps_done, attempts.failed_at)
        except _RegroupError as reason:
            recovery.restart(reason, attempts.num_ranks, attempts.steps_done, attempts.failed_at)
        except _ReplaceError:
            logger.warning("Another device is free now; using that one")


class _RegroupError(Exception):
    """More workers are available than the group has ranks."""


class _ReplaceError(Exception):
    """The group waits for a device in use, and another one is free."""


class _Attempts:
    def __init__(self, job: TrainJob, recovery: Recovery, on_progress: Progress | None = None) -> None:
        plan = out_of_memory.restore_micro_batch(job.directory, job.plan, job.config)
        self._job = job.model_copy(update={"plan": plan})
        self._config, self._recovery, self._on_progress = job.config, recovery, on_progress
        self._resume = job.resume
        self._first = self._number = 1 + max(attempts(job.directory), default=-1)
        self._next_look = 0.0
        self._searches_again = False
        self._left_out: dict[str, str] = {}  # labels of arms that did not fit into memory, and why they are not timed
        self._saved_epochs: int | None = None  # number of epochs in a checkpoint, by rank 0's progress
        self._saved_epochs_before: int | None = None  # the same when more workers than ranks were seen first
        self.num_ranks = 0  # number of ranks of the last attempt
        self.steps_done = 0  # step that the last attempt reached
        self.failed_at: float | None = None  # monotonic time at which its failure was noticed

    def connect(self, stack: ExitStack, address: str) -> tuple[Client, list[Placement]]:
        """Connect to the scheduler and choose devices; `stack` releases both."""
        job = self._job
        self.num_ranks, self.steps_done, self.failed_at = 0, 0, None
        self._saved_epochs, self._saved_epochs_before = None, None
        with ExitStack() as connection:
            with self._recovery.waiting():
                client = connection.enter_context(connect(address))
            fewest = None if self._recovery.waits_for_all() else job.config.cluster.min_workers
            find = partial(find_placements, client, job.config, job.plan.accelerator, fewest)
            placements = connection.enter_context(reserve(lambda reserved: find(reserved)[0]))
            stack.push(connection.pop_all())
        return client, placements

    def next(self, client: Client, placements: list[Placement]) -> list[RankOutcome]:
        """Run one attempt: claim the devices, start the ranks and wait for their end."""
        job = self._job
        self.num_ranks = len(placements)
        if self.num_ranks < job.config.execution.world_size:
            logger.warning(_describe_smaller_group(job.config, self.num_ranks))
        group = RankGroup(client, job.run_id, placements)
        try:
            group.claim(partial(self._check_free_devices, client, placements))
            self._start_attempt()
            # Only now: the wait for the devices may have been long, and their holder a rank of this run.
            resume_from = newest_valid_checkpoint(job.checkpoints) if self._resume else None
            specs = self._specs(client, placements, resume_from)
            self._resume = True
            metrics = Path(specs[0].directory) / FILE  # a file of another host may become visible here much later
            with suppress(OSError):  # the rank reports the error
                make_directory(metrics.parent)
                metrics.touch()
                sync_directory(metrics.parent)
            group.start(specs)
            self._recovery.record_start(step_of(resume_from) if resume_from else 0)
            return group.watch(lambda: self._regroup_with_more(client))
        finally:
            self.steps_done, self.failed_at = group.steps_done, group.failed_at or time.monotonic()
            self.steps_done = max(self.steps_done, self._logged_step())
            group.end()

    def _specs(self, client: Client, placements: list[Placement], resume_from: Path | None) -> list[RankSpec]:
        job, attempt = self._job, self._number - 1
        hosts = {placement.host: placement for placement in placements}
        requests: list[Request] = [(each.worker, interface_of, (host,)) for host, each in hosts.items()]
        found = call_workers(client, requests, ANSWER_SECONDS, batched=True)
        (port,) = call_workers(client, [(placements[0].worker, free_port, ())], ANSWER_SECONDS)
        lost = next((answer for answer in (port, *found) if isinstance(answer, BaseException)), None)
        if lost is not None:
            raise LostError(f"a worker does not answer: {lost}")
        interfaces = dict(zip(hosts, found, strict=True))
        directories = [job.directory / f"attempt-{attempt}" / f"rank-{placement.rank}" for placement in placements]
        strategy = "single" if len(placements) == 1 else job.plan.strategy
        shared: dict[str, Any] = {name: getattr(job, name) for name in Work.model_fields}
        shared["plan"] = job.plan.model_copy(update={"world_size": len(placements), "strategy": strategy})
        shared |= {"probe": self._read_earlier(ProbeResult, PROBE_FILE), "left_out": self._left_out}
        shared["search"] = self._read_earlier(AutotuneResult, SEARCH_FILE) or job.search
        shared["may_search"] = job.may_search and (attempt == self._first or self._searches_again)
        if job.prepared is not None:
            shared["prepared"] = job.prepared.normalised_for(model_facts(job.config.model.name))
        shared["packages"] = job.packages or tuple(package.identity for package in job.config.packages)
        devices = {host: gpus_on_host(each, placements, job.plan.accelerator) for host, each in hosts.items()}
        return [
            RankSpec(
                **shared,
                directory=str(directory),
                checkpoint_directory=str(job.checkpoints),
                resume_from=str(resume_from) if resume_from else None,
                rank=placement.rank,
                local_rank=placement.local_rank,
                node_rank=placement.node_rank,
                world_size=len(placements),
                num_nodes=placements[-1].node_rank + 1,
                num_devices=placements[-1].local_rank + 1,
                master_address=placements[0].host,
                master_port=port,
                interface=interfaces[placement.host],
                devices=devices[placement.host],
                # A host may come back from a failure without its files, or another in its place: Lightning prepares.
                is_prepared=attempt == self._first and placement.host in job.prepared_on,
                coordinator=(host_identity(), os.getpid()),
                code_fingerprint=code_fingerprint(),
                compile_cache=str(compiled_directory(directory if job.cold_compile else Path(job.home))),
            )
            for placement, directory in zip(placements, directories, strict=True)
        ]

    def _start_attempt(self) -> None:
        """Create the directory of the next attempt. Raises SupersededError: another process has it."""
        attempt = self._job.directory / f"attempt-{self._number}"
        self._number += 1
        try:
            make_directory(attempt.parent)
            attempt.mkdir()
            sync_directory(attempt.parent)
            # Older attempts may have passed `require_newest` already: they cannot rename what is gone.
            for folder in ("", "checkpoints/", "checkpoints/*/"):
                for unfinished in attempt.parent.glob(f"{folder}*{TEMPORARY_SUFFIX}"):
                    unfinished.unlink(missing_ok=True)
        except FileExistsError:
            fault = f"another process has started {attempt.name} of run {self._job.run_id}"
            raise SupersededError(f"{fault}; check the locks in PACELINE_HOME with paceline doctor") from None
        except OSError as error:  # the rank reports it
            logger.debug("%s could not be created: %s", attempt, error)

    def _logged_step(self) -> int:
        """The step at which rank 0 of this process's last attempt wrote its progress last; 0 where there is none."""
        if self._number == self._first:
            return 0
        path = self._job.directory / f"attempt-{self._number - 1}" / PROGRESS_FILE
        with suppress(OSError, ValueError):  # none yet, or a file system that is gone
            return int(json.loads(path.read_text(encoding="utf-8"))["step"])
        return 0

    def require_newest(self) -> None:
        """Raise SupersededError if another process has started a newer attempt than the last one of this."""
        require_newest(self._job.directory / f"attempt-{self._number - 1}")

    def adapt(self, error: RankError | LostError) -> bool:
        """Adapt the next attempt to want of memory or a failed graph; whether it did. Raises RankError: it cannot."""
        if not isinstance(error, RankError):
            return False
        return self._halve_micro_batch(error) or self._leave_out(error) or self._exclude_graphs(error)

    def _halve_micro_batch(self, error: RankError) -> bool:
        plan = out_of_memory.with_smaller_micro_batch(self._job.plan, self._job.config, error)
        if plan is None:
            return False
        out_of_memory.save_micro_batch(self._job.directory, plan)
        self._job = self._job.model_copy(update={"plan": plan, "config": self._config})
        choice = plan.reasons["micro_batch"]
        logger.warning("%s; continuing with micro-batches of %s, on the same batches", choice.reason, choice.value)
        return True

    def _leave_out(self, error: RankError) -> bool:
        """Leave out what had no memory before the training: an arm, else all that was timed, or the resident set."""
        stage, arm, job = error.oom_stage, error.oom_arm, self._job
        if stage is None:
            return False
        if stage == "loading":
            self._job = job.model_copy(update={"plan": out_of_memory.with_streaming(job.plan, error)})
            logger.warning("Not enough memory for the set; streaming it")
            return True
        is_new = arm is not None and arm not in self._left_out
        if job.measurement is not None and not (is_new and job.measurement.is_optional(arm)):
            own = job.measurement.of_module is not None
            raise out_of_memory.with_advice(
                error, "make the batches of your loader smaller" if own else "use a smaller recipe.batch_size"
            )
        self._searches_again = is_new and stage == "search"
        if arm is not None and is_new:
            self._left_out[arm] = f"{arm} needs more memory than {job.plan.device_name} has next to the training"
            logger.warning("%s; leaving it out of the %s", self._left_out[arm], stage)
            return True
        if stage == "probe":
            speedup = job.config.speedup.model_copy(update={"baseline": "none", "diagnose": False})
            self._job = job.model_copy(update={"config": job.config.model_copy(update={"speedup": speedup})})
        logger.warning("Not enough memory for the %s next to the training; training without it", stage)
        return True

    def _exclude_graphs(self, error: RankError) -> bool:
        """Leave out CUDA graphs after one could not be recorded; what was timed before may have been one."""
        reason, job = error.failed_capture, self._job
        if reason is None:
            return False
        asked = job.measurement  # without arms it times the layers, as before a training
        is_demanded = asked is not None and bool(asked.arms) and not asked.can_leave_out
        if is_demanded or job.config.execution.compile in CAPTURED:
            raise out_of_memory.with_advice(error, "use execution.compile=auto, step or off") from error
        self._job = job.model_copy(update={"plan": without_graph(job.plan, reason), "search": None})
        self._first = self._number
        logger.warning("%s; training without CUDA graphs", reason)
        return True

    def note_progress(self, event: tuple[float, dict[str, Any]]) -> None:
        """Take rank 0's progress, a Dask event, and pass it on."""
        self._saved_epochs = event[1]["epochs_kept"]
        if self._on_progress is not None:
            self._on_progress(event[1])

    def _check_free_devices(self, client: Client, placements: list[Placement], held: list[Placement]) -> None:
        """Stop waiting for a device when enough others are free, as after a lost worker has come back."""
        devices = {(placement.host, placement.device) for placement in held}
        is_complete = len(placements) == self._job.config.execution.world_size
        if is_complete and has_free_devices(client, self._job.config, self._job.plan.accelerator, devices):
            raise _ReplaceError

    def _regroup_with_more(self, client: Client) -> None:
        """Stop a group that is smaller than configured when more workers are available and an epoch has ended since."""
        config, saved, before = self._job.config, self._saved_epochs, self._saved_epochs_before
        is_complete = self.num_ranks == config.execution.world_size
        if is_complete or saved is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if saved >= config.recipe.num_epochs:
            return
        if before is not None and saved > before:
            raise _RegroupError("more workers are available")
        if before is None and can_add_ranks(client, config, self._job.plan.accelerator, self.num_ranks):
            self._saved_epochs_before = self._saved_epochs  # another thread may have counted one meanwhile

    def _read_earlier(self, kind: type[R], name: str) -> R | None:
        """A measurement of an earlier attempt, so that a restart does not repeat it."""
        for number in range(self._first, self._number):
            path = self._job.directory / f"attempt-{number}" / "rank-0" / name
            if path.exists():
                return kind.model_validate_json(path.read_text(encoding="utf-8"))
        return None


def _describe_smaller_group(config: Config, num_ranks: int) -> str:
    world_size, batches = config.execution.world_size, "the same batches"
    if config.recipe.batch_scaling != "strong":
        size, before = config.batch_size_over(num_ranks), config.batch_size_over(world_size)
        batches = f"batches of {size} samples instead of {before}, at {num_ranks}/{world_size} of the learning rate"
    return f"Training with {num_ranks} of {world_size} ranks until more workers join, on {batches}"


def _unsubscribe(client: Client, topic: str) -> None:
    with suppress(Exception):  # the scheduler may be gone; the error of the group matters
        client.unsubscribe_topic(topic)


def _merge(outcomes: list[RankOutcome], recovery: Recovery, kind: type[R]) -> R:
    """Rank 0's result with the sums over all ranks, and the wall time seen from outside, lost attempts included."""
    results = [outcome.result or {} for outcome in outcomes]
    merged = results[0] | {"restarts": recovery.restarts}
    merged["wall_seconds"] = outcomes[0].wall_seconds + recovery.lost_seconds
    merged["clock_difference"] = sum(merged["time_budget"].values()) / outcomes[0].wall_seconds - 1.0
    if recovery.restarts:
        merged["time_budget"] = merged["time_budget"] | {"recovery": recovery.lost_seconds}
    merged["peak_memory_bytes"] = max(result["peak_memory_bytes"] or 0 for result in results)
    if "energy" in merged:  # not measured for the user's own Lightning code
        first = [(each["energy"], outcome) for each, outcome in zip(results, outcomes, strict=True) if outcome.is_first]
        hosts = [energy and Energy.model_validate(energy) for energy, _ in first]
        per_sample = joules_per_sample(ProbeResult.model_validate(merged["probe"]).rounds if merged["probe"] else ())
        energy = merge_energy(hosts, [outcome.idle_watts for _, outcome in first], per_sample)
        merged |= {"energy": energy, "energy_joules": energy and energy.joules}
    for name in {"predictions", "hosts", "devices"} & merged.keys():
        merged[name] = [entry for result in results for entry in result[name]]
    return kind.model_validate(merged)
