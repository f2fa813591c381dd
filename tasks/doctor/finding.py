"""What an examination says. A leaf of this stage."""

from __future__ import annotations

from typing import Literal

from paceline.tasks.records import Record

Status = Literal["ok", "warning", "error"]


class Finding(Record):
    """The outcome of one check."""

    check: str
    status: Status
    found: str
    """What is there."""
    remedy: str | None = None
    """What to do about it; None where nothing needs to be done."""


def good(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, status="ok", found=found)


def doubtful(check: str, found: str, remedy: str) -> Finding:
    """A run works, and something of it is worse than it need be."""
    return Finding(check=check, status="warning", found=found, remedy=remedy)


def bad(check: str, found: str, remedy: str) -> Finding:
    """A run does not work, or cannot be trusted."""
    return Finding(check=check, status="error", found=found, remedy=remedy)
