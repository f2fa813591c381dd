"""A set of services as infra/up starts it, on ports of its own and with a home that everybody may pass through."""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from infra.services.daemon import Daemon
from infra.services.home import Home, free_port

ROOT = Path(__file__).parents[2]
NAMES = ("postgres", "prefect", "mlflow", "scheduler", "workers")
PORTS = ("postgres", "prefect", "mlflow", "scheduler", "dashboard")
COMMAND_SECONDS = 400


class Services:
    """A set, running or not.

    Args:
        home: of the set.
        num_workers: of Dask.
    """

    def __init__(self, home, num_workers=2):
        self.home = Home(home)
        self._arguments = ["--workers", str(num_workers)]
        for name in PORTS:
            self._arguments += ["--port", f"{name}={free_port()}"]

    def up(self, *arguments):
        """infra/up, with what the set was told the first time."""
        return self.command("up", *self._arguments, *arguments)

    def down(self):
        """infra/down."""
        return self.command("down")

    def command(self, name, *arguments):
        """One of the four scripts, to its end."""
        return subprocess.run(
            [ROOT / "infra" / name, "--home", self.home.root, *arguments],
            env=os.environ | {"PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )

    def daemon(self, name):
        """The process of a service."""
        return Daemon(name, self.home)

    def family(self):
        """All processes of the set."""
        return [process for name in NAMES for process in self.daemon(name).family()]

    def environment(self):
        """What a shell has after it has read the set's file."""
        shell = ["bash", "-c", 'env -i bash -c ". $1; env -0" bash "$1"', "bash", self.home.environment]
        text = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        variables = dict(line.partition("=")[::2] for line in text.split("\0") if line)
        return {
            name: value for name, value in variables.items() if name.startswith(("PACELINE_", "PREFECT_", "MLFLOW_"))
        }

    def secrets(self):
        """All secrets, by name."""
        return {path.name: path.read_text().strip() for path in self.home.secrets.iterdir() if path.suffix != ".ini"}


@contextmanager
def started():
    """A set that runs while the body does."""
    with tempfile.TemporaryDirectory(prefix="paceline-services-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o711)
        made = Services(Path(place) / "services")
        try:
            begun = made.up()
            assert begun.returncode == 0, begun.stderr
            yield made
        finally:
            for name in NAMES:  # shown where a test has failed
                sys.stderr.write(f"--- {name}\n{made.daemon(name).final_error()}\n")
            made.down()
