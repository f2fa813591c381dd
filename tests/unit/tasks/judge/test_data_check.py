"""A side that changes the data that it reads is refused; what it adds is a result."""

import subprocess

import pytest

from paceline.tasks.judge.data_check import refuse_changed_data
from paceline.tasks.judge.records import ProcessRun, Question, Side
from tests.support.refusals import refused

DONE = ProcessRun(seconds=1.0)


@pytest.fixture
def place(tmp_path):
    """A directory of a repository with tracked files, a file of data beside it and a log of earlier runs."""
    directory = tmp_path / "code"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "tracked.csv").write_text("1")
    (directory / "train.log").write_text("before")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.bin").write_text("1")
    (directory / "link").symlink_to(tmp_path / "data")
    git = ["git", "-C", str(directory)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "sub", "link"], check=True)
    return directory


def first_process(place, command, change, others=()):
    """The first process of a side, by which the files are changed; the sides' commands follow those of `others`."""
    sides = [Side(name="new", command=command, directory=str(place))]
    sides += [Side(name="old", command=other, directory=str(place)) for other in others]

    def run(side, question):
        change()
        return DONE

    question = Question(old=sides[0], new=sides[0], budget_seconds=1.0, limit_seconds=1.0)
    checked = refuse_changed_data(run, sides)
    for side in sides:
        assert checked(side, question) == DONE
    return checked, sides[0], question


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("python train.py", "sub/tracked.csv"),
        ("(cd .. && cat ../data/part.bin#1 ../data/part.bin; true)", "../data/part.bin"),
        ("python train.py --data=../data/part.bin", "../data/part.bin"),
        ("python train.py train.log", "train.log"),
    ],
)
def test_a_changed_or_removed_file_is_named(command, path, place):
    for change in ((place / path).unlink, lambda: (place / path).write_text("12")):
        with refused("--new") as caught:
            first_process(place, command, change)
        assert (place / path).name in str(caught.value)
        (place / path).write_text("1")


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("python train.py ../data link", "../data/new.bin"),
        ("cd train.log && python train.py", "train.log"),
        ("(python train.py 2>&1)> train.log", "train.log"),
        ("python train.py >> train.log", "train.log"),
        ("python train.py | tee train.log", "train.log"),
        ("cc -o train.log a.c && ./train", "train.log"),
        ("python train.py --out=train.log", "train.log"),
        ("LOG=train.log python train.py $((n / 2))", "train.log"),
        ("make sub", "sub/new.o"),
        ("python train.py", "train.log"),
        ("python 'train.py train.log", "train.log"),
    ],
)
def test_what_is_no_data_may_change(command, path, place):
    first_process(place, command, lambda: (place / path).write_text("before and after"))


def test_a_tracked_file_may_be_written_again_with_its_content(place):
    first_process(place, "python train.py", lambda: (place / "sub" / "tracked.csv").write_text("1"))


def test_the_side_whose_process_changes_data_of_the_other_is_named(place):
    data = place.parent / "data" / "part.bin"
    with refused("--new"):
        first_process(place, "python train.py", lambda: data.write_text("12"), [f"python train.py {data}"])


def test_both_sides_may_write_the_same_result_and_later_processes_are_not_looked_at(place):
    result = place / "result.json"
    command = "python train.py result.json"
    checked, side, question = first_process(place, command, lambda: result.write_text("1"), [command])
    result.write_text("12")
    assert checked(side, question) == DONE
