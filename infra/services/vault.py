"""Secrets, created once and stored by name in private files. They are never printed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.tasks.errors import InputError
from paceline.tasks.files import write_durably

OWN_ONLY = 0o600
OTHERS = 0o077
NUM_BYTES = 32
NAMES = (
    "postgres_password",
    "prefect_database_password",
    "mlflow_database_password",
    "prefect_password",
    "mlflow_admin_password",
    "mlflow_password",
    "mlflow_secret_key",
)


class Vault:
    """The secrets in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fill(self) -> None:
        """Make the secrets that are not there yet."""
        for name in NAMES:
            if not self._path(name).exists():
                write_privately(self._path(name), secrets.token_urlsafe(NUM_BYTES))  # safe in URIs and shells too

    def __getitem__(self, name: str) -> str:
        """A secret.

        Raises:
            InputError: it is missing, or others can read it.
        """
        path = self._path(name)
        try:
            if path.stat().st_mode & OTHERS:
                raise InputError(f"{path} can be read by others; chmod 600 it, and think about a new secret")
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing; bring it back with infra/restore") from error

    def _path(self, name: str) -> Path:
        return self._directory / name


def write_privately(path: Path, text: str) -> None:
    """Write a file that nobody else can read, at no time."""
    before = os.umask(OTHERS)
    try:
        write_durably(path, text.encode())
    finally:
        os.umask(before)
    path.chmod(OWN_ONLY)
