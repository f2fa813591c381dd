"""Items of the state directory that a clean-up may remove, each with the reason why it stays, if it does."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
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
from paceline.tasks.train.launch.layout import KEPT_FOLDER
from paceline.tasks.train.launch.run_lock import is_locked
from paceline.tasks.train.lightning.code import FOLDER as CODE_FOLDER

Kind = Literal["prepared sets", "checkpoints", "weights", "compiled code", "searches", "damaged files", "logs"]
ASIDE = ".removed-"  # prefix of what a clean-up has set aside, to delete it
RESUMABLE = ("run", "study", "sweep", "no-gpu")  # roles of runs that `--resume` continues
PROCESS, UNFINISHED, UNKNOWN = "a running process", "an unfinished run", "a run that MLflow does not know"
KEPT = "a ModelCheckpoint of yours saved it"
SPEC_PLACES = ("prepared", "partitions", "pretrained")  # of a specification, with a path
DAY_SECONDS = 24 * 3600.0
SEARCH_DAYS = 30.0  # time after which an unused result of a search is removed: the next run would search again
LONG_LOG, LOG_END = 10 * 2**20, 2**20  # bytes of a log that is cut, and of its end, which stays


class Item(Record):
    """A file or directory that a clean-up may remove, or a long log, of which it leaves the end."""

    kind: Kind
    path: str
    num_bytes: int
    lock: str | None = None  # file whose lock the removal needs; None without
    stays: str | None = None  # why it is not removed; None if it is


class _Group(NamedTuple):
    """A run with its arms or trials, as far as they have directories. They share one lock."""

    directories: tuple[Path, ...]
    lock: Path | None
    needed_by: str | None  # what needs all of it
    is_recent: bool  # whether it is one of the newest trainings, of which only checkpoints are removed
    is_deleted: bool  # whether all its runs are deleted in MLflow


def survey(home: Path, inventory: Inventory, keep: int, older_than: float) -> list[Item]:
    """All that may be removed: not what the `keep` newest trainings use, or what changed in `older_than` days.

    Results of searches, and limits of devices, also stay for `SEARCH_DAYS` after their last use.
    """
    groups, recent = _groups(home, inventory, keep), f"one of the {keep} newest runs"
    busy = next((PROCESS for group in groups if group.needed_by == PROCESS), None)
    used = {name: group.needed_by or recent for group in groups for name in _names_used_by(group)}
    sources = {run.params.get("model.pretrained", "") for run in inventory.runs if _is_unfinished(run)}
    folders = {part for source in sources if ":/" not in source for part in Path(source).parts[:-1]}
    # What needs no lock comes first, because its removal needs no space.
    items = [*_damaged(home, older_than), *_logs(home, older_than, busy)]
    compiled = (path for path in _entries(home / "compiled") if path != compiled_directory(home))
    items += [_item("compiled code", path, older_than, busy) for path in compiled]
    items += [_item("searches", path, max(SEARCH_DAYS, older_than)) for path in _entries(home / "searches")]
    items += [item for group in groups for item in _of_group(group, older_than, recent, folders)]
    for path in _entries(home / "models"):
        needed_by = used.get(path.name) or inventory.digests.get(path.name)
        items.append(_item("weights", path, older_than, needed_by, path / FACTS))
    pretrained = _entries(home / "pretrained")
    items += [_item("weights", path, older_than, used.get(path.name), path) for path in pretrained]
    sets = _entries(home / "prepared")
    return items + [_item("prepared sets", path, older_than, used.get(path.name), path / MANIFEST) for path in sets]


def _item(
    kind: Kind, path: Path, days: float, needed_by: str | None = None, lock: Path | None = None, num_apart: int = 0
) -> Item:
    """The item of a path, with its size and age, without the `num_apart` bytes that other items have."""
    num_bytes, newest = -num_apart, 0.0
    for file in _files(path):
        with suppress(OSError):  # it was removed meanwhile
            status = file.lstat()
            num_bytes += status.st_blocks * 512
            newest = max(newest, status.st_mtime)
    stays = f"{needed_by} needs it" if needed_by else None
    if stays is None and newest > time.time() - days * DAY_SECONDS:
        stays = f"it changed in the last {days:g} days"
    name = str(lock) if lock is not None and lock.exists() else None
    return Item(kind=kind, path=str(path), num_bytes=max(0, num_bytes), lock=name, stays=stays)


def _files(path: Path) -> list[Path]:
    """The files below a directory, which may vanish meanwhile, or the file itself."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return files or [path]


def _own_files(directory: Path, name: str) -> list[Path]:
    """Files of a name in a run's directory, without those in the user's code or in what the user's callbacks keep."""
    users = ((CODE_FOLDER,), (KEPT_FOLDER,))
    found = (path for path in _files(directory) if path.name == name)
    return [path for path in found if path.relative_to(directory).parts[:1] not in users]


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
    predictions = (run for run in inventory.runs if Tag.MODEL in run.tags and is_locked(home / "runs" / run.run_id))
    predicted_with = {run.tags[Tag.MODEL] for run in predictions}  # they read its checkpoint and its code
    groups = []
    for owner, paths in directories.items():
        run, directory = runs.get(owner), home / "runs" / owner
        models = (inventory.models.get(path.name, "") for path in paths)
        needed_by = next((model for model in models if "@" in model), None)
        is_live = run is not None and run.tags.get("prefect.flow_run_id") in live
        if is_live or is_locked(directory) or not predicted_with.isdisjoint(path.name for path in paths):
            needed_by = PROCESS
        elif run is None:
            needed_by = needed_by or (None if owner in inventory.deleted else UNKNOWN)
        elif _is_unfinished(run):
            needed_by = UNFINISHED
        is_deleted = owner in inventory.deleted and runs.keys().isdisjoint(path.name for path in paths)
        lock = directory / "lock" if directory.exists() else None
        ordered = sorted(paths, key=directory.__eq__)  # the lock goes last
        groups.append(_Group(tuple(ordered), lock, needed_by, owner in trained[:keep], is_deleted))
    return groups


def _names_used_by(group: _Group) -> Iterator[str]:
    """Names of the prepared sets and the weights that the trainings of a group use, if it stays."""
    if group.needed_by is None and not group.is_recent:
        return
    for path in (path for directory in group.directories for path in _own_files(directory, "spec.json")):
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # it is gone or of another kind
            spec = json.loads(path.read_bytes())
            for place in (Path(spec[name]["path"]) for name in SPEC_PLACES if spec.get(name)):
                yield place.parent.name if place.name == WEIGHTS else place.name


def _of_group(group: _Group, older_than: float, recent: str, sources: set[str]) -> Iterator[Item]:
    for directory in group.directories:
        needed_by = group.needed_by or (UNFINISHED if directory.name in sources else None)
        folders = (path for path in (directory / "checkpoints", directory / "measured") if path.is_dir())
        inside = [_item("checkpoints", path, older_than, needed_by, group.lock) for path in folders]
        needed_by = needed_by or (recent if group.is_recent else None)
        weights = _own_files(directory, WEIGHTS)
        inside += [_item("weights", path, older_than, needed_by, group.lock) for path in weights]
        kept = directory / KEPT_FOLDER
        has_kept = any(names for _, _, names in os.walk(kept))
        if has_kept:
            item = _item("checkpoints", kept, older_than, needed_by, group.lock)
            inside.append(item if group.is_deleted else item.model_copy(update={"stays": item.stays or KEPT}))
        num_apart = sum(item.num_bytes for item in inside)
        rest = _item("logs", directory, older_than, needed_by, group.lock, num_apart)
        has_left = has_kept and not group.is_deleted and rest.stays is None
        yield from [*inside, *(_around(directory, inside, older_than, group.lock) if has_left else [rest])]


def _around(directory: Path, inside: list[Item], older_than: float, lock: Path | None) -> Iterator[Item]:
    """The parts of a run's directory whose kept models stay, without its lock and the items inside."""
    for path in _entries(directory):
        below = {item.path: item.num_bytes for item in inside if Path(item.path).is_relative_to(path)}
        if path.name != "lock" and str(path) not in below:
            needed_by = "a kept model" if path.name == CODE_FOLDER else None  # to predict with
            yield _item("logs", path, older_than, needed_by, lock, sum(below.values()))


def _damaged(home: Path, older_than: float) -> Iterator[Item]:
    """What failed its check, and what crashed processes left."""
    for place in (
        f"*/{ASIDE}*",
        f"runs/*/{ASIDE}*",
        "prepared/.damaged-*",
        "*.unfinished",
        "runs/*/checkpoints/*.damaged",
        "runs/*/measured/*.damaged",
    ):
        for name in iglob(place, root_dir=home):  # noqa: PTH207  Path.glob fails where a directory vanishes
            yield _item("damaged files", home / name, older_than)
    for path in (home / "models").glob(".*"):  # of a process that was killed while it fetched a model
        if not path.name.startswith(ASIDE):
            yield _item("damaged files", path, 1.0)
    for path in store.find_stale(home):
        yield _item("prepared sets", path, older_than)


def _logs(home: Path, older_than: float, busy: str | None) -> Iterator[Item]:
    for path in _entries(home / "slurm"):  # a job of run.sbatch locks its directory, certificates included
        yield _item("logs", path, older_than, PROCESS if is_locked(path) else busy)
    for path in (home / "services" / "logs").glob("*.log*"):
        if path.suffix != ".log":
            yield _item("logs", path, older_than)
        elif path.stat().st_size > LONG_LOG:
            yield Item(kind="logs", path=str(path), num_bytes=path.stat().st_size - LOG_END)
