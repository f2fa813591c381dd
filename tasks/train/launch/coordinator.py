"""The coordinator: seats a group of ranks on the cluster, and begins it again from the newest checkpoint when it fails.

Runs in the flow's own process. Knows where ranks run, not what they compute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.conf.config import Config
from paceline.tasks.cluster.client import call_workers, connect
from paceline.tasks.errors import LostError, RankError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import host_identity
from paceline.tasks.measure.records import Measurement, MeasureResult
from paceline.tasks.metrics_file import FILE, attempts
from paceline.tasks.records import AutotuneResult, Plan, PreparedSet, Pretrained, ProbeResult, Record, TrainResult
from paceline.tasks.track.metrics_upload import metrics_delivery
from paceline.tasks.train.launch.layout import PROBE_FILE, SEARCH_FILE, Placement, devices_on_host
from paceline.tasks.train.launch.out_of_memory import restore_micro_batch, save_micro_batch, with_smaller_micro_batch
from paceline.tasks.train.launch.placement import can_add_ranks, find_placements, has_free_devices, reserve
from paceline.tasks.train.launch.rank_group import ANSWER_SECONDS, RankGroup, Told
from paceline.tasks.train.launch.rank_process import interface_of
from paceline.tasks.train.launch.recovery import Recovery
from paceline.tasks.train.launch.supervisor import RankOutcome, free_port, progress_topic
from paceline.tasks.train.rank.checkpoint import newest_verified, step_of
from paceline.tasks.train.rank_spec import RankSpec

if TYPE_CHECKING:
    from distributed import Client

LOOK_SECONDS = 3.0
"""Between looks for more workers, while a group is smaller than asked for."""

Progress = Callable[[dict[str, Any]], None]
R = TypeVar("R", bound=Record)


class TrainJob(Record):
    """One training to be done."""

    config: Config
    plan: Plan
    prepared: PreparedSet
    pretrained: Pretrained | None = None
    """Weights to begin with; None to begin by the seed."""
    run_id: str
    tracking_uri: str
    home: str
    resume: bool = False
    measurement: Measurement | None = None
    """Measure this instead of training."""
    search: AutotuneResult | None = None
    """What is known of the executions that `auto` can choose from; None for nothing."""
    may_search: bool = False
    """Whether the ranks may time executions before they train."""
    cold_compile: bool = False
    """Compile from nothing, whatever earlier trainings have left in caches."""

    @property
    def directory(self) -> Path:
        """Where the run's checkpoints and the ranks' logs lie."""
        return Path(self.home) / "runs" / self.run_id

    @property
    def kept(self) -> Path:
        """Where the result of the training is kept, once it is finished."""
        return self.directory / "trained.json"

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.directory / "checkpoints"


def train_group(job: TrainJob, address: str, on_progress: Progress | None = None, tell: Told = print) -> TrainResult:
    """Train on the cluster at `address` and return rank 0's result.

    What is lost on the way is restarted as a whole from the newest checkpoint that verifies, as long as the training
    makes progress in between.

    Args:
        job: what to train.
        address: of the Dask scheduler.
        on_progress: takes rank 0's progress.
        tell: takes sentences for people: restarts and their causes, devices that are waited for.

    Raises:
        InputError: the cluster cannot seat the group, or other code runs there.
        RankError: a rank failed, and would again; all others have been ended.
        LostError: a worker, a host or the scheduler was lost, and did not come back.
        TimeLimitError: the stage's time is over.
    """
    with metrics_delivery(job.directory, job.tracking_uri, job.run_id, tell):
        outcomes, recovery = _group(job, address, on_progress, tell)
    return _merge(outcomes, recovery)


def measure_group(job: TrainJob, address: str, tell: Told = print) -> MeasureResult:
    """Have the group measure what `job.measurement` asks for, and return rank 0's result.

    Raises:
        InputError: the cluster cannot seat the group, or other code runs there.
        RankError: a rank failed, and would again; all others have been ended.
        LostError: a worker, a host or the scheduler was lost, and did not come back.
    """
    assert job.measurement is not None
    outcomes, _ = _group(job, address, None, tell)
    return MeasureResult.model_validate(outcomes[0].result)


def time_layers(job: TrainJob, address: str, tell: Told = print) -> AutotuneResult:
    """Have the group time the layers of the job's network, and return what rank 0 found.

    Raises:
        InputError: the cluster cannot seat the group, or other code runs there.
        RankError: a rank failed, and would again; all others have been ended.
        LostError: a worker, a host or the scheduler was lost, and did not come back.
    """
    outcomes, _ = _group(job.model_copy(update={"measurement": Measurement(arms={})}), address, None, tell)
    return AutotuneResult.model_validate(outcomes[0].result)


def _group(job: TrainJob, address: str, on_progress: Progress | None, tell: Told) -> tuple[list[RankOutcome], Recovery]:
    recovery = Recovery(job.checkpoints, job.config.execution.max_restarts, tell)
    attempts = _Attempts(job, recovery, tell)
    while True:
        try:
            with ExitStack() as stack:
                client, seats = recovery.wait_for_cluster(partial(attempts.seated, stack, address))
                stack.enter_context(_progress(client, job.run_id, attempts.note, on_progress))
                return attempts.next(client, seats), recovery
        except (RankError, LostError) as error:
            if attempts.shrinks(error) or attempts.measures_less(error):
                recovery.restart_with_new_group(str(error), attempts.num_ranks, attempts.steps_done)
            else:
                recovery.judge(error, attempts.num_ranks, attempts.steps_done)
        except _RegroupError as reason:
            recovery.restart_with_new_group(str(reason), attempts.num_ranks, attempts.steps_done)
        except _ReseatError:
            tell("Another device is free now: taking that one")


class _RegroupError(Exception):
    """More workers are there than the group has."""


class _ReseatError(Exception):
    """A group waits for a device that is another's, and others are free."""


class _Attempts:
    """Attempts at a job, one after the other."""

    def __init__(self, job: TrainJob, recovery: Recovery, tell: Told) -> None:
        self._job = job.model_copy(update={"plan": restore_micro_batch(job.directory, job.plan, job.config)})
        self._asked = job.config
        self._recovery = recovery
        self._tell = tell
        self._resume = job.resume
        self._first = 1 + max(attempts(job.directory), default=-1)
        self._number = self._first
        self._next_look = 0.0
        self._epochs_kept: int | None = None
        """Epochs that are over and in a checkpoint, as rank 0 tells."""
        self._more_since: int | None = None
        """How many those were when more workers were seen than the group has."""
        self.num_ranks = 0
        """Of the last attempt."""
        self.steps_done = 0
        """Of the last attempt, counted from the training's first step."""

    def seated(self, stack: ExitStack, address: str) -> tuple[Client, list[Placement]]:
        """A connection, left with `stack`, and the seats found over it."""
        self.num_ranks, self.steps_done, self._epochs_kept, self._more_since = 0, 0, None, None
        with ExitStack() as connection:
            client = connection.enter_context(connect(address))
            fewest = None if self._recovery.waits_for_all() else self._job.config.cluster.min_workers
            find = partial(find_placements, client, self._job.config, self._job.plan.accelerator, fewest)
            seats = connection.enter_context(reserve(find))
            stack.push(connection.pop_all())
        return client, seats

    def next(self, client: Client, seats: list[Placement]) -> list[RankOutcome]:
        """Have a group claim its devices, start it and stay to its end."""
        job = self._job
        self.num_ranks = len(seats)
        if self.num_ranks < job.config.execution.world_size:
            self._tell(_with_fewer(job.config, self.num_ranks))
        gang = RankGroup(client, job.run_id, seats, self._tell)
        try:
            resume_from = newest_verified(job.checkpoints) if self._resume else None
            gang.claim(partial(self._look_for_free, client, seats))
            specs = _specs(client, job, seats, self._number, resume_from)
            known = {
                "probe": self._left_by(ProbeResult, PROBE_FILE),
                "search": self._left_by(AutotuneResult, SEARCH_FILE) or job.search,
                "may_search": job.may_search and self._number == self._first,
            }
            self._resume = True  # whatever comes, the next attempt goes on from what this one leaves
            self._number += 1
            _make_room(Path(specs[0].directory))
            gang.start([spec.model_copy(update=known) for spec in specs])
            self._recovery.begun(step_of(resume_from) if resume_from else 0)
            return gang.watch(lambda: self._regroup_with_more(client))
        finally:
            self.steps_done = gang.steps_done
            gang.end()

    def shrinks(self, error: RankError | LostError) -> bool:
        """Whether the next attempt takes fewer samples at once, because a pass of the last one did not fit.

        Raises:
            RankError: it did not, and nothing can be done about it here.
        """
        plan = (
            with_smaller_micro_batch(self._job.plan, self._job.config, error) if isinstance(error, RankError) else None
        )
        if plan is None:
            return False
        save_micro_batch(self._job.directory, plan)
        self._job = self._job.model_copy(update={"plan": plan, "config": self._asked})
        choice = plan.reasons["micro_batch"]
        self._tell(f"{choice.reason}; going on with passes of {choice.value}, on the same batches")
        return True

    def measures_less(self, error: RankError | LostError) -> bool:
        """Whether the next attempt leaves out what the last one had no memory for beside the training."""
        if not isinstance(error, RankError) or error.oom_stage is None:
            return False
        if error.oom_stage == "probe":
            config = self._job.config
            speedup = config.speedup.model_copy(update={"baseline": "none", "diagnose": False})
            self._job = self._job.model_copy(update={"config": config.model_copy(update={"speedup": speedup})})
        self._tell(f"There is no memory for the {error.oom_stage} beside the training; going on without")
        return True  # a search is for first attempts alone

    def note(self, facts: dict[str, Any]) -> None:
        """Rank 0's progress."""
        self._epochs_kept = facts["epochs_kept"]

    def _look_for_free(self, client: Client, seats: list[Placement], held: list[Placement]) -> None:
        """Give up waiting for a device once there are as many as the group has that nobody uses.

        Such as where a worker that was lost has come back, while its training waits in line at another one's.

        Raises:
            _ReseatError: there are.
        """
        devices = {(seat.host, seat.device) for seat in held}
        is_whole = len(seats) == self._job.config.execution.world_size
        if is_whole and has_free_devices(client, self._job.config, self._job.plan.accelerator, devices):
            raise _ReseatError

    def _regroup_with_more(self, client: Client) -> None:
        """End a group that is smaller than asked for, once more workers are there and an epoch has ended since.

        Raises:
            _RegroupError: it is time.
        """
        is_whole = self.num_ranks == self._job.config.execution.world_size
        if is_whole or self._epochs_kept is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        if self._epochs_kept >= self._job.config.recipe.num_epochs:
            return
        if self._more_since is not None and self._epochs_kept > self._more_since:
            raise _RegroupError("more workers are there")
        if self._more_since is None and can_add_ranks(
            client, self._job.config, self._job.plan.accelerator, self.num_ranks
        ):
            self._more_since = self._epochs_kept

    def _left_by(self, kind: type[R], name: str) -> R | None:
        """What an attempt before has measured, so that a restart does not measure again."""
        for number in range(self._first, self._number):
            path = self._job.directory / f"attempt-{number}" / "rank-0" / name
            if path.exists():
                return kind.model_validate_json(path.read_text(encoding="utf-8"))
        return None


def _with_fewer(config: Config, num_ranks: int) -> str:
    whole = config.execution.world_size
    told = f"Going on with {num_ranks} of {whole} ranks until more are there"
    if config.recipe.batch_scaling == "strong":
        return f"{told}, on the same batches"
    return (
        f"{told}, on batches of {config.batch_size_over(num_ranks)} samples instead of "
        f"{config.batch_size_over(whole)}, at {num_ranks}/{whole} of the learning rate"
    )


def _specs(
    client: Client, job: TrainJob, seats: list[Placement], attempt: int, resume_from: Path | None
) -> list[RankSpec]:
    requests: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [(seats[0].worker, free_port, ())]
    requests += [(seat.worker, interface_of, (seat.host,)) for seat in seats]
    port, *interfaces = call_workers(client, requests, ANSWER_SECONDS)
    lost = next((answer for answer in (port, *interfaces) if isinstance(answer, BaseException)), None)
    if lost is not None:
        raise LostError(f"a worker does not answer: {lost}")
    strategy = "single" if len(seats) == 1 else job.plan.strategy
    plan = job.plan.model_copy(update={"world_size": len(seats), "strategy": strategy})
    return [
        RankSpec(
            config=job.config,
            plan=plan,
            prepared=job.prepared,
            pretrained=job.pretrained,
            run_id=job.run_id,
            directory=str(job.directory / f"attempt-{attempt}" / f"rank-{seat.rank}"),
            checkpoint_directory=str(job.checkpoints),
            resume_from=str(resume_from) if resume_from else None,
            rank=seat.rank,
            local_rank=seat.local_rank,
            node_rank=seat.node_rank,
            world_size=len(seats),
            num_nodes=seats[-1].node_rank + 1,
            num_devices=seats[-1].local_rank + 1,
            master_address=seats[0].host,
            master_port=port,
            interface=interface,
            devices=devices_on_host(seat, seats) if job.plan.accelerator == "gpu" else (),
            measurement=job.measurement,
            coordinator=(host_identity(), os.getpid()),
            code_fingerprint=code_fingerprint(),
            packages=tuple(package.identity for package in job.config.packages),
            compile_cache=str(
                job.directory / f"attempt-{attempt}" / f"rank-{seat.rank}" / "compiled"
                if job.cold_compile
                else Path(job.home) / "compiled"
            ),
        )
        for seat, interface in zip(seats, interfaces, strict=True)
    ]


def _make_room(directory: Path) -> None:
    """Make a rank's file of metrics: a name that another host makes may be seen here half a minute later."""
    with suppress(OSError):  # the rank tells what is wrong there
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).touch()


@contextmanager
def _progress(client: Client, run_id: str, *listeners: Progress | None) -> Iterator[None]:
    def tell_all(event: tuple[float, dict[str, Any]]) -> None:
        for listener in listeners:
            if listener is not None:
                listener(event[1])

    topic = progress_topic(run_id)
    client.subscribe_topic(topic, tell_all)
    try:
        yield
    finally:
        with suppress(Exception):  # of a scheduler that is gone; what ended the body is the error to tell
            client.unsubscribe_topic(topic)


def _merge(outcomes: list[RankOutcome], recovery: Recovery) -> TrainResult:
    """Rank 0's result with what concerns all ranks, and the wall time seen from outside, lost attempts included."""
    results = [outcome.result or {} for outcome in outcomes]
    merged = results[0] | {"restarts": recovery.restarts}
    merged["wall_seconds"] = outcomes[0].wall_seconds + recovery.lost_seconds
    if recovery.restarts:
        merged["time_budget"] = merged["time_budget"] | {"recovery": recovery.lost_seconds}
    merged["peak_memory_bytes"] = max(result["peak_memory_bytes"] for result in results)
    energies = [result["energy_joules"] for result, outcome in zip(results, outcomes, strict=True) if outcome.is_first]
    merged["energy_joules"] = None if None in energies else sum(energies)
    for name in ("predictions", "hosts", "devices"):
        merged[name] = [entry for result in results for entry in result[name]]
    return TrainResult.model_validate(merged)
