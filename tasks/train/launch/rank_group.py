"""One attempt of a group of ranks: all claim their devices, then all start, and the first failure stops all.

All claims are made at once. A group that must wait withdraws its claims behind the first missing device, in an order
that all coordinators share (host, then device), so that two groups that need the same devices run one after the other
without a deadlock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.tasks import deadline
from paceline.tasks.cluster.client import call_workers, fetch, workers
from paceline.tasks.errors import LostError, RankError
from paceline.tasks.train.launch.layout import Placement
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.launch.supervisor import ClaimStatus, RankOutcome, claim_status, send_spec, supervise
from paceline.tasks.train.rank_spec import RankSpec

if TYPE_CHECKING:
    from distributed import Client, Future

POLL_SECONDS = 0.25
ASK_SECONDS = 2.0
ANSWER_SECONDS = 3.0  # a request to a worker that takes longer is repeated
SILENT_SECONDS = 12.0  # a rank or worker without a heartbeat for so long is lost. A heartbeat comes every second.
MAX_STARTS = 1024  # ranks that are started before all are asked again; a message to each takes about two seconds
START_SECONDS = 120.0  # until a rank's first heartbeat: its imports, on a cold disk
SETTLE_SECONDS = 0.6
"""Time for the errors of all ranks to arrive, so that the root cause can be distinguished from its consequences."""
ECHO_SECONDS = 1.5  # the same where all are consequences, and every worker answers
PING_SECONDS = 2.0  # behind broken connections, a worker that takes longer to answer is their cause
ABORT_SECONDS = 15.0
MAX_NAMED = 8  # ranks in a message
# Errors of ranks that lost their connection to another; the root cause is the earliest other error.
ECHOES = (
    *("connection closed", "connection reset", "connection refused", "connectfullmesh", "aborted"),
    *("broken pipe", "remote process exited", "socket closed", "timed out", "timeout"),
)

logger = logging.getLogger(__name__)
_numbers = count()  # of claims: a claim that was withdrawn and is made again needs another key


class RankGroup:
    """The ranks of one attempt."""

    def __init__(self, client: Client, run_id: str, placements: list[Placement]) -> None:
        self._client, self._run_id, self._placements = client, run_id, placements
        self._keys = [""] * len(placements)
        self._futures: dict[int, Future[RankOutcome]] = {}
        self._last_answer = [time.monotonic()] * len(placements)
        self._next_look = 0.0
        self._waits: set[str] = set()
        self._reachable = {placement.worker for placement in placements}  # workers that are not known to be lost
        self._is_started = False
        self._outcomes: dict[int, RankOutcome] = {}
        self.steps_done = 0  # step that the furthest rank has reached
        self.failed_at: float | None = None  # monotonic time at which a rank's failure was noticed

    def claim(self, waiting: Callable[[list[Placement]], None] = lambda held: None) -> None:
        """Claim all devices, waiting for those in use. Raises LostError, TimeLimitError: as `watch`."""
        order = sorted(self._placements, key=lambda placement: (placement.host, placement.device))
        next_look, pause = 0.0, POLL_SECONDS / 5
        while True:
            started = time.monotonic()
            statuses = self._claim_statuses()
            states = [statuses[placement.rank].state for placement in order]
            held = order[: next((index for index, state in enumerate(states) if state != "held"), len(order))]
            if len(held) == len(order):
                return
            deadline.check()
            self._check_futures()
            if len(held) == len(self._futures):
                next_look = time.monotonic() + ASK_SECONDS
                for placement in order[len(held) :]:
                    self._submit(placement)
            elif time.monotonic() > next_look:
                next_look, pause = time.monotonic() + ASK_SECONDS, POLL_SECONDS
                self._withdraw(order[len(held) + 1 :])
                first = statuses[order[len(held)].rank]
                if first.state == "waiting" or first.owner is not None:
                    waiting(held)
            time.sleep(max(pause, time.monotonic() - started))

    def _submit(self, placement: Placement) -> None:
        self._keys[placement.rank] = key = f"rank-{placement.rank}-{self._run_id}-{time.time_ns()}-{next(_numbers)}"
        self._last_answer[placement.rank] = time.monotonic()
        claim = (key, self._run_id, placement.rank, placement.device)
        how: dict[str, Any] = {"key": key, "allow_other_workers": False, "pure": False, "retries": 0}
        try:
            self._futures[placement.rank] = self._client.submit(supervise, *claim, workers=[placement.worker], **how)
        except Exception as error:
            raise LostError(f"the connection to the Dask scheduler is closed: {_describe(error)}") from error

    def _withdraw(self, placements: Sequence[Placement]) -> None:
        """Release devices: a group that held them while it waits for others could wait for a group that needs them."""
        futures = [self._futures.pop(each.rank) for each in placements if each.rank in self._futures]
        if not futures:
            return
        try:
            self._client.cancel(futures, force=True)
        except Exception as error:
            raise LostError(f"the connection to the Dask scheduler is closed: {_describe(error)}") from error

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start every rank. Raises LostError: a worker is gone."""
        pairs = list(zip(self._placements, specs, strict=True))
        for first in range(0, len(pairs), MAX_STARTS):
            if first:
                self._claim_statuses()  # a supervisor that nobody asks takes this process for gone
            some = pairs[first : first + MAX_STARTS]
            requests = [
                (placement.worker, send_spec, (self._keys[placement.rank], spec.model_dump_json()))
                for placement, spec in some
            ]
            answers = call_workers(self._client, requests, ANSWER_SECONDS)
            for (placement, _), answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise self._lose(placement, f"cannot be reached to start: {_describe(answer)}")
        self._is_started = True
        self._last_answer = [time.monotonic()] * len(self._placements)

    def watch(self, between: Callable[[], None] = lambda: None) -> list[RankOutcome]:
        """Wait until all ranks have ended.

        Raises RankError: a rank failed, of several the root cause; LostError: a rank, worker or host is gone or silent;
        TimeLimitError: limits.train_seconds is over.
        """
        next_ask = time.monotonic()
        while True:
            outcomes = self._collect_outcomes()
            if any(outcome.error is not None for outcome in outcomes):
                self.failed_at = time.monotonic()
                raise self._root_cause()
            if len(outcomes) == len(self._placements):
                return sorted(outcomes, key=lambda outcome: outcome.rank)
            deadline.check()
            if time.monotonic() > next_ask:
                next_ask = time.monotonic() + ASK_SECONDS
                self._check_statuses(self._claim_statuses())
                between()
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Cancel the remaining ranks, and wait for their end on hosts that answer, for `ABORT_SECONDS` at most."""
        if len(self._outcomes) == len(self._placements):
            return
        try:
            self._client.cancel(list(self._futures.values()), force=True)
        except Exception:  # noqa: BLE001  the scheduler is gone, and supervisors notice; the group's own error matters
            return
        if self._client.status != "running":  # reconnecting: the same
            return
        give_up = time.monotonic() + ABORT_SECONDS
        hosts = {each.host: each.worker for each in self._placements if each.worker in self._reachable}
        while hosts and time.monotonic() < give_up:
            requests = [(worker, running_ranks, (self._run_id,)) for worker in hosts.values()]
            ranks = dict(zip(hosts, call_workers(self._client, requests, ANSWER_SECONDS, batched=True), strict=True))
            hosts = {host: worker for host, worker in hosts.items() if isinstance(ranks[host], list) and ranks[host]}
            time.sleep(POLL_SECONDS)

    def _claim_statuses(self) -> list[ClaimStatus]:
        """The status of each claim; `queued` for those that are not made yet or do not answer."""
        self._check_workers()
        waited_for = {rank for rank, future in self._futures.items() if not future.done()}
        made = [placement for placement in self._placements if placement.rank in waited_for]
        expected = ("running",) if self._is_started else ("queued", "waiting", "held", "running")
        requests = [(each.worker, claim_status, (self._keys[each.rank], each.device)) for each in made]
        answers = call_workers(self._client, requests, ANSWER_SECONDS, batched=True)
        statuses = [ClaimStatus(state="queued") for _ in self._placements]
        for placement, answer in zip(made, answers, strict=True):
            if isinstance(answer, ClaimStatus):
                statuses[placement.rank] = answer
                if answer.state in ("queued", "waiting") and (owner := answer.owner) is not None:
                    user = f"rank {owner.rank} of run {owner.run_id}"
                    line = f"Waiting for {placement.device} on {placement.host}: {user} uses it"
                    if line not in self._waits:
                        logger.warning(line)
                    self._waits.add(line)
            if isinstance(answer, ClaimStatus) and answer.state in expected:
                self._last_answer[placement.rank] = time.monotonic()
            elif time.monotonic() - self._last_answer[placement.rank] > SILENT_SECONDS:
                raise self._lose(placement, f"has not answered for {SILENT_SECONDS:.0f} s: {answer!r}")
        return statuses

    def _lose(self, placement: Placement, why: str) -> LostError:
        """The error of a lost worker, for which `end` does not wait."""
        self._reachable.discard(placement.worker)
        return LostError(f"{_describe_worker(placement)} {why}")

    def _check_statuses(self, statuses: list[ClaimStatus]) -> None:
        for placement, status in zip(self._placements, statuses, strict=True):
            self.steps_done = max(self.steps_done, status.step or 0)
            limit = SILENT_SECONDS if status.has_heartbeat else START_SECONDS
            if status.silent_seconds is not None and status.silent_seconds > limit:
                silence = f"has given no sign of life for {status.silent_seconds:.0f} s"
                state = f"its process is {status.process_status or 'gone'}"
                raise LostError(f"rank {placement.rank} on {placement.host} {silence}; {state}")

    def _check_workers(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 2 * ASK_SECONDS
        try:
            connected = set(workers(self._client))
        except Exception as error:
            self._reachable.clear()
            raise LostError(f"the Dask scheduler is gone: {_describe(error)}") from error
        self._reachable &= connected
        for placement in self._placements:
            if placement.worker not in connected and placement.rank not in self._outcomes:
                raise self._lose(placement, "is gone; look at the worker's log")

    def _find_silent(self) -> LostError | None:
        """The loss of a worker that does not answer, whose rank has not ended."""
        running = [each for each in self._placements if each.rank not in self._outcomes]
        requests = [(each.worker, os.getpid, ()) for each in running]
        answers = call_workers(self._client, requests, PING_SECONDS, batched=True)
        for placement, answer in zip(running, answers, strict=True):
            if isinstance(answer, BaseException):
                return self._lose(placement, f"does not answer: {_describe(answer)}")
        return None

    def _root_cause(self) -> RankError:
        """The first error that is not a consequence of another rank's end; where all are, the earliest of them.

        Raises LostError: a worker or the scheduler is gone, or a worker does not answer.
        """
        time.sleep(SETTLE_SECONDS)
        give_up, lost = time.monotonic() + ECHO_SECONDS, None
        while True:
            failed = [outcome for outcome in self._collect_outcomes() if outcome.error is not None]
            has_cause = not all(map(_is_echo, failed))
            if not has_cause and lost is not None:
                raise lost
            if has_cause or time.monotonic() > give_up:
                break
            self._next_look = 0.0
            self._check_workers()
            lost = self._find_silent()
            time.sleep(POLL_SECONDS)
        return name_cause(failed, len(self._placements))

    def _check_futures(self) -> None:
        for rank, future in self._futures.items():
            if rank in self._outcomes:
                continue
            if future.status in ("error", "lost", "cancelled"):
                reason = future.exception(timeout=5) if future.status == "error" else "its worker or scheduler is gone"
                raise LostError(f"the supervisor of rank {rank} ended as {future.status}: {reason}")
            if future.status == "finished" and not self._is_started:
                raise LostError(f"the supervisor of rank {rank} ended before there was anything to run")

    def _collect_outcomes(self) -> list[RankOutcome]:
        self._check_futures()
        done = [rank for rank, future in self._futures.items() if future.status == "finished"]
        if new := [rank for rank in done if rank not in self._outcomes]:
            try:
                outcomes = fetch(self._client, [self._futures[rank] for rank in new], 2 * ANSWER_SECONDS)
            except Exception as error:
                ended = ", ".join(map(str, new[:MAX_NAMED]))
                raise LostError(f"ranks {ended} have ended, and a worker went with its result: {error}") from error
            self._outcomes |= zip(new, outcomes, strict=True)
        return list(self._outcomes.values())


def _describe_worker(placement: Placement) -> str:
    return f"Dask worker {placement.worker} of rank {placement.rank} on {placement.host}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()


def name_cause(failed: Sequence[RankOutcome], num_ranks: int) -> RankError:
    """The earliest error that is not a consequence of another rank's end; where all may be, the earliest of them."""
    causes = [outcome for outcome in failed if not _is_echo(outcome)]
    # A killed rank has no time: it ended before those that noticed.
    first = min(causes or failed, key=lambda outcome: outcome.failed_at or 0.0)
    unsure = "; this may be a consequence of another rank's end, and no rank reports why that ended"
    text = f"rank {first.rank} failed: {first.error}{unsure if num_ranks > 1 and not causes else ''}"
    return RankError(text, first.rank, first.traceback, **first.causes)


def _is_echo(outcome: RankOutcome) -> bool:
    return any(echo in str(outcome.error).lower() for echo in ECHOES)
