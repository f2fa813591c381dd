"""A search for the commit that made a program slower: worktrees, series of rounds, a run in MLflow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.conf.environment import Environment
from paceline.flows.judge import FOLDER, RUN, record_judgement
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.judge.bisection import Bisection, Search
from paceline.tasks.judge.records import Question
from paceline.tasks.judge.worktrees import list_commits, open_worktrees
from paceline.tasks.names import JUDGEMENT_EXPERIMENT, Tag
from paceline.tasks.track.store import check_store


@contextmanager
def bisect_commits(
    site: Environment, question: Question, recorded: tuple[float, float] | None, note: Callable[[str], None]
) -> Iterator[Bisection]:
    """Search from the revision of the old side to that of the new one, and record the search; its value.

    `recorded` are seconds of both sides, measured earlier. A signal after the decision waits for the body's end.
    """
    place, revisions = question.old.directory, (str(question.old.revision), str(question.new.revision))
    commits = list_commits(*revisions, place)
    experiment_id = check_store(site.tracking_uri, JUDGEMENT_EXPERIMENT, site.artifact_root)
    with open_worktrees(question.old.command, place, site.root / FOLDER, defer_signals) as add:
        sides = {"old": add("good", revisions[0]), "new": add("bad", revisions[1])}
        found = Search(question.model_copy(update=sides), commits, add, recorded, note, RUN).search()
        with defer_signals():
            yield record_judgement(site, experiment_id, {Tag.ROLE: "bisect"}, found)
