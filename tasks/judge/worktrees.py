"""Two revisions of a git repository as sides, each in a worktree that is removed afterwards."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.judge.ledger import Base
from paceline.tasks.judge.records import Side

LETTERS = 12  # of a commit's name


@contextmanager
def check_out(old: str, new: str, command: str, directory: str, folder: Path) -> Iterator[tuple[Side, Side, Base]]:
    """The same command at two revisions, in the place of `directory` in a worktree below `folder`; and the base.

    Raises InputError: the directory is in no repository, has uncommitted changes, or a revision does not exist.
    """
    root, _, inside = _git(directory, "rev-parse", "--show-toplevel", "--show-prefix").partition("\n")
    if changed := _git(directory, "status", "--porcelain", "--untracked-files=no").splitlines():
        names = ", ".join(line[3:] for line in changed[:3])
        fault = f"{root} has uncommitted changes, which neither revision has ({names})"
        raise InputError(fault, hint=f"git -C {root} stash", setting="--new")
    sides, commits = [], []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="worktrees-", dir=folder, ignore_cleanup_errors=True) as place:
        try:
            for name, revision in (("old", old), ("new", new)):
                wanted = "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
                commit = _git(directory, *wanted, wrong=f"--{name} {revision}")
                _git(directory, "worktree", "add", "--quiet", "--detach", f"{place}/{name}", commit)
                side = {"name": name, "command": command, "directory": f"{place}/{name}/{inside}"}
                sides.append(Side.model_validate(side | {"revision": f"{revision} ({commit[:LETTERS]})"}))
                commits.append(commit)
            yield sides[0], sides[1], Base(command=command, directory=str(Path(root) / inside), commit=commits[0])
        finally:
            for name in ("old", "new"):
                if Path(place, name).exists():
                    _git(directory, "worktree", "remove", "--force", "--force", f"{place}/{name}")


def _git(directory: str, *arguments: str, wrong: str | None = None) -> str:
    try:
        done = subprocess.run(["git", "-C", directory, *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError("revisions need git, which is not installed", hint="give two commands in quotes") from error
    if done.returncode != 0 and wrong is not None:
        raise InputError(f"{wrong} is not a revision of the repository of {directory}", hint="git branch --all")
    if done.returncode != 0:
        fault = f"git {arguments[0]} fails in {directory} ({one_line(OSError(done.stderr))[:200]})"
        raise InputError(fault, hint="give two commands in quotes, or change to a repository of git", setting="--old")
    return done.stdout.rstrip()
