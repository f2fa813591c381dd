"""Removal of items. A directory is renamed before it is deleted, so that a crash leaves it complete or set aside."""

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

from paceline.tasks.clean.survey import ASIDE, LOG_END, PROCESS, Item, survey
from paceline.tasks.errors import InputError
from paceline.tasks.files import exclusive, is_full, write_pieces
from paceline.tasks.records.record import Record
from paceline.tasks.track.queries import take_inventory

FULL = "the disk is full"


def remove(items: Iterable[Item]) -> list[Item]:
    """Remove the items without a reason to stay; return all, with the reasons of those that could not be removed."""
    tried = [item if item.stays else item.model_copy(update={"stays": _remove(item)}) for item in items]
    # Some file systems need space for a rename, which there may be now.
    return [item.model_copy(update={"stays": _remove(item)}) if item.stays == FULL else item for item in tried]


def _remove(item: Item) -> str | None:
    """Remove an item; return why it stays."""
    path = Path(item.path)
    try:
        with exclusive(Path(item.lock)) if item.lock else nullcontext():
            if path.match("services/logs/*.log"):  # its end goes to a second file: a service that runs appends to it
                with path.open("rb") as log:
                    log.seek(-LOG_END, os.SEEK_END)
                    write_pieces(path.with_suffix(".log.1"), (log.read(),), durably=False)
                os.truncate(path, 0)
                return None
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                return None
            aside = path
            if not path.name.startswith(ASIDE):
                aside = path.rename(path.with_name(f"{ASIDE}{path.name}-{uuid4().hex[:8]}"))
        shutil.rmtree(aside)
    except BlockingIOError:
        return f"{PROCESS} needs it"
    except FileNotFoundError:  # another clean-up was faster
        return None
    except OSError as error:
        return FULL if is_full(error) else f"it cannot be removed ({error.strerror})"
    return None


class CleanUp(Record):
    """Items of a clean-up."""

    dry_run: bool
    items: tuple[Item, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes that the removed items had."""
        return sum(item.num_bytes for item in self.items if not item.stays)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Kind, number of items, MiB and outcome, the removed items first."""
        removed = "would be removed" if self.dry_run else "removed"
        sums = defaultdict[tuple[bool, str, str], list[int]](list)
        for item in self.items:
            sums[item.stays is not None, item.kind, item.stays or removed].append(item.num_bytes)
        return [
            (kind, str(len(sizes)), f"{sum(sizes) / 2**20:,.1f}", f"stays: {outcome}" if stays else outcome)
            for (stays, kind, outcome), sizes in sorted(sums.items())
        ]


def clean_home(home: Path, tracking_uri: str, keep: int, older_than: float, *, dry_run: bool = False) -> CleanUp:
    """Remove from a state directory what nothing needs, but not what the `keep` newest trainings use.

    Raises InputError: a number is negative, or MLflow, which knows the runs, does not answer.
    """
    for option, number, default in (("--keep", keep, 10), ("--older-than", older_than, 0)):
        if not 0 <= number < math.inf:
            raise InputError(f"{option} {number} is not 0 or more", hint=f"use {option} {default}", setting=option)
    items = survey(home, take_inventory(tracking_uri), keep, older_than)
    return CleanUp(dry_run=dry_run, items=tuple(items if dry_run else remove(items)))
