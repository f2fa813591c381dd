"""Packages of an earlier run: from a wheel of its version, from its commit, or named as missing."""

import os
import subprocess
import sys

import pytest

from paceline.conf.plugins import find
from paceline.tasks import deadline
from paceline.tasks.errors import TimeLimitError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.track.environment import package_versions
from paceline.tasks.track.rebuild import UNAVAILABLE, package_commits, rebuild
from tests.support.own_package import on_path
from tests.support.wheels import write_wheel

MODEL = "def build(**shape):\n    return {version}\n"
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme"
version = "1.0"
[project.entry-points."paceline.models"]
tiny = "acme:build"
[tool.setuptools]
py-modules = ["acme"]
"""


def wheel(folder, version):
    """Write a wheel of the package."""
    write_wheel(folder, "acme", version, MODEL.format(version=version), "[paceline.models]\ntiny = acme:build\n")


def pip(site, *arguments):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", site]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


def git(place, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", place, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Wheels come from a folder alone."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's negation: without isolation
    return tmp_path / "wheels"


def record(*identities, **facts):
    versions = package_versions()
    return {"versions": versions, "code": code_fingerprint(), "packages": list(identities)} | facts


def test_nothing_is_rebuilt_where_nothing_differs(tmp_path):
    old = rebuild(record(), (), tmp_path / "old")
    assert (old.path, old.packages, old.identities, old.missing) == ("", (), (), ())
    assert not (tmp_path / "old").exists()


def test_what_cannot_be_installed_is_named(tmp_path):
    versions = package_versions() | {"torch": "0.0.1", "numpy": "evil @ https://example.org", "python": "3.1"}
    old = rebuild(record(versions=versions | {"mlflow": "1.0"}, code="0" * 12), (), tmp_path / "old")
    assert old.path == ""
    python, torch, numpy, code = old.missing
    assert python == f"python 3.1 ({UNAVAILABLE})"
    assert torch.startswith("torch 0.0.1 (ERROR: Could not find a version that satisfies")
    assert numpy == f"numpy evil @ https://example.org ({UNAVAILABLE})", "no address of the record is ever installed"
    assert code == f"Paceline's own code {'0' * 12} ({UNAVAILABLE})"


def test_an_earlier_version_is_rebuilt_from_its_wheel(tmp_path, offline):
    identities = []
    for version in ("1.0", "2.0"):
        wheel(offline, version)
        pip(tmp_path / "site", f"acme=={version}")
        with on_path(tmp_path / "site"):
            identities.append(find("model", "tiny").identity)
    with on_path(tmp_path / "site"):
        now = find("model", "tiny")
        old = rebuild(record(identities[0]), (now,), tmp_path / "old")
        assert old.missing == ()
        assert old.identities == (identities[0],)
        assert [(each.name, each.before, each.now) for each in old.packages] == [("acme", *identities)]
        assert old.path == str(tmp_path / "old" / "acme")
        assert "return 1.0" in (tmp_path / "old" / "acme" / "acme.py").read_text()
        today = old.without({"acme"})
        assert (today.path, today.identities) == ("", (identities[1],))


def test_an_earlier_commit_is_rebuilt_from_the_repository_of_today(tmp_path):
    source = tmp_path / "source" / "acme"
    source.mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    git(source.parent, "init", "--quiet")
    found = []
    for version in ("1", "2"):
        (source / "acme.py").write_text(MODEL.format(version=version))
        git(source.parent, "add", "acme/pyproject.toml", "acme/acme.py")
        git(source.parent, "commit", "--quiet", "-m", version)
        pip(tmp_path / "site", source)
        with on_path(tmp_path / "site"):
            now = find("model", "tiny")
            found.append((now.identity, package_commits((now,))))
    (before, commits), (after, _) = found
    assert commits == {"acme": git(source.parent, "rev-parse", "HEAD~1")}
    with on_path(tmp_path / "site"):
        old = rebuild(record(before, commits=commits), (now,), tmp_path / "old")
        assert (old.identities, old.missing) == ((before,), ())
        assert "return 1" in (tmp_path / "old" / "acme" / "acme.py").read_text()
        (source / "acme.py").write_text(MODEL.format(version="3"))
        assert package_commits((now,)) == {"acme": None}, "changes that are not committed cannot be rebuilt"
        old = rebuild(record(before, commits={"acme": "--option"}), (now,), tmp_path / "none")
        assert (old.path, old.missing) == ("", (f"{before} ({UNAVAILABLE})",))
        assert old.identities == (after,)


def test_the_time_limit_ends_an_installation(tmp_path):
    versions = package_versions() | {"torch": "0.0.1"}
    with pytest.raises(TimeLimitError), deadline.time_limit("track.confirm_seconds", 0.05):
        rebuild(record(versions=versions), (), tmp_path / "old")
