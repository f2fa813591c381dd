"""An uninstallation leaves nothing behind, and removes nothing that is in use or of others."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.services.__main__ import main
from infra.services.daemon import MARK
from infra.services.home import USUAL_PORTS, Home, Settings
from infra.services.supervisor import MADE
from tests.support.services import Services, passable_directory


@pytest.fixture
def place(monkeypatch):
    """A directory for all that Paceline has on a host, with a unit of others."""
    with passable_directory() as directory:
        fill(directory)
        monkeypatch.setenv("PACELINE_HOME", str(directory / "paceline"))
        monkeypatch.setenv("PACELINE_LEASES", str(directory / "leases"))
        monkeypatch.setenv("PACELINE_CACHE", str(directory / "cache"))
        yield directory


def fill(place):
    (place / "units").mkdir()
    (place / "units" / "paceline-mlflow.service").write_text(f"# {MADE} --units.\n")
    (place / "units" / "paceline-other.service").write_text("# of another program\n")
    (place / "leases").mkdir()
    (place / "leases" / "cpu.lease").touch()
    for name in ("runs", "prepared", "judge", "services.before-20260101T000000"):
        (place / "paceline" / name).mkdir(parents=True)
    (place / "cache" / f"user-{os.geteuid()}").mkdir(parents=True)


def paths(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_nothing_is_removed_without_yes(place, capsys):
    before = paths(place)
    assert main(["uninstall", "--units", str(place / "units")]) == 0
    said = capsys.readouterr().err
    for name in ("units/paceline-mlflow.service", "leases/cpu.lease", "paceline/runs", f"cache/user-{os.geteuid()}"):
        assert f"would remove {place}/{name} (" in said
    assert "paceline-other" not in said
    assert "infra/uninstall --yes" in said
    assert set(paths(place)) - set(before) <= {"paceline/.services.lock"}


def test_what_is_in_use_is_not_removed(place, capsys):
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "paceline.tasks.train.rank.main"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert main(["uninstall", "--units", str(place / "units"), "--yes"]) == 2
        process.communicate()
    assert f"process {process.pid} (" in capsys.readouterr().err
    assert (place / "paceline" / "runs").exists()


@pytest.mark.parametrize("home", [Path.cwd(), Path.home(), Path("/")])
def test_no_directory_of_the_user_is_removed(place, capsys, monkeypatch, home):
    monkeypatch.setenv("PACELINE_HOME", str(home))
    assert main(["uninstall", "--home", str(place / "services"), "--units", str(place / "units"), "--yes"]) == 2
    assert "is or holds a directory of yours" in capsys.readouterr().err
    assert home.exists()


def test_what_is_not_of_paceline_stays(place, capsys):
    (place / "paceline" / "thesis").mkdir()
    assert main(["uninstall", "--units", str(place / "units"), "--yes"]) == 0
    assert paths(place) == ["paceline", "paceline/thesis", "units", "units/paceline-other.service"]
    assert f"remove by hand, if nobody else needs them: {place}/paceline" in capsys.readouterr().err


def test_backups_stay_and_are_named(place, capsys):
    backups = place / "backups"
    backups.mkdir()
    (backups / "paceline-20261101T030000.tar").touch()
    home = Home(place / "paceline" / "services")
    home.make()
    home.keep(Settings(ports=dict.fromkeys(USUAL_PORTS, 1), backups=str(backups)))
    for arguments in ([], ["--yes"]):
        assert main(["uninstall", "--units", str(place / "units"), *arguments]) == 0
        said = capsys.readouterr().err
        assert f"keeps {backups}: " in said
    assert f"remove by hand, if nobody else needs them: {backups}, " in said
    assert paths(place) == ["backups", "backups/paceline-20261101T030000.tar", "units", "units/paceline-other.service"]


@pytest.mark.slow
def test_nothing_is_left_after_an_uninstallation(place):
    services = Services(place / "paceline" / "services", num_workers=1)
    started = services.up()
    assert started.returncode == 0, started.stderr
    mark = f"{services.home.root}#"
    assert len(marked(mark)) >= 5
    done = services.command("uninstall", "--units", place / "units", "--yes")
    assert done.returncode == 0, done.stderr
    assert marked(mark) == []
    assert paths(place) == ["units", "units/paceline-other.service"]


def marked(mark):
    """Processes of a home, also those that another user runs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(mark):
                found.append(process)
    return found
