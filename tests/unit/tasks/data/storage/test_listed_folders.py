"""Listings of folders whose times have not changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.conf.data import Data
from paceline.tasks.data.listing import SampleListing
from paceline.tasks.data.sources import registry as source

LONG_AGO = 1_700_000_000.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "data"
    for name in ("a/1.png", "a/2.png", "a/deep/3.png", "b/1.png", "b/2.png", "b/notes.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    age(root)
    return root


def age(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        os.utime(folder, (LONG_AGO, LONG_AGO))


def listed(root: Path, *, trust: bool = True) -> SampleListing:
    return source.list_samples(Data(source="folder", root=str(root), trust_directory_times=trust))


def test_a_file_overwritten_in_place_is_noticed_unless_the_times_are_trusted(root: Path) -> None:
    before = listed(root)
    assert before.sha256 == listed(root, trust=False).sha256
    (root / "a/1.png").write_bytes(b"longer")
    assert listed(root).sha256 == before.sha256, "read again"
    assert listed(root).ignored == before.ignored == {".txt": 1}
    assert listed(root, trust=False).sha256 != before.sha256


def added(root: Path) -> None:
    (root / "a/deep/4.png").write_bytes(b"x")


def removed(root: Path) -> None:
    (root / "a/deep/3.png").unlink()


def replaced(root: Path) -> None:
    (root / "new").write_bytes(b"longer")
    (root / "new").replace(root / "a/1.png")


@pytest.mark.parametrize("change", [added, removed, replaced])
def test_a_change_of_a_name_is_noticed(root: Path, change: Callable[[Path], None]) -> None:
    listed(root)
    change(root)
    assert listed(root).sha256 == listed(root, trust=False).sha256


def test_a_folder_that_has_just_changed_is_listed_again(root: Path) -> None:
    os.utime(root / "a")
    before = listed(root)
    (root / "a/1.png").write_bytes(b"longer")
    assert listed(root).sha256 != before.sha256


def test_a_damaged_listing_is_not_used(root: Path, tmp_path: Path) -> None:
    before = listed(root)
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and len(path.name) > len("used")]
    assert len(entries) == len(["a", "b"])
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-1])
    assert listed(root).sha256 == before.sha256
