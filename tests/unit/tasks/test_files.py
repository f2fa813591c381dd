"""Files that only this user writes, and results that are not to be found out again."""

import stat
from pathlib import Path

import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.files import load_result, private_directory, save_result
from paceline.tasks.predict import predictor
from paceline.tasks.predict.job import Settings
from paceline.tasks.records.record import Choice
from paceline.tasks.records.training import Restart
from tests.support.refusals import refused


def test_it_is_this_users_alone(tmp_path):
    directory = private_directory(tmp_path / "deep" / "compiled")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert private_directory(tmp_path / "deep" / "compiled") == directory


def planted(parent: Path, how: str) -> None:
    place = private_directory(parent)
    if how == "writable":
        place.chmod(0o770)
    elif how == "link":
        place.rmdir()
        (parent / "elsewhere").mkdir()
        place.symlink_to(parent / "elsewhere")
    else:
        place.rmdir()
        place.touch(mode=0o600)


@pytest.mark.parametrize("how", ["writable", "link", "file"])
def test_a_planted_one_is_refused_before_any_library_in_it_is_loaded(tmp_path, how):
    planted(tmp_path, how)
    with refused(None, tmp_path, "PACELINE_HOME", kind=RunError):
        private_directory(tmp_path)
    settings = Settings(
        model_directory="", model_digest="", precision="32-true", gpu=False, num_threads=1, batch_size=1
    )
    with refused(None, "PACELINE_HOME", kind=RunError):
        predictor._package(settings, tmp_path)


def test_a_result_counts_as_long_as_its_files_are_what_they_were(tmp_path):
    result, place = Choice(value=2, reason="told"), tmp_path / "kept.json"
    files = [str(tmp_path / name) for name in ("a", "b")]
    for file in files:
        Path(file).write_text(file)
    assert load_result(place, Choice) is None
    save_result(place, result, files)
    assert load_result(place, Choice) == result
    assert load_result(place, Choice, files[::-1]) == result
    assert load_result(place, Choice, files[:1]) is None, "it is of other files"
    assert load_result(place, Restart) is None, "it is of another version"
    Path(files[0]).write_text("changed")
    assert load_result(place, Choice) is None
