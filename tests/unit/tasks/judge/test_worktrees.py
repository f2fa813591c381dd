"""Two revisions in worktrees of a real repository, which are gone afterwards."""

import subprocess
from pathlib import Path

import pytest

from paceline.tasks.judge.worktrees import check_out
from tests.support.refusals import refused


@pytest.fixture
def repository(tmp_path):
    place = tmp_path / "repository"
    (place / "inside").mkdir(parents=True)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    for text in ("one", "two"):
        (place / "inside" / "train.py").write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", text], check=True)
    return place


def worktrees(repository):
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def test_each_side_has_its_revision(repository, tmp_path):
    inside, folder = str(repository / "inside"), tmp_path / "home"
    with check_out("main~1", "HEAD", "python train.py", inside, folder) as (old, new, base):
        assert [Path(side.directory, "train.py").read_text() for side in (old, new)] == ["one", "two"]
        assert worktrees(repository) == 3
        assert old.label.startswith("main~1 (")
        assert (base.command, Path(base.directory)) == ("python train.py", repository / "inside")
        assert base.commit[:12] in old.label
        Path(old.directory, "train.py").write_text("changed by the program")
    assert worktrees(repository) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("revisions", [("nonsense", "HEAD"), ("HEAD", "--help"), ("HEAD", "")])
def test_a_missing_revision_leaves_nothing(revisions, repository, tmp_path):
    wrong = "--old" if revisions[0] == "nonsense" else "--new"
    with refused(wrong), check_out(*revisions, "true", str(repository), tmp_path / "home"):
        pass
    assert worktrees(repository) == 1
    assert list((tmp_path / "home").iterdir()) == []


def test_an_interruption_leaves_nothing(repository, tmp_path):
    with pytest.raises(KeyboardInterrupt), check_out("HEAD~1", "HEAD", "true", str(repository), tmp_path / "home"):
        raise KeyboardInterrupt
    assert worktrees(repository) == 1


def test_changes_without_a_commit_are_refused(repository, tmp_path):
    (repository / "new.txt").write_text("not tracked, so no matter")
    with check_out("HEAD~1", "HEAD", "true", str(repository), tmp_path / "home"):
        pass
    (repository / "inside" / "train.py").write_text("three")
    with (
        refused("--new", "inside/train.py"),
        check_out("HEAD~1", "HEAD", "true", str(repository), tmp_path / "home"),
    ):
        pass


def test_a_directory_without_a_repository_is_refused(tmp_path):
    with refused("--old"), check_out("main", "HEAD", "true", str(tmp_path), tmp_path / "home"):
        pass
