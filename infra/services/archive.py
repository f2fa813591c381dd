"""A set in one file, and back: databases, artifacts, secrets and certificates. The file is as secret as they are."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path

from infra.services.home import OWN_ONLY, PRIVATE, Home, free_port
from infra.services.postgres import DATABASES, Postgres
from paceline.tasks.errors import InputError, RunError, one_line

FORMAT, ABOUT, DUMPS = 1, "about.json", "databases"
KEPT = ("secrets", "tls", "settings.json", "artifacts")
WAIT_SECONDS = 60.0


def dump_databases(postgres: Postgres, directory: Path) -> None:
    """Write each database to a file of its own."""
    directory.mkdir(mode=PRIVATE)
    for database in DATABASES:
        postgres.dump(database, directory / f"{database}.dump")


def back_up(home: Home, path: Path) -> int:
    """Write an archive of a set that runs; its size in bytes.

    Databases first: what they name among the artifacts is there by then, and artifacts are not changed afterwards.

    Raises InputError: the archive is there already, or PostgreSQL does not run.
    """
    if path.exists():
        raise InputError(f"{path} exists, and nothing is overwritten; name another file")
    postgres = Postgres(home, home.settings().ports["postgres"])
    if postgres.daemon.pid() is None:
        raise InputError(f"the services of {home.root} do not run, and the databases are asked; infra/up first")
    about = {"format": FORMAT, "paceline": metadata.version("paceline"), **home.settings().versions}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(dir=home.work) as place:
            dump_databases(postgres, Path(place) / DUMPS)
            (Path(place) / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWN_ONLY)
            with os.fdopen(descriptor, "wb") as stream:
                with tarfile.open(fileobj=stream, mode="w|") as archive:
                    for name in (ABOUT, DUMPS):
                        archive.add(Path(place) / name, name)
                    for name in KEPT:
                        archive.add(home.root / name, name)
                stream.flush()
                os.fsync(stream.fileno())
        temporary.rename(path)
    except OSError as error:
        raise RunError(
            f"{path} could not be written ({one_line(error)}); free the disk or name another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def restore(home: Home, path: Path, *, overwrite: bool) -> Path | None:
    """Make a set, which does not run, be what an archive holds; returns where the one before lies, if there was one.

    Everything is restored next to the home and replaces it only when it is complete. With `overwrite` a set that is
    there is put aside. Raises InputError: the file is not an archive, or the home already holds services.
    """
    if home.root.exists() and any(home.root.iterdir()) and not overwrite:
        raise InputError(f"--home {home.root} is not empty; name another, or say --overwrite, which puts it aside")
    made = Home(home.root.with_name(f"{home.root.name}.restoring"))
    shutil.rmtree(made.root, ignore_errors=True)
    try:
        made.make()
        _unpack(path, made)
        _fill(made)
    except BaseException:
        shutil.rmtree(made.root, ignore_errors=True)
        raise
    aside = None
    if home.root.exists():
        aside = home.root.with_name(f"{home.root.name}.before-{time.strftime('%Y%m%dT%H%M%S')}")
        home.root.rename(aside)
    made.root.rename(home.root)
    return aside


def _unpack(path: Path, made: Home) -> None:
    try:
        with tarfile.open(path) as archive:
            archive.extractall(made.root, filter="data")  # nothing leaves the directory, nothing is run
        about = json.loads((made.root / ABOUT).read_text(encoding="utf-8"))
    except (OSError, tarfile.TarError, ValueError) as error:
        raise InputError(f"{path} is not an archive of infra/backup ({one_line(error)}); name another") from error
    if about["format"] != FORMAT:
        raise InputError(
            f"{path} is of format {about['format']}, and {FORMAT} is read; restore it with its own version"
        )
    made.make()  # directories that the archive brought have their modes again


def _fill(made: Home) -> None:
    """A new cluster of PostgreSQL with what was dumped, on a port that is used for this alone."""
    postgres = Postgres(made, free_port())
    postgres.start()
    try:
        postgres.daemon.wait(postgres.check, WAIT_SECONDS)
        postgres.open_databases()
        for database in DATABASES:
            postgres.fill(database, made.root / DUMPS / f"{database}.dump")
    finally:
        postgres.end()
    shutil.rmtree(made.root / DUMPS)
    (made.root / ABOUT).unlink()
