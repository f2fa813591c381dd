import stat
from pathlib import Path

import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.files import private_directory
from paceline.tasks.predict import predictor
from paceline.tasks.predict.job import Settings
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
