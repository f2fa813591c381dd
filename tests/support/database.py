"""A PostgreSQL that can be killed, and come back with all that it held."""

import subprocess

from infra.services.home import LOOPBACK, Home, free_port
from infra.services.postgres import Postgres, user
from tests.support.patience import until


class Database:
    """A cluster on a free port of loopback.

    Args:
        place: that does not exist yet.
    """

    def __init__(self, place):
        self._home = Home(place)
        self._home.make()
        self._home.make_secrets()
        self._port = free_port()
        self._postgres = Postgres(self._home, self._port)
        self.open_databases = self._postgres.open_databases

    @property
    def uri(self):
        """Of Prefect's database."""
        password = self._home.secret("prefect_database_password")
        return f"postgresql+asyncpg://prefect:{password}@{LOOPBACK}:{self._port}/prefect"

    def start(self):
        """Start it, and wait until it answers."""
        self._postgres.prepare()
        command = [self._postgres.program("postgres"), "-D", str(self._home.database / "data"), "-p", str(self._port)]
        command += ["-c", f"listen_addresses={LOOPBACK}", "-c", "unix_socket_directories="]
        with (self._home.logs / "postgres.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd="/", stdout=log, stderr=log, start_new_session=True, user=user(), group=user()
            )
        until(lambda: self._postgres.runs, "database", seconds=60)

    def kill(self):
        """End it at once, as a power failure does. Its sessions end when they notice."""
        self._process.kill()
        self._process.wait(30)
