"""`paceline evidence` as a user calls it."""

import json

import pytest

from paceline.flows import cli
from paceline.tasks.speedup.evidence.archive import pack
from tests.support.evidence import SimulatedProbe, evidence_of

RUN_ID = 32 * "a"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def store(home):
    """Stores evidence in the directory of a run; returns the archive."""

    def keep(**fields):
        _, files = evidence_of(*SimulatedProbe({"baseline": 0.1, "candidate": 0.06}).measure(), **fields)
        directory = home / "runs" / RUN_ID
        directory.mkdir(parents=True)
        (directory / "evidence.tar").write_bytes(pack(files))
        return pack(files)

    return keep


def test_evidence_is_written_and_checked(store, tmp_path, capfd):
    content = store()
    assert cli.main(["evidence", RUN_ID, "-o", "run.tar", "--json"]) == 0
    outcome = json.loads(capfd.readouterr().out)
    assert (tmp_path / "run.tar").read_bytes() == content
    assert outcome["num_bytes"] == len(content)
    assert cli.main(["evidence", "--check", "run.tar"]) == 0
    printed = dict(line.split() for line in capfd.readouterr().err.splitlines() if line.startswith("speedup."))
    assert float(printed["speedup.ratio"]) == pytest.approx(outcome["figures"]["speedup.ratio"], rel=1e-5)
    assert cli.main(["evidence", RUN_ID]) == 0
    assert (tmp_path / f"{RUN_ID}.tar").read_bytes() == content


def test_evidence_of_a_disturbed_run_is_not_written(store, tmp_path, capfd):
    store(contaminated=True)
    assert cli.main(["evidence", RUN_ID, "-o", "run.tar", "--json"]) == 2
    streams = capfd.readouterr()
    assert not (tmp_path / "run.tar").exists()
    assert json.loads(streams.out)["hint"] == "repeat the run on a quiet machine"
    assert "the machine was disturbed" in streams.err
    assert "speedup.ratio" not in streams.out + streams.err


def test_a_changed_archive_gives_no_number(store, tmp_path, capfd):
    changed = bytearray(store())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "run.tar").write_bytes(changed)
    assert cli.main(["evidence", "--check", "run.tar"]) == 2
    streams = capfd.readouterr()
    assert streams.out == ""
    fault, hint = streams.err.splitlines()
    assert fault.startswith("error: run.tar")
    assert hint == "hint: write it again with: paceline evidence RUN_ID -o FILE"


@pytest.mark.parametrize(
    ("arguments", "fault", "hint"),
    [
        ([], "paceline evidence needs RUN_ID, or --check FILE", "for example: paceline evidence RUN_ID -o run.tar"),
        ([RUN_ID, "--check", "run.tar"], "paceline evidence needs RUN_ID, or --check FILE", "for example"),
        (["--check", "nowhere.tar"], "--check nowhere.tar: No such file or directory", "name a file"),
        ([RUN_ID, "-o", "nowhere/run.tar"], "--output nowhere/run.tar: No such file or directory", "name a file"),
    ],
)
def test_wrong_input(arguments, fault, hint, store, capfd):
    store()
    assert cli.main(["evidence", *arguments]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"error: {fault}"
    assert lines[1].startswith(f"hint: {hint}")
