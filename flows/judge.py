"""A judgement: checks, rounds of both sides, the ledger, a run in MLflow."""

from datetime import UTC, datetime
from statistics import median

from paceline.conf.environment import Environment
from paceline.tasks.judge.ledger import Base, Candidate, Ledger, base_of, open_ledger, read_ledger
from paceline.tasks.judge.records import Judgement, Question, SideName
from paceline.tasks.judge.rounds import judge_sides
from paceline.tasks.judge.worktrees import check_out
from paceline.tasks.names import JUDGEMENT_EXPERIMENT, Artifact, Metric, Tag
from paceline.tasks.redact import redact
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store

FOLDER = "judge"  # of the ledgers, in the state directory


def judge_commands(site: Environment, question: Question, ledger_name: str | None) -> Judgement:
    """Judge two commands, and record the judgement; an error or a signal records nothing."""
    return _judge(site, question, base_of(question.old.command, question.old.directory), ledger_name)


def judge_revisions(site: Environment, question: Question, ledger_name: str | None) -> Judgement:
    """Judge the command of the old side at the revisions of both, as `judge_commands` judges two commands."""
    revisions, place = (str(question.old.revision), str(question.new.revision)), question.old.directory
    with check_out(*revisions, question.old.command, place, site.root / FOLDER) as (old, new, base):
        return _judge(site, question.model_copy(update={"old": old, "new": new}), base, ledger_name)


def _judge(site: Environment, question: Question, base: Base, ledger_name: str | None) -> Judgement:
    experiment_id = check_store(site.tracking_uri, JUDGEMENT_EXPERIMENT, site.artifact_root)
    started = datetime.now(UTC)
    with open_ledger(site.root / FOLDER, base, ledger_name) as (ledger, add):
        decision, rounds = judge_sides(question, ledger.next_level)
        valid = [each for each in rounds if not each.contaminated]

        def typical(name: SideName) -> float | None:
            return median(run.seconds for each in valid for run in each.of(name)) if valid else None

        judgement = Judgement(
            **dict(decision),
            old=question.old.label,
            new=question.new.label,
            ledger=ledger.name,
            candidate=len(ledger.candidates) + 1,
            level=ledger.next_level,
            seconds=(datetime.now(UTC) - started).total_seconds(),
            old_seconds=typical("old"),
            new_seconds=typical("new"),
            rounds=rounds,
        )
        judgement = _record(site, experiment_id, judgement)
        if valid:  # where no round counts, nothing was tested and no level spent
            add(
                Candidate(
                    number=judgement.candidate,
                    time=started.isoformat(timespec="seconds"),
                    command=judgement.new,
                    run_id=str(judgement.run_id),
                    **{name: getattr(judgement, name) for name in ("outcome", "ratio", "level")},
                )
            )
    return judgement


def ledgers(site: Environment, name: str | None) -> list[Ledger]:
    """The ledger of a name, or all."""
    return [read_ledger(path) for path in sorted((site.root / FOLDER).glob(f"{name or '*'}.json"))]


def _record(site: Environment, experiment_id: str, judgement: Judgement) -> Judgement:
    """Record a judgement as a run; return it with the run's id."""
    tags = {Tag.ROLE: "judge", Tag.JUDGEMENT: judgement.outcome, Tag.PARITY: judgement.parity}
    tags |= {Tag.VERDICT: judgement.reason, Tag.LEDGER: judgement.ledger}
    name = redact(judgement.new)[:80]
    handle = tracking.begin_named(site.tracking_uri, JUDGEMENT_EXPERIMENT, experiment_id, name, tags)
    judgement = judgement.model_copy(update={"run_id": handle.run_id, "experiment": JUDGEMENT_EXPERIMENT})
    metrics: dict[str, float | None] = {Metric.WALL_SECONDS: judgement.seconds, Metric.JUDGEMENT_LEVEL: judgement.level}
    if ratio := judgement.ratio:
        metrics |= {Metric.SPEEDUP: ratio.value, Metric.SPEEDUP_LOW: ratio.low, Metric.SPEEDUP_HIGH: ratio.high}
    tracking.log_facts(handle, metrics, {})
    tracking.log_document(handle, Artifact.SUMMARY, judgement.model_dump(mode="json"))
    tracking.finish(handle, "FINISHED")
    return judgement
