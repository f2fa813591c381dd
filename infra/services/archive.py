"""A set in one file, and back: databases, artifacts, secrets and certificates. The file is as secret as they are.

The last member of the file is the sha256 of everything before it.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import IO, cast

from packaging.version import Version
from pydantic import ValidationError

from infra.services.daemon import Daemon
from infra.services.home import LOOPBACK, OWN_ONLY, Home, free_port, is_free
from infra.services.postgres import DATABASES
from infra.services.site import Site
from infra.services.start import MIGRATED, start, wait
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.records.record import Record

FORMAT, ABOUT, DUMPS, DIGEST = 2, "about.json", "databases", "sha256"
KEPT = ("secrets", "tls", "settings.json", "artifacts", "serve", "proxy")
PATTERN = f"paceline-{'[0-9]' * 8}T{'[0-9]' * 6}.tar"
TIME_FORMAT = "paceline-%Y%m%dT%H%M%S.tar"
RETRY_SECONDS, WAIT_SECONDS, STOP_SECONDS = 60.0, 60.0, 30.0
DIGEST_BYTES = 64


class About(Record):
    """What a backup is of."""

    format: int
    paceline: str
    host: str
    """Name of the host that made it."""
    versions: dict[str, str]
    """Of the servers whose databases it has: newer databases cannot be used by older servers."""


class _Digesting:
    """Passes on what is written, and hashes it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.tell, self.sha256 = stream, stream.tell, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._stream.write(data)


def back_up(site: Site, path: Path) -> int:
    """Write an archive of a set that runs; its size in bytes.

    Databases first: what they name among the artifacts is there by then, and artifacts are not changed afterwards.

    Raises InputError: the archive is there already, or PostgreSQL does not run.
    """
    home = site.home
    if path.exists():
        raise InputError(f"{path} exists, and nothing is overwritten; name another file")
    if not site.postgres.runs:
        raise InputError(f"the services of {home.root} do not run, and the databases are asked; infra/up first")
    about = About(
        format=FORMAT,
        paceline=metadata.version("paceline"),
        host=socket.gethostname(),
        versions=home.settings().versions | {"postgresql": _postgresql(site)},
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(dir=home.work) as place:
            site.postgres.dump_all(Path(place) / DUMPS)
            (Path(place) / ABOUT).write_text(about.model_dump_json(), encoding="utf-8")
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWN_ONLY)
            with os.fdopen(descriptor, "wb") as stream:
                digesting = _Digesting(stream)
                with tarfile.open(fileobj=cast(IO[bytes], digesting), mode="w") as archive:
                    for name in (ABOUT, DUMPS):
                        archive.add(Path(place) / name, name)
                    for name in KEPT:
                        if (home.root / name).exists():
                            archive.add(home.root / name, name)
                    digest = tarfile.TarInfo(DIGEST)
                    digest.size = DIGEST_BYTES
                    archive.addfile(digest, io.BytesIO(digesting.sha256.hexdigest().encode()))
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


def keep_newest(directory: Path, num_backups: int) -> list[Path]:
    """Remove all but the newest backups of a directory; those removed."""
    removed = sorted(directory.glob(PATTERN))[:-num_backups]
    for path in removed:
        path.unlink()
    return removed


def next_night(directory: Path, hour: int, now: datetime) -> datetime:
    """When the next backup is due: the first time that it is this hour after the newest one; at once without any."""
    newest = max(directory.glob(PATTERN), default=None)
    if newest is None:
        return now
    made = datetime.strptime(newest.name, TIME_FORMAT).astimezone()
    due = made.replace(hour=hour, minute=0, second=0)
    return due if due > made else due + timedelta(days=1)


def every_night(directory: Path, hour: int, back_up_once: Callable[[], None], say: Callable[[str], None]) -> None:
    """Make backups until a signal comes. One that failed is tried again: this process must outlive a full disk."""
    while True:
        now = datetime.now().astimezone()
        if next_night(directory, hour, now) <= now:
            try:
                back_up_once()
            except (InputError, RunError) as error:
                say(f"no backup was made, and Paceline tries again: {error}")
        time.sleep(RETRY_SECONDS)


def check(path: Path) -> About:
    """Read a backup from end to end. Raises InputError: it is none, is cut or changed, or of another format."""
    another = "make another with infra/backup, or name an older one"
    try:
        with path.open("rb") as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                members = archive.getmembers()
                about = json.loads(_read(archive, ABOUT))
                if about["format"] != FORMAT:
                    version = about.get("paceline")
                    fault = f"{path} is of format {about['format']} by Paceline {version}, and this one reads {FORMAT}"
                    raise InputError(f"{fault}; restore it with Paceline {version}, then make a new one")
                if members[-1].name != DIGEST:
                    raise InputError(f"{path} is cut: its digest is missing; {another}")
                digest, end = _read(archive, DIGEST), members[-1].offset
            size = -(-(end + 4 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
            if stream.seek(0, os.SEEK_END) != size:
                raise InputError(f"{path} is cut: it has {stream.tell()} bytes of {size}; {another}")
            stream.seek(0)
            sha256 = hashlib.sha256()
            while end > 0 and (block := stream.read(min(end, 2**20))):
                sha256.update(block)
                end -= len(block)
        if sha256.hexdigest().encode() != digest:
            raise InputError(f"{path} is damaged: its content has not the digest that it had; {another}")
        return About.model_validate(about)
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError, ValidationError) as error:
        raise InputError(f"{path} is not a complete archive of infra/backup ({one_line(error)}); {another}") from error


def restore(site: Site, path: Path, *, overwrite: bool, other_host: bool) -> Path | None:
    """Make a set, which does not run, be what an archive holds; returns where the one before lies, if there was one.

    Everything is restored next to the home and replaces it only when it is complete. With `overwrite` a set that is
    there is put aside. Raises InputError: the file is not a complete archive of infra/backup, it is of newer servers
    or, without `other_host`, of another host; or the home already holds services.
    """
    home = site.home
    about = check(path)
    if home.root.exists() and any(home.root.iterdir()) and not overwrite:
        raise InputError(f"--home {home.root} is not empty; name another, or say --overwrite, which puts it aside")
    here = {name: metadata.version(name) for name in MIGRATED} | {"postgresql": _postgresql(site)}
    for name, version in about.versions.items():
        if Version(version) > Version(here.get(name, version)):
            raise InputError(f"{path} is of {name} {version}, and here is {here[name]}; install {name} {version} first")
    if about.host != socket.gethostname() and not other_host:
        raise InputError(
            f"{path} is of host {about.host}, and this is {socket.gethostname()}: two hosts would have the same "
            "secrets and schedules; stop the services there, then add --other-host"
        )
    made = Home(home.root.with_name(f"{home.root.name}.restoring"))
    shutil.rmtree(made.root, ignore_errors=True)
    try:
        made.make()
        with tarfile.open(path) as archive:
            archive.extractall(made.root, filter="data")  # nothing leaves the directory, nothing is run
        made.make()  # directories that the archive brought have their modes again
        (made.root / DIGEST).unlink()
        (made.root / ABOUT).unlink()
        settings = made.settings()
        if not is_free(0, settings.host):
            made.keep(settings.model_copy(update={"host": LOOPBACK}))
        _fill(made, site.paceline_home)
    except BaseException:
        shutil.rmtree(made.root, ignore_errors=True)
        raise
    aside = None
    if home.root.exists():
        aside = home.root.with_name(f"{home.root.name}.before-{time.strftime('%Y%m%dT%H%M%S')}")
        home.root.rename(aside)
    made.root.rename(home.root)
    return aside


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is no file")
    return stream.read()


def _postgresql(site: Site) -> str:
    """Major version of PostgreSQL."""
    command = [site.postgres.program("pg_dump"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2].partition(".")[0]


def _fill(made: Home, paceline_home: Path) -> None:
    """A new cluster of PostgreSQL with what was dumped, on a port that is used for this alone."""
    settings = made.settings()
    ports = {**settings.ports, "postgres": free_port()}
    site = Site(made, settings.model_copy(update={"ports": ports}), paceline_home)
    service = site["postgres"]
    start(site, service, lambda line: None)
    try:
        wait(site, service, WAIT_SECONDS)
        site.postgres.open_databases()
        for database in DATABASES:
            site.postgres.fill(database, made.root / DUMPS / f"{database}.dump")
    finally:
        Daemon("postgres", made).end(signal.Signals[service.stop_signal], STOP_SECONDS)
    shutil.rmtree(made.root / DUMPS)
