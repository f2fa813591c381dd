"""A set of services as infra/up starts it, on ports of its own and with a home that everybody may pass through."""

import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from infra.services.daemon import Daemon
from infra.services.home import Home, free_port

ROOT = Path(__file__).parents[2]
NAMES = ("postgres", "prefect", "mlflow", "scheduler", "workers")
PORTS = ("postgres", "prefect", "mlflow", "scheduler", "dashboard", "proxy")
COMMAND_SECONDS = 400
NOT_ROOT = pwd.getpwnam("daemon").pw_uid
AS_USER = ["unshare", "--user", f"--map-user={NOT_ROOT}", f"--map-group={NOT_ROOT}"] if os.geteuid() == 0 else []
"""In front of a command: it is not root, with the rights of this user, who may be the only one with this Python."""


class Services:
    """A set, running or not.

    Args:
        home: of the set.
        num_workers: of Dask.
        ports: that are chosen for it.
    """

    def __init__(self, home, num_workers=2, ports=PORTS):
        self.home = Home(home)
        self._arguments = ["--workers", str(num_workers)]
        for name in ports:
            self._arguments += ["--port", f"{name}={free_port()}"]

    def up(self, *arguments):
        """infra/up, with what the set was told the first time."""
        return self.command("up", *self._arguments, *arguments)

    def down(self):
        """infra/down."""
        return self.command("down")

    def command(self, name, *arguments):
        """One of the scripts, to its end."""
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
def passable_directory():
    """A temporary directory that everybody may pass through, as PostgreSQL's user must where tests run as root."""
    with tempfile.TemporaryDirectory(prefix="paceline-services-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o711)
        yield Path(place)


@contextmanager
def started():
    """A set that runs while the body does."""
    with passable_directory() as place:
        made = Services(place / "services")
        try:
            begun = made.up()
            assert begun.returncode == 0, begun.stderr
            yield made
        finally:
            for name in NAMES:  # shown where a test has failed
                sys.stderr.write(f"--- {name}\n{made.daemon(name).final_error()}\n")
            made.down()


class Supervised:
    """Files of infra/up for systemd and compose, for a site with every service.

    Args:
        place: existing.
    """

    def __init__(self, place):
        self.user = "daemon" if AS_USER else pwd.getpwuid(os.geteuid()).pw_name
        self.paceline_home = place / "paceline"
        self.home = Home(self.paceline_home / "services")
        self.units, self.compose = place / "units", place / "compose.yaml"
        self._place = place
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(place), "USER": self.user}
        for directory in (self.home.root / "serve", self.home.root / "proxy"):
            self.run(["mkdir", "-p", directory])
        small = "data.image_size=16 model.width=4 recipe.num_epochs=1"
        (self.home.root / "serve" / "nightly").write_text(f'digits {small} --cron "0 2 * * *" --overlap skip\n')
        options = ["--workers", "1", "--domain", "example.com", "--pool", "paceline", "--backups", place / "backups"]
        for name in PORTS:
            options += ["--port", f"{name}={free_port()}"]
        command = [ROOT / "infra" / "up", "--home", self.home.root, *options]
        self.run([*command, "--units", self.units, "--compose", self.compose])

    def run(self, command):
        """A command to its end, as the user of the services."""
        known = {"PYTHON": sys.executable, "PACELINE_HOME": str(self.paceline_home)}
        known |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        known |= self._environment
        done = subprocess.run([*AS_USER, *command], env=known, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def secrets(self):
        """The values of all secrets."""
        return [path.read_text().strip() for path in self.home.secrets.iterdir()]

    def commands(self):
        """The words of `ExecStart` of each unit, in the order of `After`."""
        return {name: self._words(text, "ExecStart") for name, text in self._ordered()}

    def make_proxy_certificate(self):
        """One for the names of the site."""
        proxy = self.home.root / "proxy"
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        made += ["-subj", "/CN=x", "-addext", "subjectAltName=DNS:prefect.example.com,DNS:mlflow.example.com"]
        made += ["-keyout", proxy / "key.pem", "-out", proxy / "cert.pem"]
        self.run(made)

    @contextmanager
    def all_started(self):
        """The processes of all services, as systemd would start them, while the body runs."""
        with ExitStack() as stack:
            processes = {}
            for name, text in self._ordered():
                environment = dict(self._words(text, "Environment", every=True, separator="="))
                options = {"env": self._environment | environment, "cwd": "/"}
                start = [*AS_USER, *self._words(text, "ExecStart")]
                if "Type=oneshot" in text:
                    subprocess.run(start, check=True, **options)
                    continue
                log = stack.enter_context((self._place / f"{name}.log").open("wb"))
                process = subprocess.Popen(start, stdout=log, stderr=log, start_new_session=True, **options)
                stack.callback(self._end, process, re.search(r"^KillSignal=(\w+)", text, re.MULTILINE)[1])
                if check := self._words(text, "ExecStartPost"):
                    subprocess.run([*AS_USER, *check], check=True, **options)
                processes[name] = process
            try:
                yield processes
            except BaseException:
                for name in processes:
                    sys.stderr.write(f"--- {name}\n{(self._place / f'{name}.log').read_text()[-3000:]}\n")
                raise

    def deployments(self):
        """The names of those that Prefect has."""
        settings, secret = self.home.settings(), (self.home.secrets / "prefect_password").read_text().strip()
        url = f"http://127.0.0.1:{settings.ports['prefect']}/api/deployments/filter"
        return [found["name"] for found in httpx.post(url, json={}, auth=("paceline", secret), timeout=30).json()]

    def _ordered(self):
        texts = {path.stem.removeprefix("paceline-"): path.read_text() for path in self.units.glob("*.service")}
        after = {
            name: set(re.findall(r"paceline-([\w-]+)\.service", self._line(text, "After")))
            for name, text in texts.items()
        }
        done = []
        while len(done) < len(texts):
            done += sorted(name for name, others in after.items() if name not in done and others <= set(done))
        return [(name, texts[name]) for name in done]

    @staticmethod
    def _line(text, key):
        found = re.search(rf"^{key}=(.*)$", text, re.MULTILINE)
        return found[1] if found else ""

    def _words(self, text, key, every=False, separator=None):
        if every:
            return [
                shlex.split(line)[0].split(separator, 1) for line in re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
            ]
        return shlex.split(self._line(text, key))

    @staticmethod
    def _end(process, name):
        process.send_signal(signal.Signals[name])
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def supervised():
    """A site for supervisors."""
    with passable_directory() as place:
        yield Supervised(place)
