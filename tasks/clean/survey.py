"""Items of the state directory that a clean-up may remove, each with the reason why it stays, if it does."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.tasks.data.prepare import store
from paceline.tasks.data.prepare.manifest import MANIFEST
from paceline.tasks.files import compiled_directory
from paceline.tasks.model_bundle import FACTS, WEIGHTS
from paceline.tasks.names import Tag
from paceline.tasks.records.record import Record
from paceline.tasks.track.queries import FoundRun, Inventory
from paceline.tasks.train.launch.run_lock import is_locked

Kind = Literal["prepared sets", "checkpoints", "weights", "compiled code", "damaged files", "logs"]
ASIDE = ".removed-"  # prefix of what a clean-up has set aside, to delete it
RESUMABLE = ("run", "study", "sweep", "no-gpu")  # roles of runs that `--resume` continues
PROCESS, UNFINISHED, UNKNOWN = "a running process", "an unfinished run", "a run that MLflow does not know"
DAY_SECONDS = 24 * 3600.0
LONG_LOG, LOG_END = 10 * 2**20, 2**20  # bytes of a log that is cut, and of its end, which stays


class Item(Record):
    """A file or directory that a clean-up may remove, or a long log, of which it leaves the end."""

    kind: Kind
    path: str
    num_bytes: int
    lock: str | None = None
    """File whose lock the removal needs; None without."""
    stays: str | None = None
    """Why it is not removed; None if it is."""


class _Group(NamedTuple):
    """A run with its arms or trials, as far as they have directories. They share one lock."""

    directories: tuple[Path, ...]
    lock: Path | None
    needed_by: str | None
    """What needs all of it."""
    is_recent: bool
    """Whether it is one of the newest trainings, of which only checkpoints are removed."""


def survey(home: Path, inventory: Inventory, keep: int, older_than: float) -> list[Item]:
    """Everything that may be removed: not what the `keep` newest trainings use, or what changed in `older_than` days.

    What needs no lock comes first, because its removal needs no space.
    """
    groups, recent = _groups(home, inventory, keep), f"one of the {keep} newest runs"
    busy = next((PROCESS for group in groups if group.needed_by == PROCESS), None)
    used = {name: group.needed_by or recent for group in groups for name in _names_used_by(group)}
    digests = {run.tags.get(Tag.MODEL_DIGEST): inventory.models.get(run.run_id) for run in inventory.runs}
    sources = {run.params.get("model.pretrained", "") for run in inventory.runs if _is_unfinished(run)}
    folders = {part for source in sources if ":/" not in source for part in Path(source).parts[:-1]}
    size = _Sizer(older_than)
    items = [*_damaged(size, home), *_logs(size, home, busy)]
    compiled = (path for path in _entries(home / "compiled") if path != compiled_directory(home))
    items += [size.item("compiled code", path, busy) for path in compiled]
    items += [item for group in groups for item in _of_group(size, group, recent, folders)]
    for path in _entries(home / "models"):
        needed_by = used.get(path.name) or digests.get(path.name)
        items.append(size.item("weights", path, needed_by, path / FACTS))
    items += [size.item("weights", path, used.get(path.name), path) for path in _entries(home / "pretrained")]
    sets = _entries(home / "prepared")
    return items + [size.item("prepared sets", path, used.get(path.name), path / MANIFEST) for path in sets]


@dataclass(frozen=True)
class _Sizer:
    """Makes items, with their sizes and ages."""

    older_than: float

    def item(
        self, kind: Kind, path: Path, needed_by: str | None = None, lock: Path | None = None, num_apart: int = 0
    ) -> Item:
        """The item of a path, without the `num_apart` bytes that other items have."""
        num_bytes, newest = -num_apart, 0.0
        for file in _files(path):
            with suppress(OSError):  # it was removed meanwhile
                status = file.lstat()
                num_bytes += status.st_blocks * 512
                newest = max(newest, status.st_mtime)
        stays = f"{needed_by} needs it" if needed_by else None
        if stays is None and newest > time.time() - self.older_than * DAY_SECONDS:
            stays = f"it changed in the last {self.older_than:g} days"
        name = str(lock) if lock is not None and lock.exists() else None
        return Item(kind=kind, path=str(path), num_bytes=max(0, num_bytes), lock=name, stays=stays)


def _files(path: Path) -> list[Path]:
    """The files below a directory, which may vanish meanwhile, or the file itself."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return files or [path]


def _entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*") if not path.name.startswith("."))


def _is_unfinished(run: FoundRun) -> bool:
    return run.status == "RUNNING" or (run.status != "FINISHED" and run.tags.get(Tag.ROLE) in RESUMABLE)


def _groups(home: Path, inventory: Inventory, keep: int) -> list[_Group]:
    runs = {run.run_id: run for run in inventory.runs}
    directories = defaultdict[str, list[Path]](list)
    for path in _entries(home / "runs"):
        owner = runs[path.name].tags.get(Tag.PARENT, path.name) if path.name in runs else path.name
        directories[owner if owner.isalnum() else path.name].append(path)  # everybody can write this tag
    trained = [run for run in runs if any((path / "attempt-0").exists() for path in directories.get(run, ()))]
    live = {record.name for record in (home / "flow-runs").glob("*/*") if is_locked(record)}
    groups = []
    for owner, paths in directories.items():
        run, directory = runs.get(owner), home / "runs" / owner
        models = (inventory.models.get(path.name, "") for path in paths)
        needed_by = next((model for model in models if "@" in model), None)
        if is_locked(directory) or (run is not None and run.tags.get("prefect.flow_run_id") in live):
            needed_by = PROCESS
        elif run is None:
            needed_by = None if owner in inventory.deleted else UNKNOWN
        elif _is_unfinished(run):
            needed_by = UNFINISHED
        lock = directory / "lock" if directory.exists() else None
        ordered = sorted(paths, key=directory.__eq__)  # the lock goes last
        groups.append(_Group(tuple(ordered), lock, needed_by, owner in trained[:keep]))
    return groups


def _names_used_by(group: _Group) -> Iterator[str]:
    """Names of the prepared sets and the weights that the trainings of a group use, if it stays."""
    if group.needed_by is None and not group.is_recent:
        return
    for path in (path for directory in group.directories for path in _files(directory) if path.name == "spec.json"):
        with suppress(OSError, ValueError):
            spec = json.loads(path.read_bytes())
            for place in (Path(spec[name]["path"]) for name in ("prepared", "pretrained") if spec.get(name)):
                yield place.parent.name if place.name == WEIGHTS else place.name


def _of_group(size: _Sizer, group: _Group, recent: str, sources: set[str]) -> Iterator[Item]:
    for directory in group.directories:
        needed_by = group.needed_by or (UNFINISHED if directory.name in sources else None)
        folders = (path for path in (directory / "checkpoints", directory / "measured") if path.is_dir())
        inside = [size.item("checkpoints", path, needed_by, group.lock) for path in folders]
        needed_by = needed_by or (recent if group.is_recent else None)
        weights = (path for path in _files(directory) if path.name == WEIGHTS)
        inside += [size.item("weights", path, needed_by, group.lock) for path in weights]
        num_apart = sum(item.num_bytes for item in inside)
        yield from [*inside, size.item("logs", directory, needed_by, group.lock, num_apart)]


def _damaged(size: _Sizer, home: Path) -> Iterator[Item]:
    """What failed its check, and what crashed processes left."""
    for place in (f"*/{ASIDE}*", f"runs/*/{ASIDE}*", "prepared/.damaged-*", "*.unfinished", "runs/*/*/*.damaged"):
        for name in iglob(place, root_dir=home):  # noqa: PTH207  Path.glob fails where a directory vanishes
            yield size.item("damaged files", home / name)
    for path in (home / "models").glob(".*"):  # of a process that was killed while it fetched a model
        if not path.name.startswith(ASIDE):
            yield _Sizer(1.0).item("damaged files", path)
    for path in store.find_stale(home):
        yield size.item("prepared sets", path)


def _logs(size: _Sizer, home: Path, busy: str | None) -> Iterator[Item]:
    for path in _entries(home / "slurm"):
        yield size.item("logs", path, busy)
    for path in (home / "services" / "logs").glob("*.log*"):
        if path.suffix != ".log":
            yield size.item("logs", path)
        elif path.stat().st_size > LONG_LOG:
            yield Item(kind="logs", path=str(path), num_bytes=path.stat().st_size - LOG_END)
