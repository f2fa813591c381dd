"""Results of stages that are not to be found out again."""

from pathlib import Path

from paceline.tasks.records.record import Choice
from paceline.tasks.records.training import Restart
from paceline.tasks.result_cache import load_result, save_result


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
