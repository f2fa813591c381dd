"""Backups that are cut, changed, of another version or of another host: named, and nothing is lost."""

import hashlib
import io
import json
import os
import random
import tarfile
from datetime import datetime
from pathlib import Path

import pytest

from infra.services import archive
from infra.services.__main__ import main
from infra.services.home import USUAL_PORTS, Settings
from paceline.tasks.errors import InputError
from tests.support.services import passable_directory

VERSIONS = {"prefect": "3.8.8", "mlflow": "3.17.2", "postgresql": "13"}


@pytest.fixture(scope="module")
def backup(services, tmp_path_factory):
    """A backup of services that run."""
    path = tmp_path_factory.mktemp("backups") / "paceline.tar"
    done = services.command("backup", path)
    assert done.returncode == 0, done.stderr
    return path


def made(path, *, members=(), **changes):
    """A backup with its digest, whose `about.json` has other facts."""
    about = {"format": archive.FORMAT, "paceline": "0.1.0", "host": os.uname().nodename, "versions": VERSIONS} | changes
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name, content in ((archive.ABOUT, json.dumps(about)), *members):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content.encode()))
        member = tarfile.TarInfo(archive.DIGEST)
        member.size = archive.DIGEST_BYTES
        file.addfile(member, io.BytesIO(hashlib.sha256(stream.getvalue()).hexdigest().encode()))
    path.write_bytes(stream.getvalue())
    return path


def test_a_backup_is_complete(backup, capsys):
    assert main(["restore", "--check", str(backup)]) == 0
    assert f"is complete; it is of host {os.uname().nodename}" in capsys.readouterr().err


def test_no_cut_of_a_backup_is_taken_for_a_backup(backup, tmp_path):
    content, cut = backup.read_bytes(), tmp_path / "cut.tar"
    with tarfile.open(backup) as file:
        edges = [place for member in file.getmembers() for place in (member.offset, member.offset_data)]
    sizes = {*edges, *random.Random(1).sample(range(len(content)), 100), len(content) - 1, len(content) - 512}
    for size in sizes:
        cut.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"is cut|is not a complete archive") as caught:
            archive.check(cut)
        assert str(cut) in str(caught.value)


def test_no_changed_byte_of_a_backup_is_overlooked(backup, tmp_path):
    content = backup.read_bytes()
    with tarfile.open(backup) as file:
        members = file.getmembers()
    for member in members:
        for place in (member.offset, member.offset_data):
            changed = bytearray(content)
            changed[place] ^= 1
            (tmp_path / "changed.tar").write_bytes(changed)
            with pytest.raises(InputError):
                archive.check(tmp_path / "changed.tar")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 1, "paceline": "0.0.9"}, "is of format 1 by Paceline 0.0.9"),
        ({"versions": VERSIONS | {"mlflow": "99.0"}}, "is of mlflow 99.0, and here is"),
        ({"versions": VERSIONS | {"postgresql": "99"}}, "is of postgresql 99, and here is"),
        ({"host": "elsewhere"}, "is of host elsewhere, and this is"),
        ({"surprise": 1}, "is not a complete archive"),
    ],
)
def test_another_backup_is_named_and_what_is_there_stays(tmp_path, capsys, changes, said):
    home = tmp_path / "services"
    (home / "secrets").mkdir(parents=True)
    (home / "secrets" / "one").write_text("kept")
    path = made(tmp_path / "a.tar", **changes)
    assert main(["restore", "--home", str(home), "--overwrite", str(path)]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert (error.startswith("error: "), hint.startswith("hint: ")) == (True, True)
    assert said in error
    assert (home / "secrets" / "one").read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".services.lock", "a.tar", "services"]


def test_a_backup_of_another_host_is_restored_when_that_is_meant(capsys):
    settings = Settings(host="10.99.99.99", ports=dict.fromkeys(USUAL_PORTS, 1)).model_dump_json()
    with passable_directory() as place:
        path = made(place / "a.tar", host="elsewhere", members=[("settings.json", settings)])
        assert main(["restore", "--home", str(place / "services"), "--other-host", str(path)]) == 2
        assert "postgres_password is missing" in capsys.readouterr().err, "it went on, to the secrets that it has not"
        assert sorted(each.name for each in place.iterdir()) == [".services.lock", "a.tar"]


def test_old_backups_go_and_others_stay(tmp_path):
    names = [f"paceline-2026110{day}T030000.tar" for day in range(1, 6)]
    for name in (*names, "mine.tar"):
        (tmp_path / name).touch()
    assert [path.name for path in archive.keep_newest(tmp_path, 2)] == names[:3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tar", *names[3:]]


@pytest.mark.parametrize(
    ("newest", "due"),
    [
        ("20261101T030000", "2026-11-02 03:00"),
        ("20261101T013000", "2026-11-01 03:00"),
        ("20261101T170000", "2026-11-02 03:00"),
    ],
)
def test_a_backup_is_due_once_a_night(tmp_path, newest, due):
    now = datetime(2026, 11, 20).astimezone()
    assert archive.next_night(tmp_path, 3, now) == now, "at once without any"
    (tmp_path / f"paceline-{newest}.tar").touch()
    assert archive.next_night(tmp_path, 3, now) == datetime.fromisoformat(due).astimezone()


def test_a_night_without_services_is_tried_again(tmp_path, monkeypatch, capsys):
    """As when the disk is full: the process of the backups stays."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(archive.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        main(
            ["backup", "--home", str(tmp_path / "services"), "--nightly", "3", "--keep", "2", str(tmp_path / "backups")]
        )
    assert capsys.readouterr().err.count("no backup was made, and Paceline tries again") == 2


def test_backups_of_a_directory_are_named_and_limited(services, tmp_path):
    (tmp_path / "paceline-20200101T030000.tar").touch()
    done = services.command("backup", "--keep", "1", tmp_path)
    assert done.returncode == 0, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("paceline-2")
    assert left.stat().st_size > 0
    assert archive.check(left).host == os.uname().nodename
    refused = services.command("backup", "--keep", "0", tmp_path)
    assert (refused.returncode, "--keep 0" in refused.stderr) == (2, True)
    assert Path(left).exists()
