"""A script in `paceline watch` finds what it finds under Python; of several ranks, the first one reports."""

import json
import os
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
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a process group of another test replaces it
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


LOOP = """
import torch
weight = torch.ones(4, 1, requires_grad=True)
for (inputs,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(80, 4)), 4):
    (inputs @ weight).sum().backward()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_of_several_ranks_reports(watch, tmp_path, monkeypatch, rank):
    for name, value in {"WORLD_SIZE": "2", "RANK": str(rank), "PACELINE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(LOOP)
    status, stdout, stderr = watch("train.py", replay="replay-json")
    assert status == 0
    if rank == 0:
        (account,) = json.loads(stdout)["accounts"]
        assert (account["num_steps"], account["why_not_measured"]) == (20, "the training has several ranks")
        assert "Paceline: train.py, 20 steps" in stderr
    else:
        assert (stdout, stderr, (tmp_path / "mlflow.db").exists()) == ("", "", False)


def test_ranks_of_one_launcher_are_one_training():
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2000"}
    other = group | {"MASTER_PORT": "2001", "RANK": "1"}
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [
        subprocess.Popen(sleep, env=os.environ | variables, stdout=subprocess.PIPE)
        for variables in (group | {"RANK": "1"}, other, {})
    ]
    try:
        for process in processes:
            process.stdout.readline()
        code = "import os; from paceline.tasks.watch.ranks import own_pids; print(os.getpid(), *own_pids())"
        outputs = [
            subprocess.run([sys.executable, "-c", code], env=os.environ | variables, stdout=subprocess.PIPE, check=True)
            for variables in (group | {"RANK": "0"}, {})
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    (own, *found), (alone, *nothing) = ([int(word) for word in done.stdout.split()] for done in outputs)
    assert found == [own, processes[0].pid]
    assert nothing == [alone]
