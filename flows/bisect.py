"""A search for the commit or the packages that made a program slower: series of rounds, and a run in MLflow."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from paceline.conf.environment import Environment
from paceline.flows.judge import FOLDER, RUN, record_judgement
from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.judge.bisection import Bisection, Search
from paceline.tasks.judge.data_check import refuse_changed_data
from paceline.tasks.judge.lock_files import install_versions, list_packages, side_with
from paceline.tasks.judge.minimal_set import Change, find_minimal_set
from paceline.tasks.judge.records import Question, Side, SideName
from paceline.tasks.judge.worktrees import list_commits, open_worktrees, scratch_directory
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
        run = refuse_changed_data(RUN, list(sides.values()))
        found = Search(question.model_copy(update=sides), commits, add, recorded, note, run).search()
        with defer_signals():
            yield record_judgement(site, experiment_id, {Tag.ROLE: "bisect"}, found)


@contextmanager
def bisect_packages(
    site: Environment, question: Question, recorded: tuple[float, float] | None, note: Callable[[str], None]
) -> Iterator[Bisection]:
    """Search the packages that differ between the lock files that are the revisions of both sides, as `bisect_commits`.

    The time for the search includes that of all searches for a minimal set, and not the installation.
    """
    side, files = question.old, (Path(str(question.old.revision)), Path(str(question.new.revision)))
    packages = list_packages(*files)
    experiment_id = check_store(site.tracking_uri, JUDGEMENT_EXPERIMENT, site.artifact_root)
    with scratch_directory(site.root / FOLDER, defer_signals) as place:
        note(f"installing both versions of {len(packages)} packages")
        install_versions(packages, side.command, place)

        def open_side(name: SideName, changed: Collection[Change]) -> Side:
            return side_with(name, side, packages, changed, place)

        names: tuple[SideName, ...] = ("good", "bad")
        run = refuse_changed_data(RUN, [side.model_copy(update={"name": name}) for name in names])
        start_search = partial(Search, recorded=recorded, note=note, run=run, what="package")
        found = find_minimal_set(packages, question, open_side, start_search)
        old, new = (f"{file}: {side.command}" for file in files)
        found = found.model_copy(update={"old": old, "new": new})
        with defer_signals():
            yield record_judgement(site, experiment_id, {Tag.ROLE: "bisect"}, found)
