"""A minimal set of changes that make a program slower together, by repeated bisection.

A minimal set of changes is found by repeated binary search, a variant of QuickXplain (Junker 2004, "QuickXplain:
preferred explanations and relaxations for over-constrained problems"). The changes are put in a fixed order. A
bisection finds the smallest k for which the program is slower with the first k changes. Change k belongs to the set,
because without it the program is not slower; the changes after it do not. If change k alone does not make the program
slower, the next bisection is over change k and then those before it, and so on. If one change is the cause, at most two
bisections are needed. The j-th bisection spends a 2^-j-th part of the level, so that all of them together err with at
most the level.
"""

from collections.abc import Callable, Collection, Sequence

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.judge.bisection import LEVEL, Bisection, Search
from paceline.tasks.judge.records import Commit, Question, Side, SideName
from paceline.tasks.records.record import Record

START = Commit(name="the good", subject="versions")


class Change(Record):
    """A difference between a fast program and a slow one, such as the version of a package."""

    name: str
    good: str | None  # in the fast one; None where it is absent
    bad: str | None

    @property
    def commit(self) -> Commit:
        """The change, in the form of a search."""
        return Commit(name=self.name, subject=f"{self.good or 'absent'} -> {self.bad or 'absent'}")


Group = tuple[Change, ...]
OpenSide = Callable[[SideName, Collection[Change]], Side]  # the program with these of the changes
StartSearch = Callable[..., Search]  # of `Search`, with the question, the commits, `open_side` and `level`


def commit_of(group: Group) -> Commit:
    """The changes of a group as one."""
    commits = [change.commit for change in group]
    return Commit(name=" and ".join(each.name for each in commits), subject=", ".join(each.subject for each in commits))


def find_minimal_set(
    changes: Sequence[Change], question: Question, open_side: OpenSide, start_search: StartSearch
) -> Bisection:
    """Find changes that make a program slower together, and of which none can be left out.

    All bisections share the budget of the question. Its sides are replaced.
    """
    searches = list[Bisection]()
    needed: Group = ()
    chain: list[Group] = [(change,) for change in changes]
    while True:
        left = question.budget_seconds - sum(each.seconds for each in searches)
        asked = question.model_copy(update={"budget_seconds": left})
        try:
            found = _search_chain(chain, asked, LEVEL / 2 ** (len(searches) + 1), open_side, start_search)
        except InputError as error:
            if not searches:
                raise
            return _conclude(searches, needed, chain, f"the set may not be minimal: {one_line(error)}")
        searches.append(found)
        names = [commit_of(group).name for group in chain]
        positions = [names.index(commit.name) for commit in found.commits]
        if found.outcome != "FOUND":
            return _conclude(searches, needed, [chain[position] for position in positions], found.reason)
        (position,) = positions
        is_sufficient = bool(needed) and position == 0
        before = chain[bool(needed) : position]
        needed = needed if is_sufficient else (*needed, *chain[position])
        if is_sufficient or not before:
            return _conclude(searches, needed)
        chain = [needed, *before]


def _search_chain(
    chain: Sequence[Group], question: Question, level: float, open_side: OpenSide, start_search: StartSearch
) -> Bisection:
    """Find the first group of a chain with which the program is slower, with all groups before it changed too."""
    commits = [START, *map(commit_of, chain)]
    names = [commit.name for commit in commits]

    def open_at(side: SideName, name: str) -> Side:
        return open_side(side, {change for group in chain[: names.index(name)] for change in group})

    sides = {"old": open_at("good", names[0]), "new": open_at("bad", names[-1])}
    return start_search(question.model_copy(update=sides), commits, open_at, level=level).search()


def _conclude(
    searches: Sequence[Bisection], needed: Group, others: Sequence[Group] = (), fault: str | None = None
) -> Bisection:
    """The outcome of all searches: the needed changes, and without a minimal set the others that may be, and why."""
    changes = dict.fromkeys([*needed, *(change for group in others for change in group)])
    commits = tuple(change.commit for change in changes)
    names, first, last = " and ".join(commit.label for commit in commits), searches[0], searches[-1]
    outcome, reason = last.outcome, fault
    if fault is None:
        how = "make it slower together, and none of them can be left out" if needed[1:] else "makes it slower"
        reason = f"{names} {how}"
    elif last.outcome == "FOUND" or len(searches) > 1:
        outcome = "UNDECIDED"
    whole = last if outcome == "FOUND" and not needed[1:] else first
    facts = {
        "outcome": outcome,
        "reason": reason,
        "commits": commits,
        "ratio": whole.ratio,
        "series": tuple(series for search in searches for series in search.series),
        "level": LEVEL,
        "seconds": sum(search.seconds for search in searches),
    }
    return first.model_copy(update=facts)
