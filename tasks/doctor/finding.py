"""Findings of an examination."""

from typing import Literal

from paceline.tasks.records.record import Record

Status = Literal["ok", "warning", "error"]


class Finding(Record):
    """The outcome of one check."""

    check: str
    status: Status
    found: str  # what is there
    remedy: str | None = None  # what to do about it; None where nothing needs to be done


def good(check: str, observed: str) -> Finding:
    """A finding without a remedy."""
    return Finding(check=check, status="ok", found=observed)


def doubtful(check: str, observed: str, remedy: str) -> Finding:
    """A finding that makes runs slower or less certain."""
    return Finding(check=check, status="warning", found=observed, remedy=remedy)


def bad(check: str, observed: str, remedy: str) -> Finding:
    """A finding that makes runs fail or makes their results wrong."""
    return Finding(check=check, status="error", found=observed, remedy=remedy)
