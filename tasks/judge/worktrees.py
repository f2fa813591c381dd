"""Two revisions of a git repository as sides, each in a worktree that is removed afterwards."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import exclusive
from paceline.tasks.judge.ledger import Base
from paceline.tasks.judge.records import Defer, Side, SideName

LETTERS = 12  # of a commit's name
PREFIX, LOCK = "worktrees-", "lock"  # of a directory with both worktrees; the file in it that its process locks
NAMES: tuple[SideName, ...] = ("old", "new")


@contextmanager
def check_out(
    old: str, new: str, command: str, directory: str, folder: Path, defer: Defer = nullcontext
) -> Iterator[tuple[Side, Side, Base]]:
    """The same command at two revisions, in the place of `directory` in a worktree below `folder`; and the base.

    Worktrees that a killed process has left in the folder are removed. `defer` delays a signal until git is done.

    Raises InputError: the directory is in no repository, has uncommitted changes, or a revision does not exist or has
    no such directory.
    """
    root, _, inside = _git(directory, "rev-parse", "--show-toplevel", "--show-prefix").partition("\n")
    if changed := _git(directory, "status", "--porcelain", "--untracked-files=no").splitlines():
        names = ", ".join(line[3:] for line in changed[:3])
        fault = f"{root} has uncommitted changes, which neither revision has ({names})"
        raise InputError(fault, hint=f"git -C {root} stash", setting="--new")
    sides, commits = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), exclusive(left / LOCK):  # refused as long as its process lives
            _remove_worktrees(left)
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as place:
        Path(place, LOCK).touch()
        with exclusive(Path(place, LOCK)):
            try:
                for name, revision in zip(NAMES, (old, new), strict=True):
                    wanted = "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
                    commit = _git(directory, *wanted, wrong=f"--{name} {revision}")
                    with defer():
                        _git(directory, "worktree", "add", "--quiet", "--detach", f"{place}/{name}", commit)
                    at = Path(place, name, inside)
                    if not at.is_dir():
                        raise InputError(f"--{name} {revision} has no directory {inside}", hint=f"cd {root}")
                    label = f"{revision} ({commit[:LETTERS]})"
                    sides.append(Side(name=name, command=command, directory=str(at), revision=label))
                    commits.append(commit)
                yield sides[0], sides[1], Base(command=command, directory=str(Path(root) / inside), commit=commits[0])
            finally:
                with defer():
                    _remove_worktrees(Path(place))


def _remove_worktrees(place: Path) -> None:
    """Remove both worktrees from their repository, whichever that is; what git refuses leaves with the directory."""
    for name in NAMES:
        with suppress(InputError):
            _git(f"{place}/{name}", "worktree", "remove", "--force", "--force", f"{place}/{name}")


def _git(directory: str, *arguments: str, wrong: str | None = None) -> str:
    try:
        # In a session of its own, which Ctrl-C at a terminal does not reach.
        command = ["git", "-C", directory, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    except OSError as error:
        raise InputError("revisions need git, which is not installed", hint="give two commands in quotes") from error
    if done.returncode != 0 and wrong is not None:
        raise InputError(f"{wrong} is not a revision of the repository of {directory}", hint="git branch --all")
    if done.returncode != 0:
        fault = f"git {arguments[0]} fails in {directory} ({one_line(OSError(done.stderr))[:200]})"
        raise InputError(fault, hint="give two commands in quotes, or change to a repository of git", setting="--old")
    return done.stdout.rstrip()
