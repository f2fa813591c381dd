"""Two revisions in worktrees of a real repository, which are gone afterwards."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.flows.lifecycle.signals import defer_signals
from paceline.tasks.judge import worktrees as module
from paceline.tasks.judge.worktrees import check_out, list_commits, open_worktrees
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


def test_a_second_interruption_waits_until_the_worktrees_are_removed(repository, tmp_path, monkeypatch):
    git, signals = module._git, [signal.SIGINT]

    def interrupt_once(directory, *arguments, **options):
        if "remove" in arguments and signals:
            signal.raise_signal(signals.pop())
        return git(directory, *arguments, **options)

    monkeypatch.setattr(module, "_git", interrupt_once)
    with (
        pytest.raises(KeyboardInterrupt),
        check_out("HEAD~1", "HEAD", "true", str(repository), tmp_path / "home", defer_signals),
    ):
        raise KeyboardInterrupt
    assert signals == []
    assert worktrees(repository) == 1


def test_a_broken_worktree_does_not_keep_the_other_one(repository, tmp_path):
    with check_out("HEAD~1", "HEAD", "true", str(repository), tmp_path / "home") as (old, _, _):
        Path(old.directory, ".git").write_text("broken")
    assert list((tmp_path / "home").iterdir()) == []
    assert worktrees(repository) == 2, "git removes its note of a worktree without a directory later"


KILLED = """
import os, sys
from pathlib import Path
from paceline.tasks.judge.worktrees import check_out
with check_out("HEAD~1", "HEAD", "true", sys.argv[1], Path(sys.argv[2])):
    os.kill(os.getpid(), 9)
"""


def test_worktrees_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(repository, tmp_path):
    home = tmp_path / "home"
    with check_out("HEAD~1", "HEAD", "true", str(repository), home) as (living, _, _):
        killed = subprocess.run([sys.executable, "-c", KILLED, repository, home], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert worktrees(repository) == 5
        with check_out("HEAD", "HEAD~1", "true", str(repository), home):
            assert worktrees(repository) == 5
        assert Path(living.directory, "inside", "train.py").exists()
    assert worktrees(repository) == 1
    assert list(home.iterdir()) == []


def test_a_revision_without_the_directory_is_refused(repository, tmp_path):
    later = repository / "later"
    later.mkdir()
    (later / "train.py").touch()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "three"], check=True)
    with refused("--old", "HEAD~1", "later/"), check_out("HEAD~1", "HEAD", "true", str(later), tmp_path / "home"):
        pass
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


def commit(repository, *messages):
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for message in messages:
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", message], check=True)


def test_commits_are_those_of_the_main_line(repository):
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "checkout", "--quiet", "-b", "side"], check=True)
    commit(repository, "side 1", "side 2")
    subprocess.run([*git, "checkout", "--quiet", "main"], check=True)
    commit(repository, "three")
    subprocess.run([*git, "merge", "--quiet", "--no-ff", "--message", "merge", "side"], check=True)
    commit(repository, "four")

    def subjects(good, bad):
        return [each.subject for each in list_commits(good, bad, str(repository))]

    assert subjects("main~4", "main") == ["one", "two", "three", "merge", "four"]
    assert subjects("side~1", "main") == ["side 1", "merge", "four"]
    assert subjects("main~1", "HEAD") == ["merge", "four"]
    for good, bad in (("main", "main~1"), ("side", "main~2")):
        with refused("--good", good, bad):
            subjects(good, bad)
    with refused("--bad", "HEAD"):
        subjects("main", "HEAD")
    with refused("--good", "nonsense"):
        subjects("nonsense", "HEAD")
    with refused("--bad", "nonsense"):
        subjects("HEAD", "nonsense")
    with refused("--good"):
        list_commits("main~1", "main", str(repository.parent))


def test_a_side_takes_the_place_of_the_one_before(repository, tmp_path):
    (repository / "inside" / "train.py").write_text("not committed, and in nobody's way")
    commits = list_commits("HEAD~1", "HEAD", str(repository))
    with open_worktrees("true", str(repository / "inside"), tmp_path / "home") as add:
        for each, text in zip(commits, ("one", "two"), strict=True):
            side = add("middle", each.name)
            assert (Path(side.directory, "train.py").read_text(), side.revision) == (text, each.name[:12])
            assert worktrees(repository) == 2
            assert not Path(side.directory, "built").exists()
            Path(side.directory, "built").touch()
            Path(side.directory, "train.py").write_text("changed by the program")
    assert worktrees(repository) == 1
    assert list((tmp_path / "home").iterdir()) == []
