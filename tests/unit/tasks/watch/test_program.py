"""A script in `paceline watch` finds what it finds under Python."""

import subprocess
import sys

import pytest

from paceline.tasks.watch import program


@pytest.fixture
def watch(monkeypatch, tmp_path, capsys):
    """Runs a script as `paceline watch` does, in this process; returns its status, stdout and stderr."""

    def run(script, *arguments, replay="replay"):
        for name in ("path", "meta_path"):
            monkeypatch.setattr(sys, name, list(getattr(sys, name)))
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        monkeypatch.setattr(program.card, "finished", [])
        status = program.main(replay, script, *arguments)
        return status, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("place", ["deep/train.py", "./deep/train.py", "deep/../deep/train.py"])
def test_a_relative_script_has_an_absolute_place(watch, tmp_path, place):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "print(__file__, sys.argv, Path(__file__).parents[1])\nprint(sys._getframe().f_code.co_filename)\n1 / 0\n"
    )
    plain = subprocess.run([sys.executable, place, "a"], capture_output=True, text=True, check=False)
    status, stdout, stderr = watch(place, "a")
    assert (status, stdout) == (1, plain.stdout)
    assert plain.stderr in stderr
    assert str(tmp_path) in stdout
