"""A judgement: checks, rounds of both sides, the ledger, a run in MLflow."""

import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import TypeVar

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.errors import one_line
from paceline.tasks.fingerprint import configuration_fingerprint
from paceline.tasks.judge.bisection import Bisection
from paceline.tasks.judge.data_check import refuse_changed_data
from paceline.tasks.judge.decision import first_look
from paceline.tasks.judge.ledger import Base, Candidate, Ledger, open_ledger, read_ledger
from paceline.tasks.judge.processes import run_process
from paceline.tasks.judge.records import ORDERS, Judgement, ProcessRun, Question, Side, SideName
from paceline.tasks.judge.rounds import Run, judge_sides
from paceline.tasks.judge.worktrees import check_out
from paceline.tasks.names import JUDGEMENT_EXPERIMENT, Artifact, Metric, Tag
from paceline.tasks.redact import redact
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store

FOLDER = "judge"  # of the ledgers, in the state directory
RUN = partial(run_process, defer=defer_signals)
Recorded = TypeVar("Recorded", Judgement, Bisection)


def judge_commands(site: Environment, question: Question, ledger_name: str | None) -> AbstractContextManager[Judgement]:
    """Judge two commands, and record the judgement; its value. A signal after the decision waits for the body's end.

    What is stopped or fails before the first look counts nothing, and later as an unfinished candidate.
    """
    base = Base(command=question.old.command, directory=question.old.directory)
    return _judge(site, question, base, ledger_name, refuse_changed_data(RUN, (question.old, question.new)))


def judge_settings(
    site: Environment, question: Question, old: Config, ledger_name: str | None
) -> AbstractContextManager[Judgement]:
    """Judge two settings of a training, each side by `paceline run`, as `judge_commands` judges two commands.

    The processes of a round have one seed and those of the next round another: what a seed does to the metric falls on
    both sides alike. The first one is drawn, so that no two judgements of a ledger rest on the same seeds.
    """
    base = Base(command=f"{question.old.label} ({configuration_fingerprint(old)})", directory=question.old.directory)
    seed_name = "seed_everything" if old.lightning.settings else "seed"
    first, numbers = secrets.randbelow(2**31), itertools.count(-2)  # two processes come before the first round

    def run(side: Side, question: Question) -> ProcessRun:
        seed = first + max(0, next(numbers)) // len(ORDERS[0])
        return RUN(side.model_copy(update={"command": f"{side.command} {seed_name}={seed}"}), question)

    return _judge(site, question, base, ledger_name, run)


@contextmanager
def judge_revisions(site: Environment, question: Question, ledger_name: str | None) -> Iterator[Judgement]:
    """Judge the command of the old side at the revisions of both, as `judge_commands` judges two commands."""
    revisions, place = (str(question.old.revision), str(question.new.revision)), question.old.directory
    with (
        check_out(*revisions, question.old.command, place, site.root / FOLDER, defer_signals) as (old, new, base),
        _judge(
            site,
            question.model_copy(update={"old": old, "new": new}),
            base,
            ledger_name,
            refuse_changed_data(RUN, (old, new)),
        ) as judgement,
    ):
        yield judgement


@contextmanager
def _judge(site: Environment, question: Question, base: Base, ledger_name: str | None, run: Run) -> Iterator[Judgement]:
    """Judge, and record the judgement; runs that its processes leave in MLflow are nested in its run."""
    run_ids = list[str]()

    def run_noted(side: Side, question: Question) -> ProcessRun:
        found = run(side, question)
        run_ids.extend([found.run_id] if found.run_id else [])
        return found

    experiment_id = check_store(site.tracking_uri, JUDGEMENT_EXPERIMENT, site.artifact_root)
    started = datetime.now(UTC)
    with open_ledger(site.root / FOLDER, base, ledger_name) as (ledger, put):
        candidate = Candidate(
            number=len(ledger.candidates) + 1,
            time=started.isoformat(timespec="seconds"),
            command=question.new.label,
            level=ledger.next_level,
        )
        decision, rounds = judge_sides(question, candidate.level, lambda: put(candidate), run_noted)

        def typical(name: SideName) -> float | None:
            seconds = [run.seconds for each in rounds if not each.contaminated for run in each.of(name)]
            return median(seconds) if seconds else None

        judgement = Judgement(
            **dict(decision),
            old=question.old.label,
            new=question.new.label,
            ledger=ledger.name,
            candidate=candidate.number,
            level=candidate.level,
            seconds=(datetime.now(UTC) - started).total_seconds(),
            old_seconds=typical("old"),
            new_seconds=typical("new"),
            is_training=question.rate_key is not None,
            rounds=rounds,
        )
        is_counted = judgement.num_rounds >= first_look(candidate.level)  # with fewer, no look could decide
        with defer_signals():
            if is_counted:
                candidate = candidate.model_copy(update={"outcome": judgement.outcome, "ratio": judgement.ratio})
                put(candidate)
            tags = {Tag.ROLE: "judge", Tag.PARITY: judgement.parity, Tag.LEDGER: judgement.ledger}
            judgement = record_judgement(site, experiment_id, tags, judgement, run_ids)
            if is_counted:
                put(candidate.model_copy(update={"run_id": judgement.run_id}))
            yield judgement


def ledgers(site: Environment, name: str | None) -> list[Ledger]:
    """The ledger of a name, or all."""
    return [read_ledger(path) for path in sorted((site.root / FOLDER).glob(f"{name or '*'}.json"))]


def record_judgement(
    site: Environment, experiment_id: str, tags: dict[str, str], judgement: Recorded, run_ids: Sequence[str] = ()
) -> Recorded:
    """Record a judgement as a run; return it with the run's id, or as it is and a warning if MLflow fails."""
    from prefect.logging import get_logger

    from paceline.flows.lifecycle.mlflow_run import ends_with_status
    from paceline.flows.lifecycle.mlflow_views import log_report
    from paceline.tasks.report.judgement_report import draw_judgement, render_judgement

    tags |= {Tag.JUDGEMENT: judgement.outcome, Tag.VERDICT: judgement.reason}
    name = redact(judgement.new)[:80]
    metrics: dict[str, float | None] = {Metric.WALL_SECONDS: judgement.seconds, Metric.JUDGEMENT_LEVEL: judgement.level}
    if ratio := judgement.ratio:
        metrics |= {Metric.SPEEDUP: ratio.value, Metric.SPEEDUP_LOW: ratio.low, Metric.SPEEDUP_HIGH: ratio.high}
    try:
        handle = tracking.begin_named(site.tracking_uri, JUDGEMENT_EXPERIMENT, experiment_id, name, tags)
        recorded = judgement.model_copy(update={"run_id": handle.run_id, "experiment": JUDGEMENT_EXPERIMENT})
        with ends_with_status(handle, ""):
            tracking.log_facts(handle, metrics, {})
            tracking.log_document(handle, Artifact.SUMMARY, recorded.model_dump(mode="json"))
            for run_id in run_ids:
                tracking.set_tags(handle.model_copy(update={"run_id": run_id}), {Tag.PARENT: handle.run_id})
            if isinstance(recorded, Judgement):
                figures = draw_judgement(recorded)
                log_report(handle, render_judgement(recorded, figures), figures)
    except Exception as error:  # noqa: BLE001  hours of measurement are not lost because of the store or a picture
        get_logger("paceline").warning("MLflow did not take the judgement (%s)", one_line(error))
        return judgement
    return recorded
