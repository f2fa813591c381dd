"""Revisions of a git repository as sides, each in a worktree that is removed afterwards."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import exclusive
from paceline.tasks.judge.ledger import Base
from paceline.tasks.judge.records import Commit, Defer, Side, SideName

LETTERS = 12  # of a commit's name
PREFIX, LOCK = "worktrees-", "lock"  # of a directory with worktrees; the file in it that its process locks


@contextmanager
def check_out(
    old: str, new: str, command: str, directory: str, folder: Path, defer: Defer = nullcontext
) -> Iterator[tuple[Side, Side, Base]]:
    """The same command at two revisions, in the place of `directory` in a worktree below `folder`; and the base.

    Raises InputError: the directory is in no repository, has uncommitted changes, or a revision does not exist or has
    no such directory.
    """
    root, inside = _locate(directory, "--old")
    if changed := _git(directory, "status", "--porcelain", "--untracked-files=no").splitlines():
        names = ", ".join(line[3:] for line in changed[:3])
        fault = f"{root} has uncommitted changes, which neither revision has ({names})"
        raise InputError(fault, hint=f"git -C {root} stash", setting="--new")
    with open_worktrees(command, directory, folder, defer) as add:
        sides = add("old", old), add("new", new)
        commit = resolve_revision("old", old, directory)
        yield *sides, Base(command=command, directory=str(Path(root) / inside), commit=commit)


@contextmanager
def open_worktrees(
    command: str, directory: str, folder: Path, defer: Defer = nullcontext
) -> Iterator[Callable[[SideName, str], Side]]:
    """A function that makes the command at a revision a side, in place of the side that had this name before.

    Worktrees that a killed process has left in the folder are removed. `defer` delays a signal until git is done. The
    function raises InputError: the revision does not exist, or does not have the directory.
    """
    root, inside = _locate(directory, "--old")
    with scratch_directory(folder, defer) as place:

        def add(name: SideName, revision: str) -> Side:
            commit = resolve_revision(name, revision, directory)
            with defer():
                _remove_worktrees(place, name)
                _git(directory, "worktree", "add", "--quiet", "--force", "--detach", f"{place}/{name}", commit)
            at = Path(place, name, inside)
            if not at.is_dir():
                raise InputError(f"--{name} {revision} has no directory {inside}", hint=f"cd {root}")
            label = commit[:LETTERS] if revision == commit else f"{revision} ({commit[:LETTERS]})"
            return Side(name=name, command=command, directory=str(at), revision=label)

        yield add


@contextmanager
def scratch_directory(folder: Path, defer: Defer = nullcontext) -> Iterator[Path]:
    """A directory below a folder; afterwards it is removed with all worktrees in it, as are those of killed processes.

    `defer` delays a signal until git is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), exclusive(left / LOCK):  # refused as long as its process lives
            _remove_worktrees(left)
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as made:
        place = Path(made)
        (place / LOCK).touch()
        with exclusive(place / LOCK):
            try:
                yield place
            finally:
                with defer():
                    _remove_worktrees(place)


def resolve_revision(name: str, revision: str, directory: str) -> str:
    """The commit of a revision that the option `--name` gives; InputError if there is none."""
    wanted = "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    return _git(directory, *wanted, wrong=f"--{name} {revision}")


def list_commits(good: str, bad: str, directory: str) -> list[Commit]:
    """The commits from a good revision to a bad one, first parents that descend from the good one; both ends included.

    Raises InputError: the directory is in no repository, or a revision does not exist or is not before the other.
    """
    _locate(directory, "--good")
    first, last = (resolve_revision(*each, directory) for each in (("good", good), ("bad", bad)))
    if first == last:
        raise InputError(f"--bad {bad} is the same commit as --good {good}", hint=f"--good {bad}~1")
    span = f"{first}..{last}"
    descendants = set(_git(directory, "rev-list", "--ancestry-path", span).splitlines())
    if not descendants:
        raise InputError(
            f"--good {good} is not an ancestor of --bad {bad}", hint=f"--good $(git merge-base {good} {bad})"
        )
    # Both options in one call lose a merge whose second parent descends from the good one (git 2.39).
    show = "log", "--no-show-signature", "--format=%H %s"
    lines = _git(directory, *show, "--reverse", "--first-parent", span).splitlines()
    lines = [line for line in lines if line[: len(last)] in descendants]
    lines.insert(0, _git(directory, *show, "--max-count=1", first))
    return [Commit(name=line[: len(last)], subject=line[len(last) + 1 :]) for line in lines]


def _locate(directory: str, setting: str) -> tuple[str, str]:
    """The root of a directory's repository, and the path from there."""
    root, _, inside = _git(directory, "rev-parse", "--show-toplevel", "--show-prefix", setting=setting).partition("\n")
    return root, inside


def _remove_worktrees(place: Path, name: str = "*") -> None:
    """Remove worktrees from their repository, whichever that is; what git refuses is removed as a directory."""
    for path in [path for path in place.glob(name) if path.is_dir()]:
        with suppress(InputError):
            _git(str(path), "worktree", "remove", "--force", "--force", str(path))
        shutil.rmtree(path, ignore_errors=True)


def _git(directory: str, *arguments: str, wrong: str | None = None, setting: str = "--old") -> str:
    try:
        # In a session of its own, which Ctrl-C at a terminal does not reach.
        command = ["git", "-C", directory, *arguments]
        done = subprocess.run(command, capture_output=True, errors="replace", check=False, start_new_session=True)
    except OSError as error:
        raise InputError("revisions need git, which is not installed", hint="install git") from error
    if done.returncode != 0 and wrong is not None:
        raise InputError(f"{wrong} is not a revision of the repository of {directory}", hint="git branch --all")
    if done.returncode != 0:
        fault = f"git {arguments[0]} fails in {directory} ({one_line(OSError(done.stderr))[:200]})"
        raise InputError(fault, hint="change to a repository of git", setting=setting)
    return done.stdout.rstrip()
