"""PostgreSQL as one cluster of a set's own: made, opened for each service's role, dumped and filled.

It listens on loopback alone, whatever the others listen on, and knows nobody without a password (SCRAM).
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from infra.services.daemon import wait_until
from infra.services.home import LOOPBACK, PRIVATE, Home
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.host import started_at

if TYPE_CHECKING:
    from psycopg import Connection

DEBIAN = Path("/usr/lib/postgresql")
SUPERUSER = "postgres"
UNPRIVILEGED = "postgres"  # the user of Debian's package, as which it runs where root calls: it refuses to be root
DATABASES = {"prefect": "prefect", "mlflow": "mlflow", "mlflow_auth": "mlflow"}  # and the role that owns each
LEFT_SECONDS = 20.0


def user() -> str | None:
    """As which user PostgreSQL runs; None for the one who calls. Raises InputError: root calls, and it is missing."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(UNPRIVILEGED)
    except KeyError as error:
        fault = f"PostgreSQL does not run as root, and there is no user {UNPRIVILEGED}"
        raise InputError(f"{fault}; on Debian: apt-get install postgresql") from error
    return UNPRIVILEGED


class Postgres:
    """The cluster of a set."""

    def __init__(self, home: Home, port: int) -> None:
        self._home, self._port = home, port
        self._data = home.database / "data"

    def prepare(self) -> None:
        """Make it if need be, wait for the children of a server that was killed, and take away its lock.

        A new server would not start next to them. PostgreSQL takes a lock for a dead server's own only when nothing at
        all has its process id; a zombie, which stays where the first process does not collect it, as in many
        containers, is something.
        """
        if not (self._data / "PG_VERSION").is_file():
            self._make()
        if not wait_until(lambda: not any(_works_in(each, self._data) for each in psutil.process_iter()), LEFT_SECONDS):
            return
        lock = self._data / "postmaster.pid"
        with suppress(FileNotFoundError, ValueError, IndexError):
            if started_at(int(lock.read_text(encoding="utf-8").splitlines()[0])) is None:
                lock.unlink()

    def check(self) -> None:
        """Raise an error unless it answers."""
        self._connect().close()

    @property
    def runs(self) -> bool:
        """Whether it answers, whoever has started it."""
        try:
            self.check()
        except Exception:  # noqa: BLE001  of the driver, or the password is not there yet
            return False
        return True

    def dump_all(self, directory: Path) -> None:
        """Write each database, as it is at one moment, to a file of its own in PostgreSQL's compressed format."""
        directory.mkdir(mode=PRIVATE)
        for database in DATABASES:
            path = directory / f"{database}.dump"
            self._client("pg_dump", database, "--format=custom", "--no-owner", f"--file={path}")

    def open_databases(self) -> None:
        """Make roles and databases that are not there yet, and let each role's password be that of the home."""
        from psycopg import sql

        with self._connect() as connection:
            for role in sorted(set(DATABASES.values())):
                name = sql.Identifier(role)
                if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone():
                    connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
                # Its hash, made here: a password in a statement may end in the server's log.
                hashed = connection.pgconn.encrypt_password(
                    self._password(role).encode(), role.encode(), b"scram-sha-256"
                ).decode()
                connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, sql.Literal(hashed)))
            for database, role in DATABASES.items():
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database]).fetchone():
                    statement = sql.SQL("CREATE DATABASE {} OWNER {}")
                    connection.execute(statement.format(sql.Identifier(database), sql.Identifier(role)))

    def fill(self, database: str, path: Path) -> None:
        """Fill an empty database with what was dumped."""
        self._client("pg_restore", database, "--no-owner", "--exit-on-error", str(path))

    def _client(self, program: str, database: str, *arguments: str) -> None:
        role = DATABASES[database]
        command = [self.program(program), f"--host={LOOPBACK}", f"--port={self._port}", f"--username={role}"]
        command += [f"--dbname={database}", *arguments]
        _run(f"{program} of database {database}", command, PGPASSWORD=self._password(role))

    def _password(self, role: str) -> str:
        return self._home.secret("postgres_password" if role == SUPERUSER else f"{role}_database_password")

    def _connect(self) -> "Connection":
        import psycopg

        return psycopg.connect(
            host=LOOPBACK,
            port=self._port,
            user=SUPERUSER,
            dbname="postgres",
            password=self._password(SUPERUSER),
            connect_timeout=5,
            autocommit=True,
        )

    def _make(self) -> None:
        self._home.database.mkdir(exist_ok=True)
        self._home.database.chmod(PRIVATE)
        if (owner := user()) is not None:
            shutil.chown(self._home.database, owner, owner)
            try:
                _run("test", ["test", "-w", str(self._home.database)], owner)
            except RunError as error:
                raise InputError(
                    f"--home {self._home.root} lies where user {owner} cannot go, as whom PostgreSQL runs; "
                    "name another, such as /var/lib/paceline, or open the directories above for passing (chmod a+x)"
                ) from error
        with tempfile.TemporaryDirectory(dir=self._home.database) as place:
            path = Path(place) / "password"  # only the user who runs PostgreSQL can read it
            path.touch(0o600)
            path.write_text(self._password(SUPERUSER), encoding="utf-8")
            if owner is not None:
                for location in (path, path.parent):
                    shutil.chown(location, owner, owner)
            command = [self.program("initdb"), "-D", str(self._data), f"--username={SUPERUSER}", f"--pwfile={path}"]
            command += ["--auth-local=reject", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]
            try:
                _run("initdb", [*command, "--data-checksums"], owner)
            except RunError:
                shutil.rmtree(self._data, ignore_errors=True)
                raise

    def program(self, name: str) -> str:
        """The path of a program, of the data's major version or the newest; Debian does not put them on PATH.

        Raises InputError: it is not there.
        """
        version = None
        with suppress(FileNotFoundError, PermissionError):  # not made yet, or a directory of another user's
            version = (self._data / "PG_VERSION").read_text(encoding="utf-8").strip()
        versions = {path.name: path / "bin" / name for path in DEBIAN.glob("*") if (path / "bin" / name).is_file()}
        if version is not None and versions and version not in versions:
            raise InputError(
                f"the data is of PostgreSQL {version}, and only {', '.join(sorted(versions))} is installed; install "
                f"postgresql-{version}, infra/backup with it, and infra/restore the archive into a new --home"
            )
        if versions:
            return str(versions[version or max(versions, key=float)])
        program = shutil.which(name)
        if program is None:
            raise InputError(f"PostgreSQL's {name} is not installed; on Debian, as root: apt-get install postgresql")
        return program


def _works_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return Path(process.cwd()) == directory
    except (psutil.Error, OSError):
        return False


def _run(name: str, command: list[str], owner: str | None = None, **variables: str) -> None:
    """Run a program of PostgreSQL, as a user or as the one who calls. Raises RunError: it failed."""
    done = subprocess.run(
        command,
        env=environment() | variables,
        cwd="/",
        user=owner,
        group=owner,
        extra_groups=[] if owner else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RunError(f"{name} failed: {one_line(Exception(done.stderr))[:500]}")


def environment() -> dict[str, str]:
    """None of the caller's settings, and no secrets."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
