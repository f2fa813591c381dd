"""One attempt of a group of ranks: all claim their devices, then all start, and the first failure ends all.

Claims are made one after the other in one order that all coordinators share (host, then device), so that two groups
that want the same devices run one after the other and never wait for each other. Knows what a rank is, not what it
computes, and nothing of what is done about a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.tasks import deadline
from paceline.tasks.cluster.client import workers
from paceline.tasks.errors import LostError, RankError
from paceline.tasks.train.launch.layout import Placement
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.launch.supervisor import (
    ClaimStatus,
    DeviceClaim,
    RankOutcome,
    claim_status,
    send_spec,
    supervise,
)
from paceline.tasks.train.rank_spec import RankSpec

if TYPE_CHECKING:
    from distributed import Client, Future
from paceline.tasks.cluster.client import call_workers

POLL_SECONDS = 0.25
ASK_SECONDS = 2.0
ANSWER_SECONDS = 3.0
"""A worker whose event loop takes longer to answer is asked again."""
SILENT_SECONDS = 12.0
"""A rank or worker without a sign of life for so long is lost. A beat comes every second."""
START_SECONDS = 120.0
"""Until a rank's first sign of life: its imports, on a cold disk."""
SETTLE_SECONDS = 0.6
"""For the peers' errors to arrive, so that the root cause can be told from its echoes."""
ECHO_SECONDS = 5.0
"""The same where there are only echoes: a worker's end is noticed later than its peers' broken connections."""
ABORT_SECONDS = 15.0
# Errors of ranks that only saw another one go; the root cause is the earliest error that is none of these.
ECHOES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connectfullmesh",
    "aborted",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "timed out",
    "timeout",
)

Told = Callable[[str], None]


class RankGroup:
    """The ranks of one attempt.

    Args:
        client: of the scheduler.
        run_id: whose ranks these are.
        seats: one for each rank, in the order of ranks.
        tell: takes a sentence for people.
    """

    def __init__(self, client: Client, run_id: str, seats: list[Placement], tell: Told) -> None:
        self._client = client
        self._run_id = run_id
        self._seats = seats
        self._tell = tell
        stamp = time.time_ns()
        self._keys = [f"rank-{seat.rank}-{run_id}-{stamp}" for seat in seats]
        self._futures: dict[int, Future[RankOutcome]] = {}
        self._heard = [time.monotonic()] * len(seats)
        self._next_look = 0.0
        self._told_waiting = ""
        self._is_started = False
        self._outcomes: dict[int, RankOutcome] = {}
        self.steps_done = 0
        """Largest number of steps that a rank has told."""

    def claim(self, waiting: Callable[[list[Placement]], None] = lambda held: None) -> None:
        """Hold all devices, waiting for those that are another's.

        Args:
            waiting: called every few seconds while a device is another's, with the seats whose devices are held; what
                it raises ends the claim.

        Raises:
            LostError: a worker has gone.
            TimeLimitError: the stage's time is over.
        """
        held: list[Placement] = []
        next_look = time.monotonic() + ASK_SECONDS
        for seat in sorted(self._seats, key=lambda seat: (seat.host, seat.device)):
            claim = DeviceClaim(key=self._keys[seat.rank], run_id=self._run_id, rank=seat.rank, device=seat.device)
            self._futures[seat.rank] = self._submit(claim, seat.worker)
            self._heard[seat.rank] = time.monotonic()
            while (found := self._reports()[seat.rank]).state != "held":
                deadline.check()
                self._check_futures()
                is_anothers = found.state == "waiting" or found.owner is not None
                if is_anothers and time.monotonic() > next_look:
                    next_look = time.monotonic() + ASK_SECONDS
                    waiting(held)
                time.sleep(POLL_SECONDS / 5)
            held.append(seat)

    def _submit(self, claim: DeviceClaim, worker: str) -> Future[RankOutcome]:
        try:
            return self._client.submit(
                supervise,
                claim.model_dump_json(),
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                retries=0,
                key=claim.key,
            )
        except Exception as error:
            raise LostError(f"the connection to the Dask scheduler is closed: {_said(error)}") from error

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Have every rank begin.

        Raises:
            LostError: a worker has gone.
        """
        self._is_started = True
        self._heard = [time.monotonic()] * len(self._seats)
        requests = [
            (seat.worker, send_spec, (self._keys[seat.rank], spec.model_dump_json()))
            for seat, spec in zip(self._seats, specs, strict=True)
        ]
        for seat, answer in zip(self._seats, call_workers(self._client, requests, ANSWER_SECONDS), strict=True):
            if isinstance(answer, BaseException):
                raise LostError(f"{_place(seat)} could not be told to start: {_said(answer)}")

    def watch(self, between: Callable[[], None] = lambda: None) -> list[RankOutcome]:
        """Stay until all ranks have ended.

        Args:
            between: called every few seconds; what it raises ends the watch.

        Raises:
            RankError: a rank failed; of several, the one that was not pulled down by another.
            LostError: a rank, worker or host is gone or silent.
            TimeLimitError: the stage's time is over.
        """
        next_ask = time.monotonic()
        while True:
            outcomes = self._finished()
            if any(outcome.error is not None for outcome in outcomes):
                raise self._root_cause()
            if len(outcomes) == len(self._seats):
                return sorted(outcomes, key=lambda outcome: outcome.rank)
            deadline.check()
            if time.monotonic() > next_ask:
                next_ask = time.monotonic() + ASK_SECONDS
                self._check_reports(self._reports())
                between()
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Cancel what still runs, and wait until no rank of the run is left on any host that answers."""
        futures = list(self._futures.values())
        if len(self._outcomes) == len(self._seats):
            return
        try:
            self._client.cancel(futures, force=True)
        except Exception:  # noqa: BLE001  the scheduler is gone, and supervisors notice; what ended the gang is the error
            return
        give_up = time.monotonic() + ABORT_SECONDS
        hosts = {seat.host: seat.worker for seat in self._seats}
        while hosts and time.monotonic() < give_up:
            requests = [(worker, running_ranks, (self._run_id,)) for worker in hosts.values()]
            found = dict(zip(hosts, call_workers(self._client, requests, ANSWER_SECONDS), strict=True))
            hosts = {host: worker for host, worker in hosts.items() if isinstance(found[host], list) and found[host]}
            time.sleep(POLL_SECONDS)

    # Watching

    def _reports(self) -> list[ClaimStatus]:
        """How each claim stands; `queued` for those that are not made yet or do not answer.

        Raises:
            LostError: one has not answered for too long.
        """
        self._check_workers()
        made = [seat for seat in self._seats if seat.rank in self._futures and not self._futures[seat.rank].done()]
        hopeful = ("running",) if self._is_started else ("queued", "waiting", "held", "running")
        requests = [(seat.worker, claim_status, (self._keys[seat.rank], seat.device)) for seat in made]
        answers = call_workers(self._client, requests, ANSWER_SECONDS)
        found = {seat.rank: ClaimStatus(state="queued") for seat in self._seats}
        for seat, answer in zip(made, answers, strict=True):
            if isinstance(answer, ClaimStatus):
                found[seat.rank] = answer
                self._tell_waiting(seat, answer)
            if isinstance(answer, ClaimStatus) and answer.state in hopeful:
                self._heard[seat.rank] = time.monotonic()
            elif time.monotonic() - self._heard[seat.rank] > SILENT_SECONDS:
                raise LostError(f"{_place(seat)} has not answered for {SILENT_SECONDS:.0f} s: {answer!r}")
        return [found[rank] for rank in range(len(self._seats))]

    def _tell_waiting(self, seat: Placement, answer: ClaimStatus) -> None:
        if answer.state in ("queued", "waiting") and answer.owner is not None:
            sentence = f"Waiting for {seat.device} on {seat.host}: rank {answer.owner.rank} of run "
            sentence += f"{answer.owner.run_id} uses it"
            if sentence != self._told_waiting:
                self._told_waiting = sentence
                self._tell(sentence)

    def _check_reports(self, reports: list[ClaimStatus]) -> None:
        for seat, found in zip(self._seats, reports, strict=True):
            self.steps_done = max(self.steps_done, found.step or 0)
            limit = SILENT_SECONDS if found.has_pulse else START_SECONDS
            if found.silent_seconds is not None and found.silent_seconds > limit:
                raise LostError(
                    f"rank {seat.rank} on {seat.host} has given no sign of life for {found.silent_seconds:.0f} s; "
                    f"its process is {found.process_status or 'gone'}"
                )

    def _check_workers(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 2 * ASK_SECONDS
        try:
            present = set(workers(self._client))
        except Exception as error:
            raise LostError(f"the Dask scheduler is gone: {_said(error)}") from error
        for seat in self._seats:
            if seat.worker not in present and seat.rank not in self._outcomes:
                raise LostError(f"{_place(seat)} is gone; look at the worker's log")

    def _root_cause(self) -> RankError:
        """The first error that is no echo of another's end, once it has had time to arrive.

        Raises:
            LostError: all are echoes: of a worker that has gone.
        """
        time.sleep(SETTLE_SECONDS)
        give_up = time.monotonic() + ECHO_SECONDS
        while True:
            failed = [outcome for outcome in self._finished() if outcome.error is not None]
            own = [outcome for outcome in failed if not _is_echo(outcome)]
            if own or time.monotonic() > give_up:
                break
            self._next_look = 0.0
            self._check_workers()
            time.sleep(POLL_SECONDS)
        # One that was killed has told no time: it went before those that noticed.
        first = min(own or failed, key=lambda outcome: outcome.failed_at or 0.0)
        said = f"rank {first.rank} failed: {first.error}"
        return RankError(
            said,
            first.rank,
            first.traceback,
            final=first.final,
            too_many=first.too_many,
            oom_stage=first.oom_stage,
        )

    def _check_futures(self) -> None:
        for rank, future in self._futures.items():
            if rank in self._outcomes:
                continue
            if future.status in ("error", "lost", "cancelled"):
                reason = future.exception(timeout=5) if future.status == "error" else "its worker or scheduler is gone"
                raise LostError(f"the supervisor of rank {rank} ended as {future.status}: {reason}")
            if future.status == "finished" and not self._is_started:
                raise LostError(f"the supervisor of rank {rank} ended before there was anything to run")

    def _finished(self) -> list[RankOutcome]:
        self._check_futures()
        for rank, future in self._futures.items():
            if rank not in self._outcomes and future.status == "finished":
                try:
                    self._outcomes[rank] = future.result(timeout=2 * ANSWER_SECONDS)
                except Exception as error:
                    raise LostError(f"rank {rank} has ended, and its worker went with the result: {error}") from error
        return list(self._outcomes.values())


def _place(seat: Placement) -> str:
    return f"Dask worker {seat.worker} of rank {seat.rank} on {seat.host}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()


def _is_echo(outcome: RankOutcome) -> bool:
    return any(echo in (outcome.error or "").lower() for echo in ECHOES)
